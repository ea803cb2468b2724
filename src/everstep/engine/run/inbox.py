"""What reaches a run in memory: what arrives (signals, cancels, ends of children, holds), and what is due by its time.

Deadlines are timers, next attempts, the run's timeout, and the grace of a cancel.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from everstep.engine.run.children import ChildEnd, RecentEnds, believable_end
from everstep.engine.run.compensation import request_rollback
from everstep.engine.run.holds import HoldReport
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.stores.protocol import Delivery, Store
from everstep.stores.rows.keys import EffectRow

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


ROLLBACK: Final = "rollback"
"""The name of a `cancel` delivery that requests a rollback."""


def cancel_in(delivery: Delivery) -> ev.CancelRequested:
    """Return the request in a `cancel` delivery. A cancel is never lost, even if its details are damaged."""
    try:
        request = msgspec.json.decode(delivery.value, type=ev.CancelRequested)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        request = ev.CancelRequested()
    request.number = delivery.number
    return request


def rollback_in(delivery: Delivery) -> ev.RollbackRequested:
    """Return the request in a rollback's delivery; if its details are damaged, one that allows nothing."""
    try:
        request = msgspec.json.decode(delivery.value, type=ev.RollbackRequested)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        request = ev.RollbackRequested()
    request.number = delivery.number
    return request


def hold_in(delivery: Delivery) -> HoldReport:
    """Return the report for a `hold` delivery, even if its details are damaged."""
    try:
        return msgspec.json.decode(delivery.value, type=HoldReport)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return HoldReport("asked", "it was requested, and the request's details are damaged")


def first_hold(deliveries: Sequence[Delivery]) -> Delivery | None:
    """Return the hold among deliveries, unless a cancel was asked for before it."""
    first = next((one for one in deliveries if one.kind in ("hold", "cancel")), None)
    return first if first is not None and first.kind == "hold" else None


class Told(NamedTuple):
    """What the store says about deliveries, by their numbers: the ends of children, and the owners of changed keys."""

    ends: dict[int, ChildEnd | None]
    keys: dict[int, EffectRow | None]


NOTHING: Final = Told({}, {})


def told_of(store: Store, deliveries: Sequence[Delivery], recent: RecentEnds) -> Told:
    """Read what is needed to take deliveries."""
    ends = {one.number: believable_end(store, one, recent) for one in deliveries if one.kind == "child"}
    keys = {one.number: store.effect(one.name) for one in deliveries if one.kind == "key"}
    return Told(ends, keys) if ends or keys else NOTHING


