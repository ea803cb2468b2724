"""The child runs of one run in memory: started with their event, resumed, asked to stop."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from everstep.engine.code.commands import ChildCall
from everstep.engine.code.execution import Execution
from everstep.engine.code.start import Origin, new_run
from everstep.engine.history.clock import Clock
from everstep.engine.history.journal import Journal
from everstep.engine.history.verify import Recorded, check_ends, is_outcome_of, load_now
from everstep.errors import Damaged, UnknownRun
from everstep.model import events as ev
from everstep.model.accounts import standing_at
from everstep.model.budgets import Allotment, Standing, allotment_of
from everstep.model.digests import derived_key, digest_of
from everstep.model.events import ENDS
from everstep.model.status import ENDED
from everstep.model.untrusted import logger
from everstep.stores.protocol import Delivery, NewRun, Post, Store

log = logger("everstep.run")

RECENT_MAX: Final = 1024
"""The maximum number of ended runs driven here whose ends are remembered, each by the digest of its outcome."""


class _Seen(NamedTuple):
    """A remembered end. An outcome may be large, and is in the store."""

    status: str
    digest: bytes
    secret: bool


class ChildEnd(msgspec.Struct):
    """The value of a `child` delivery."""

    status: str
    outcome: msgspec.Raw = msgspec.Raw(b"null")
    secret: bool = False
    """Filled from the child's history."""
    budget: Standing | None = None


class RecentEnds:
    """The newest ends of runs without a budget that were driven here, as this process itself wrote them."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, _Seen] = OrderedDict()

    def note(self, run: str, status: str, outcome: bytes | None, secret: bool) -> None:
        """Remember that a run has ended here."""
        self._ends[run] = _Seen(status, digest_of(outcome or b"null"), secret)
        if len(self._ends) > RECENT_MAX:
            self._ends.popitem(last=False)

    def has(self, run: str, told: ChildEnd) -> bool:
        """Return True if a run ended here exactly as a delivery says; then the delivery is complete."""
        end = self._ends.get(run)
        if end is None or end.status != told.status or end.digest != digest_of(bytes(told.outcome)):
            return False
        told.secret, told.budget = end.secret, None
        return True


def believable_end(store: Store, delivery: Delivery, recent: RecentEnds) -> ChildEnd | None:
    """Return the end of a child from a delivery, as the child's own history has it.

    A delivery is only a copy. It counts if an end in the history says the same; otherwise the newest end there counts,
    and if there is none, nothing does. The end of a run that ended in this process need not be read again.
    """
    try:
        told: ChildEnd | None = msgspec.json.decode(delivery.value, type=ChildEnd)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        told = None
    if told is not None and recent.has(delivery.name, told):
        return told
    row = store.run(delivery.name)
    if row is None or (told is not None and told.status == "refused"):
        return told
    try:
        if row.status in ENDED and row.budget is None and (told is None or told.budget is None):
            end = check_ends(store, row)
            if told is not None and told.status == row.status and bytes(told.outcome) == (row.outcome or b"null"):
                told.secret = getattr(end.body, "secret", False)
                return told
        row, history = load_now(store, row)
    except UnknownRun:
        return told  # it had ended, and its end was delivered in the transaction in which this run followed it
    except Damaged as error:
        log.error("The end of run %s cannot be compared with its history: %s", delivery.name, error)
        return told
    for end in reversed([event for event in history if event.kind in ENDS]):
        if told is not None and end.kind == f"run_{told.status}" and is_outcome_of(end, _payload(told)):
            return _end_in(history, end, told.status, told.outcome)
    log.error("The delivered end of run %s is not in its history; the history counts.", delivery.name)
    if row.status in ENDED:
        return _end_in(history, history[-1], row.status, msgspec.Raw(row.outcome or b"null"))
    return told if row.generation > 1 else None  # it was restarted since, and delivered its end before


def _end_in(history: Sequence[Recorded], end: Recorded, status: str, outcome: msgspec.Raw) -> ChildEnd:
    """Return an end with the history's facts about it: whether it is secret, and the state of the budget."""
    standing = standing_at(history[: end.seq])
    budget = msgspec.json.decode(standing, type=Standing) if standing is not None else None
    return ChildEnd(status, outcome, getattr(end.body, "secret", False), budget)


def _payload(end: ChildEnd) -> bytes | None:
    return bytes(end.outcome) if end.status in ("completed", "failed") else None


def outlives_not(on_parent_end: str, *, is_cancelled: bool) -> bool:
    """Return True if a child is asked to stop when its parent ends; also one that the parent waits for, if
    cancelled.
    """
    return on_parent_end == "cancel" or (on_parent_end == "wait" and is_cancelled)


class ChildHost(Protocol):
    """What the children of a run need of the process that their parent runs in."""

    store: Store
    clock: Clock
    randomness: random.Random
    life: str

    def adopt(self, run: str) -> None:
        """Drive a child run that has just become durable."""

    def wake(self, run: str) -> None:
        """Something is in a run's inbox."""


class Children:
    """The driver's work on the children of its run."""

    def __init__(
        self,
        app: ChildHost,
        run: str,
        execution: Execution,
        journal: Journal,
        when_durable: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._app = app
        self._run = run
        self._execution = execution
        self._journal = journal
        self._when_durable = when_durable
        self._told_to_stop: set[str] = set()

    def start(self, call: ChildCall, allotted: Allotment | None = None) -> None:
        """Start a child, in the transaction of the event that is recorded next, with its part of the run's budget."""
        self._journal.attachments().starts.append(self._new_run(call, allotted or allotment_of(call.target.budget)))

    def take_up(self, calls: Iterable[ChildCall], *, tell_again: bool) -> None:
        """Resume children whose driver may have died with this run's last one.

        With `tell_again` a child that failed was retried too, and must deliver its end to this run again.
        """
        for call in calls:
            if tell_again:
                self.start(call)
            self._app.adopt(call.run)

    def _new_run(self, call: ChildCall, budget: Allotment | None) -> NewRun:
        app, execution = self._app, self._execution
        return new_run(
            call.target,
            call.run,
            call.arguments,
            at=app.clock.now(),
            randomness=app.randomness,
            parent=self._run,
            call=call.call,
            origin=Origin(
                app.store.chain.writing,
                life=app.life,
                unseen=execution.caution == "restored",
                # The entropy is derived, not random: if the start is lost with a restored backup, the child gets the
                # same keys again.
                entropy=derived_key(execution.entropy, f"#child {call.call} {call.run}"),
            ),
            budget=budget,
        )

    def cancel(self, child: str) -> None:
        """Ask a child to stop, in the transaction of the next event."""
        if child in self._told_to_stop:
            return
        self._told_to_stop.add(child)
        app = self._app
        request = ev.CancelRequested(reason=f"its parent {self._run} no longer waits for it", by=self._run)
        post = Post(child, "cancel", value=ev.encode_body(request), at=app.clock.now())
        self._journal.attachments().posts.append(post)
        self._when_durable(self._journal.seq + 1, lambda: app.wake(child))

    def cancel_those_that_end_with_it(self) -> None:
        """Ask the children to stop that should not outlive the run."""
        execution = self._execution
        is_cancelled = execution.cancel is not None or execution.rollback is not None
        for child in execution.children.values():
            if outlives_not(child.target.on_parent_end, is_cancelled=is_cancelled):
                self.cancel(child.run)
