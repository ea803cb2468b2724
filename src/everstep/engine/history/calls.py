"""What became of the calls of a run, as its history says: which are begun, done, undone, or open, after any event.

This is the one fold over steps and child runs. Rollbacks, retries, forks, repairs and holds all ask it. It takes one
event after another, so a caller may look at it between any two of them.
"""

from collections.abc import Iterable

import msgspec

from everstep.engine.history.describe import asks_for_something
from everstep.engine.history.restored import Note
from everstep.engine.history.verify import Recorded
from everstep.model.carried import CarriedStep
from everstep.model.contracts import KEPT, may_run_again
from everstep.model.events import ENDS
from everstep.model.forked import copied_events, switches

WHAT_IS_LOST = "whatever it did in the part of its history that is lost"
ENDINGS = frozenset({"step_completed", "step_shared", "step_failed", "child_ended"})


class Call(msgspec.Struct):
    """A step or a child run that the code asked for, or a compensation."""

    number: int
    asked: Recorded
    """The first event of it."""
    step: str
    child: str
    """The id of the child run; nothing if it is a step."""
    effect: str
    """The contract of the step; nothing if it is a child run."""
    compensates: int
    """The call that it undoes, if it is a compensation."""
    is_kept: bool
    """Whether it was not done, but given the outcome that it had before a retry."""
    started: Recorded | None = None
    """The newest event that says that it began; None if it has not begun since it was asked for, or failed."""
    begun_at: int = 0
    """The number of the first event that says that it began."""
    outcome: Recorded | None = None
    cancelled_at: int = 0
    """The number of the event that says that the code no longer waits for it."""
    undone: Recorded | None = None
    """The outcome of its compensation."""
    key: str = ""
    entropy: str = ""
    """What its idempotency key derives from."""
    is_void: bool = False
    """Whether a retry went back over it."""
    is_given_again: bool = False
    """Whether a retry went back over it, and its outcome was given to a later call."""

    @property
    def has_compensation(self) -> bool:
        """Whether a compensation can undo it."""
        return self.started is not None and bool(getattr(self.started.body, "compensate", ""))

    @property
    def is_begun(self) -> bool:
        """Whether it has begun, and its outcome is not known. If it may just run again, a retry makes it irrelevant."""
        is_open = self.started is not None and self.outcome is None
        return is_open and (not self.is_void or self.must_be_kept)

    @property
    def is_done(self) -> bool:
        """Whether its body has run, and completed."""
        end = self.outcome
        is_completed = self.started is not None and end is not None and end.kind == "step_completed"
        return is_completed and not (end.body.skipped or end.body.fallback)  # type: ignore[union-attr]

    @property
    def is_undoable(self) -> bool:
        """Whether it has happened or may have, and a rollback would undo it."""
        is_there = (self.is_done or self.is_begun) and not self.is_void
        return is_there and self.has_compensation and self.undone is None

    @property
    def must_be_kept(self) -> bool:
        """Whether it is a step that must not happen twice."""
        return not (self.child or may_run_again(self.effect))  # type: ignore[arg-type]


def _asked(event: Recorded) -> Call:
    body = event.body
    is_child = event.kind == "child_started" or getattr(body, "instead_of", "") == "child_started"
    child, effect = (body.run, "") if is_child else ("", body.effect)
    is_kept = getattr(body, "because", "") == KEPT
    return Call(body.call, event, event.step, child, effect, getattr(body, "compensates", 0), is_kept)