class Inbox:
    """Takes deliveries into the history of one run."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._taken: set[int] = set()
        self._ends: dict[int, ChildEnd | None] = {}
        self._keys: dict[int, EffectRow | None] = {}

    def take(self, deliveries: Sequence[Delivery], told: Told = NOTHING, *, fire: bool = True) -> None:
        """Take deliveries into the history. A timer that was due before one arrived comes first.

        Without `fire` the code has ended and only the cancels matter: nothing is due. The run does not settle here:
        what is due by now comes first, and a run that remembers facts would leave memory before.
        """
        driver = self._driver
        self._ends.update(told.ends)
        self._keys.update(told.keys)
        for delivery in deliveries:
            if delivery.number in self._taken or delivery.kind not in _TAKE:  # one for a newer release is left to that
                continue
            # Never beyond the present: the sender's clock may be ahead, and no timer fires early.
            if fire:
                driver.deadlines.fire(driver, min(delivery.at, driver.app.clock.now()))
            if driver.is_over:
                return
            self._taken.add(delivery.number)
            if delivery.kind != "hold":  # a hold is consumed with its event, which may have to wait
                driver.journal.attachments().consumed.append(delivery.number)
            crash_point("delivery.taken")
            _TAKE[delivery.kind](self, delivery)

    def _signal(self, delivery: Delivery) -> None:
        raw, ref = self._driver.journal.pack(delivery.value)
        body = ev.SignalReceived(delivery.number, delivery.name, raw, ref, delivery.id)
        self._driver.deliver("signal_received", "", body)

    def _request(self, delivery: Delivery) -> None:
        raw, ref = self._driver.journal.pack(delivery.value)
        body = ev.RequestReceived(delivery.number, delivery.name, raw, ref, delivery.id)
        self._driver.deliver("request_received", "", body)

    def _cancel(self, delivery: Delivery) -> None:
        if delivery.name == ROLLBACK:
            request_rollback(self._driver, rollback_in(delivery))
            return
        request = cancel_in(delivery)
        if self._driver.execution.is_undone and not request.now:
            request.early = True  # it changes nothing, and what follows from the event before it comes after it
            self._driver.record("cancel_requested", "", request)
            self._driver.writer.save(waited_for=False)
        elif self._driver.execution.cancel is None or request.now:
            self._driver.request_cancel(request)
        else:
            self._driver.writer.save(waited_for=False)  # it is being cancelled already

    def _child(self, delivery: Delivery) -> None:
        call = int(delivery.id) if delivery.id.isdecimal() else 0
        child = self._driver.execution.children.get(call)
        is_awaited = child is not None and child.run == delivery.name
        end = self._ends.pop(delivery.number)
        if end is None or not is_awaited:
            self._driver.writer.save(waited_for=False)
            return
        raw, ref = self._driver.journal.pack(bytes(end.outcome) if end.status in ("completed", "failed") else b"")
        body = ev.ChildEnded(call, delivery.name, end.status, delivery.number, raw, ref, end.secret)
        if end.budget is not None and end.budget.by == self._driver.run:  # otherwise another run pays for it
            body.used, body.granted = end.budget.used, end.budget.granted or None
        self._driver.deliver("child_ended", "", body)

    def _key(self, delivery: Delivery) -> None:
        self._driver.writer.save(waited_for=False)
        self._driver.attempts.keys.woken(int(delivery.id), self._keys.pop(delivery.number))

    def _hold(self, delivery: Delivery) -> None:
        self._driver.put_on_hold(hold_in(delivery), delivery.number)


_TAKE: Final[dict[str, Callable[[Inbox, Delivery], None]]] = {
    "signal": Inbox._signal,
    "request": Inbox._request,
    "cancel": Inbox._cancel,
    "child": Inbox._child,
    "hold": Inbox._hold,
    "key": Inbox._key,
}


DeadlineKind = Literal["timer", "attempt", "probe", "run", "grace", "budget"]


class Deadline(NamedTuple):
    """Something to do at a time. Equal times keep the order in which they were set."""

    at: int
    order: int
    kind: DeadlineKind
    call: int


class Deadlines:
    """A heap; entries whose cause is gone are dropped when they come to the top.

    It is handed its driver with each question, and does not hold it: a circle would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self.heap: list[Deadline] = []
        self._set = 0
        """How many there were ever."""

    def add(self, at: int, kind: DeadlineKind, call: int = 0) -> None:
        """Set a deadline."""
        self._set += 1
        heapq.heappush(self.heap, Deadline(at, self._set, kind, call))

    def next(self, driver: "Driver") -> Deadline | None:
        """Return the earliest deadline whose cause still holds."""
        while self.heap and not _holds(self.heap[0], driver):
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def fire(self, driver: "Driver", until: int) -> None:
        """Do what was due up to a time, in the order in which it was due."""
        while not driver.takes_nothing and (top := self.next(driver)) and top.at <= until:
            heapq.heappop(self.heap)
            if top.kind == "timer":
                driver.deliver("timer_fired", "", ev.TimerFired(top.call))
            elif top.kind == "attempt":
                driver.attempts.begin_again(top.call)
            elif top.kind == "probe":
                driver.attempts.doubts.ask(top.call)
            elif top.kind == "budget":
                assert driver.budgets is not None
                driver.budgets.time_is_up()
            elif top.kind == "run":
                driver.request_cancel(ev.CancelRequested(reason="the run's timeout", timeout=True))
            else:
                driver.end_after_grace()


def _holds(deadline: Deadline, driver: "Driver") -> bool:
    if deadline.kind == "timer":
        return deadline.call in driver.execution.loop.timers
    if deadline.kind == "attempt":
        return driver.attempts.is_due_later(deadline.call)
    if deadline.kind == "probe":
        return driver.attempts.doubts.is_due(deadline.call)
    if driver.execution.is_undone:
        return False
    return deadline.kind == "grace" or driver.execution.cancel is None