class Calls:
    """The calls of one history, up to the newest event that was taken."""

    def __init__(self, history: Iterable[Recorded] = ()) -> None:
        self.all: list[Call] = []
        """Every call, also those that a retry went back over, in the order in which the code asked."""
        self.current: dict[int, Call] = {}
        """By number: those that count."""
        self.open: dict[int, Call] = {}
        """By number: those that the code waits for."""
        self.carried: dict[int, CarriedStep] = {}
        """Steps of older generations that could be undone when this one began."""
        self.compensated: list[tuple[int, int]] = []
        """What was to be undone: the event that says so, and the call."""
        self.copied = 0
        """The number of events that were copied from another run: what they did is not this one's to undo."""
        self.is_undone = False
        """Whether the run is being undone just now."""
        self.was_begun = False
        """Whether its undoing has ever begun, or was asked for."""
        self.was_undone = False
        """Whether it has ended, and there is nothing left of its compensation."""
        self.lost = False
        """Whether what it did may be in a part of its history that is lost, and no person has said that nothing is."""
        self.was_lost = False
        """Whether a part of its history was ever lost."""
        self.note: Note | None = None
        """Which life of its store the history knows of."""
        self.failed: Recorded | None = None
        """The newest failure of the run."""
        self.timed_out_at = 0
        """The event at which its timeout stopped it, since the newest retry."""
        self._entropies: list[tuple[int, str]] = []
        self._uncompensated: list[str] = []
        self._todo: set[int] = set()
        self._undone: set[int] = set()
        for event in history:
            self.take(event)

    def take(self, event: Recorded) -> None:
        """Take the next event."""
        kind, body = event.kind, event.body
        if kind in ("step_started", "key_taken", "call_withheld", "child_started"):
            self._ask(event)
        elif kind in ENDINGS:
            self._end(event)
        elif kind == "step_cancelled":
            self.open.pop(body.step_call, None)
            if body.step_call in self.current:
                self.current[body.step_call].cancelled_at = event.seq
        elif kind == "run_started":
            self._begin(event)
        elif kind == "run_retried":
            self._retry(event)
        elif kind == "compensation_started":
            self.is_undone = self.was_begun = True
            self.compensated += [(event.seq, call) for call in body.steps]
            self._todo = set(body.steps)
            self.open = {
                number: call for number, call in self.open.items() if call.child
            }  # no code waits for the others
        elif kind == "rollback_requested":
            self.is_undone = self.was_begun = True
            self.was_undone = False
        elif kind == "cancel_requested" and body.timeout:
            self.timed_out_at = event.seq
        elif kind == "run_restored" or (kind == "run_repaired" and body.lost):
            self._lose(event)
        elif kind == "run_resolved" and body.resolution == "accept" and body.call:
            self.lost = False
        elif kind in ENDS:
            self.is_undone = False
            self.was_undone = self.was_begun and not self._todo
            self.failed = event if kind == "run_failed" else self.failed

    def _begin(self, event: Recorded) -> None:
        body = event.body
        self.copied = copied_events(body)
        self.note = Note(event.seq, body.life, body.restored)
        self._entropies = [(event.seq, body.entropy), *switches(body)]
        self.lost = self.was_lost = bool(body.unseen or (body.carried is not None and body.carried.caution))
        if body.carried is not None:
            self.carried = {one.call: one for one in body.carried.undoable}
            self._uncompensated = list(body.carried.uncompensated)

    def _lose(self, event: Recorded) -> None:
        self.was_lost = True
        self.lost = self.lost or event.seq > self.copied
        if event.kind == "run_restored":
            self.note = Note(event.seq, event.body.life, event.body.number)

    def _ask(self, event: Recorded) -> None:
        body, call = event.body, self.current.get(event.body.call)
        if call is None or asks_for_something(event):
            call = self.current[body.call] = _asked(event)
            self.all.append(call)
            if call.is_kept:
                self._give_again(call)
        if not call.cancelled_at:
            self.open[body.call] = call
        call.outcome = None
        call.key = getattr(body, "key", "") or call.key
        if event.kind in ("step_started", "child_started"):
            call.started, call.begun_at = event, call.begun_at or event.seq
            call.entropy = self.entropy_at(event.seq)

    def _give_again(self, kept: Call) -> None:
        """A retried run is given an earlier outcome: it is the same effect, not another one."""

        def what(call: Call) -> tuple[str, str]:
            return call.step.partition("#")[0], call.asked.body.arguments

        for one in self.all:
            if one.is_void and one.is_done and one.must_be_kept and not one.is_given_again and what(one) == what(kept):
                one.is_given_again = True
                return

    def _end(self, event: Recorded) -> None:
        call = self.current.get(event.body.call)
        self.open.pop(event.body.call, None)
        if call is None:
            return
        call.outcome = event
        if event.kind == "step_failed":
            call.started = None
        elif event.kind == "step_completed" and call.started is not None and call.compensates:
            self._todo.discard(call.compensates)
            self._undone.add(call.compensates)
            if call.compensates in self.current:
                self.current[call.compensates].undone = event

    def _retry(self, event: Recorded) -> None:
        """What was begun since the failure no longer counts. What failed or was given up since then is open again."""
        voids = event.body.voids
        self.timed_out_at = 0
        self._entropies.append((event.seq, event.body.entropy))
        for call in list(self.current.values()):
            end = call.outcome
            if call.asked.seq >= voids:
                call.is_void = True
                del self.current[call.number]
            elif end is not None and (end.seq == voids or (end.seq > voids and end.kind == "step_failed")):
                call.outcome = None
                call.started = call.started if call.child else None  # a child is retried, not started again
            if call.cancelled_at >= voids:
                call.cancelled_at = 0
        self.open = {
            number: call for number, call in self.current.items() if call.outcome is None and not call.cancelled_at
        }

    # -- what it says --------------------------------------------------------------------------------------------------
    def entropy_at(self, seq: int) -> str:
        """Return the random bits that keys derive from at an event."""
        return max((one for one in self._entropies if one[0] <= seq), default=(0, ""), key=lambda one: one[0])[1]

    @property
    def own(self) -> list[Call]:
        """The calls that are this run's own, and were not copied from another one."""
        return [call for call in self.all if call.asked.seq > self.copied] if self.copied else self.all

    def begun(self) -> list[Call]:
        """Return the steps that have begun and whose outcome is not known."""
        return [call for call in self.own if call.is_begun and not call.child]

    def done(self) -> list[Call]:
        """Return the steps whose bodies have run, in the order in which they completed; no compensations."""
        done = [call for call in self.own if call.is_done and not call.compensates and not call.is_given_again]
        return sorted(done, key=lambda call: call.outcome.seq if call.outcome is not None else 0)

    def _carried_on(self) -> list[CarriedStep]:
        """Return the steps of older generations that have not been undone."""
        return [one for number, one in self.carried.items() if number not in self._undone]

    @property
    def uncompensated(self) -> list[str]:
        """The steps that must not happen twice, happened or may have, and have no compensation."""
        steps = [call for call in [*self.done(), *self.begun()] if call.must_be_kept and not call.compensates]
        left = [*self._uncompensated, *(call.step for call in steps if not call.has_compensation)]
        return [*left, WHAT_IS_LOST] if self.lost else left

    @property
    def compensable(self) -> list[str]:
        """The steps that must not happen twice, happened, have a compensation, and were not compensated."""
        carried = [one.title for one in self._carried_on() if not may_run_again(one.effect)]  # type: ignore[arg-type]
        done = [call for call in self.done() if call.must_be_kept and call.has_compensation]
        return carried + [call.step for call in done if call.undone is None]

    @property
    def undoable(self) -> list[str]:
        """The steps of any contract that happened or may have, and have a compensation that has not completed."""
        steps = [call.step for call in [*self.done(), *self.begun()] if call.is_undoable]
        return [one.title for one in self._carried_on()] + steps

    @property
    def unsettled(self) -> list[str]:
        """The steps that must not happen twice and of which it is not known whether they have."""
        return [call.step for call in self.begun() if call.must_be_kept]

    @property
    def being_undone(self) -> set[int]:
        """The calls whose compensation was begun and has no outcome."""
        return {call.compensates for call in self.begun() if call.compensates}

    @property
    def keyed(self) -> dict[int, tuple[str, CarriedStep | None]]:
        """The keys (`key=`) of what could be undone, by call; with the step, if an older generation did it."""
        keyed: dict[int, tuple[str, CarriedStep | None]] = {}
        keyed |= {one.call: (one.key, one) for one in self._carried_on() if one.key}
        return keyed | {call.number: (call.key, None) for call in self.done() if call.is_undoable and call.key}

    def children(self) -> list[Call]:
        """Return the child runs that were started. A refused one was never: its id belonged to another run."""
        started = [call for call in self.all if call.child and call.started is not None]
        return [call for call in started if call.outcome is None or call.outcome.body.status != "refused"]

    def finished(self) -> set[int]:
        """Return the steps and children of which no attempt is made any more.

        A person may accept other arguments of these, and of no others: the next attempt at an unfinished one would
        present another key than the attempts before it, which may have acted.
        """
        return self.current.keys() - self.open.keys()
