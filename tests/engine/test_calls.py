"""The fold over the calls of a history: what is begun, done, undone and open, after any event."""

from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.engine.history.calls import Calls
from everstep.engine.history.effects import Relied, effects_since
from everstep.engine.history.verify import Recorded
from everstep.model import events as ev
from everstep.model.forked import Forked

SECONDS = 1_000_000
NAMES = ("pay", "book", "ship")


class Expected(NamedTuple):
    """What the author knows to be so after an event."""

    seq: int
    open: set[int]
    begun: set[int]
    undoable: set[int]


class Author:
    """Writes histories as runs do: what is drawn decides what happens next."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.history: list[Recorded] = []
        self.number = 0
        self.asked: list[tuple[int, int]] = []
        """The events with which the code asked for something, and the numbers of the calls."""
        self.begun: dict[int, ev.StepStarted] = {}
        self.waits: dict[int, ev.StepStarted] = {}
        """Steps that wait for a key or for room."""
        self.children: set[int] = set()
        self.settled: dict[int, ev.StepStarted] = {}
        self.completed: list[int] = []
        self.kept: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}
        self.failed: dict[int, int] = {}
        """Failed steps, and the events that say so."""
        self.failed_children: dict[int, int] = {}
        self.given_up: dict[int, ev.StepStarted] = {}
        """Steps that had begun and whose outcome the code no longer waits for."""
        self.expected: list[Expected] = []

    def add(self, kind: str, body: Any, step: str = "") -> int:
        seq = len(self.history) + 1
        if kind in ("step_started", "key_taken", "call_withheld"):
            self.names[body.call] = step
        self.history.append(Recorded(seq, kind, step, seq * SECONDS, body))
        return seq

    def one_of(self, those: Any) -> Any:
        return self.draw(st.sampled_from(sorted(those)))

    def start(self, *, copied: int) -> None:
        body = ev.RunStarted("w", "1", 1, "3", "entropy")
        if copied:
            body.forked = Forked("other", 1, copied, "00", 0, "own")
        self.add("run_started", body)

    def begin(self) -> None:
        self.number += 1
        name = self.draw(st.sampled_from(NAMES))
        body = ev.StepStarted(self.number, self.draw(st.sampled_from(["1", "2"])))
        body.effect = self.draw(st.sampled_from(["read", "repeat", "once", "once"]))
        if body.effect != "read":
            body.compensate = self.draw(st.sampled_from(["", "undo"]))
            body.key = self.draw(st.sampled_from(["", "", "kept", "gone", "freed"]))
        if (name, body.arguments) in self.kept and body.effect == "once":
            self.kept.remove((name, body.arguments))
            body.because = "kept"
            self.asked.append((self.add("step_started", body, name), self.number))
            self.begun[self.number] = body
            self.end(self.number, "step_completed")
            return
        how = self.draw(st.sampled_from(["", "", "", "key", "room"]))
        if how == "key" and body.key:
            taken = ev.KeyTaken(self.number, body.key, body.arguments, body.effect, run="owner")
            self.asked.append((self.add("key_taken", taken, name), self.number))
            self.waits[self.number] = body
        elif how == "room":
            withheld = ev.CallWithheld(self.number, "step_started", "usd", effect=body.effect, key=body.key)
            self.asked.append((self.add("call_withheld", withheld, name), self.number))
            self.waits[self.number] = body
        else:
            self.asked.append((self.add("step_started", body, name), self.number))
            self.begun[self.number] = body

    def begin_child(self) -> None:
        self.number += 1
        body = ev.ChildStarted(self.number, f"run.{self.number}.{len(self.history)}", "w", "1")
        self.asked.append((self.add("child_started", body, "w"), self.number))
        self.children.add(self.number)

    def end(self, number: int, kind: str) -> None:
        step, started = self.names[number], self.begun.pop(number)
        self.settled[number] = started
        if kind == "step_failed":
            self.failed[number] = self.add(kind, ev.StepFailed(number), step)
            return
        body = ev.StepCompleted(number)
        if started.because != "kept":
            body.skipped, body.fallback = self.draw(st.sampled_from([(False, False), (False, False), (True, False)]))
        self.completed += [number] if started.compensate and not body.skipped else []
        self.add(kind, body, step)

    def happen(self) -> None:
        """Let one thing happen that can happen."""
        can = ["begin", "begin", "begin", "child"]
        can += ["complete", "complete", "fail", "attempt", "cancel"] if self.begun else []
        can += ["start"] if self.waits else []
        can += ["share"] if any(one.key for one in self.waits.values()) else []
        can += ["end child"] if self.children else []
        what = self.draw(st.sampled_from([*can, "restore", "accept"]))
        if what == "begin":
            self.begin()
        elif what == "child":
            self.begin_child()
        elif what in ("complete", "fail"):
            self.end(self.one_of(self.begun), "step_completed" if what == "complete" else "step_failed")
        elif what == "attempt":
            number = self.one_of(self.begun)
            body = ev.StepStarted(number, "1", self.begun[number].effect, attempt=2, because="retry")
            body.compensate, body.key = self.begun[number].compensate, self.begun[number].key
            body.arguments = self.begun[number].arguments
            self.add("step_started", body, self.names[number])
        elif what == "cancel":
            number = self.one_of(self.begun)
            self.given_up[number] = self.begun.pop(number)
            self.number += 1
            step = self.names[number]
            self.asked.append((self.add("step_cancelled", ev.StepCancelled(self.number, number), step), self.number))
        elif what == "start":
            number = self.one_of(self.waits)
            body, step = self.waits.pop(number), self.names[number]
            body.because = "freed"
            self.begun[number] = body
            self.add("step_started", body, step)
        elif what == "share":
            number = self.one_of(number for number, one in self.waits.items() if one.key)
            body, step = self.waits.pop(number), self.names[number]
            if not any(one.kind == "key_taken" and one.body.call == number for one in self.history):
                taken = ev.KeyTaken(number, body.key, body.arguments, body.effect, again=True)
                self.add("key_taken", taken, step)
            self.add("step_shared", ev.StepShared(number, run="owner"), step)
        elif what == "end child":
            number = self.one_of(self.children)
            self.children.remove(number)
            status = self.draw(st.sampled_from(["completed", "failed", "refused"]))
            seq = self.add("child_ended", ev.ChildEnded(number, "run", status, 1), "w")
            self.failed_children |= {number: seq} if status == "failed" else {}
        elif what == "restore":
            self.add("run_restored", ev.RunRestored(1, "life.1"))
        else:
            self.add("run_resolved", ev.RunResolved("h", "accept", call=1))

    def expect(self) -> None:
        """Note what is so now."""
        begun = self.begun | self.given_up
        undoable = {number for number, one in begun.items() if one.compensate} | set(self.completed)
        waiting = self.begun.keys() | self.waits.keys() | self.children
        self.expected.append(Expected(len(self.history), waiting, set(begun), undoable))

    def fail_and_retry(self) -> None:
        """Let the run fail with a failure of one of its steps, if there is one, and be retried."""
        failures = self.failed | self.failed_children
        if not failures or any(one.effect == "once" for one in (self.begun | self.given_up).values()):
            return
        failure = self.history[self.one_of(failures.values()) - 1]
        self.add("run_failed", ev.RunFailed(call=failure.body.call))
        crossed = []
        for one in self.history[failure.seq :]:
            if one.kind != "step_completed" or one.body.skipped:
                continue
            started, first = next(
                (event.body, event.seq)
                for event in reversed(self.history[: one.seq])
                if event.kind == "step_started" and event.body.call == one.body.call and event.body.attempt == 1
            )
            if started.effect == "once" and first >= failure.seq and not started.key and not started.because:
                crossed.append(one.seq)
                self.kept.append((one.step, started.arguments))
        self.add("run_retried", ev.RunRetried(failure.seq, f"entropy {len(self.history)}", crossed=crossed))
        void = {number for seq, number in self.asked if seq >= failure.seq}
        cancelled = (one.body.step_call for one in self.history[failure.seq :] if one.kind == "step_cancelled")
        awaited = {number: self.given_up.pop(number) for number in cancelled if number in self.given_up}
        self.given_up = {number: one for number, one in self.given_up.items() if number not in void}
        self.begun |= awaited
        self.asked = [one for one in self.asked if one[0] < failure.seq]
        self.number = max((number for _, number in self.asked), default=0)
        self.begun = {number: one for number, one in self.begun.items() if number not in void}
        self.waits = {number: one for number, one in self.waits.items() if number not in void}
        self.children -= void
        self.children |= {number for number, seq in self.failed_children.items() if seq == failure.seq}
        self.failed_children = {number: seq for number, seq in self.failed_children.items() if seq < failure.seq}
        again = {number for number, seq in self.failed.items() if seq >= failure.seq} - void
        self.failed = {number: seq for number, seq in self.failed.items() if seq < failure.seq}
        for number in sorted(again):
            body = self.settled[number]
            more = ev.StepStarted(number, body.arguments, body.effect, attempt=2, because="person")
            more.compensate, more.key = body.compensate, body.key
            self.begun[number] = more
            self.add("step_started", more, self.names[number])
        self.completed = [number for number in self.completed if number not in void]

    def undo(self) -> None:
        """Let the run be undone, as far as is drawn."""
        steps = list(reversed(dict.fromkeys(self.completed)))
        self.add("compensation_started", ev.CompensationStarted(0, "rollback", steps))
        for number in steps[: self.draw(st.integers(0, len(steps)))]:
            self.number += 1
            body = ev.StepStarted(self.number, "1", "repeat", compensates=number)
            self.add("step_started", body, "undo")
            if self.draw(st.booleans()):
                self.add("step_completed", ev.StepCompleted(self.number, skipped=self.draw(st.booleans())), "undo")
            else:
                return
        if self.draw(st.booleans()):
            self.add("run_cancelled", ev.RunCancelled(rolled_back=True))


@st.composite
def authors(draw: Any) -> Author:
    author = Author(draw)
    author.start(copied=draw(st.sampled_from([0, 0, 1])))
    for _ in range(draw(st.integers(0, 14))):
        author.happen()
        author.expect()
        if draw(st.integers(0, 4)) == 0:
            author.fail_and_retry()
            author.expect()
    if draw(st.integers(0, 3)) == 0:
        author.undo()
    return author


@settings(max_examples=200, deadline=None)
@given(authors())
def test_after_every_event_it_is_known_what_is_open_begun_and_undoable(author: Author) -> None:
    calls, expected = Calls(), {one.seq: one for one in author.expected}
    for event in author.history:
        calls.take(event)
        if (now := expected.get(event.seq)) is not None:
            assert set(calls.open) == now.open
            assert {call.number for call in calls.begun() if not call.is_void} == now.begun
            undoable = [call.number for call in calls.current.values() if call.is_undoable]
            assert set(undoable) == now.undoable
            assert len(calls.undoable) == len(undoable)
            assert calls.finished() == calls.current.keys() - now.open


@settings(max_examples=100, deadline=None)
@given(authors(), st.data())
def test_a_fold_that_is_continued_says_the_same_as_one_in_a_single_pass(author: Author, data: Any) -> None:
    history = author.history
    place = data.draw(st.integers(0, len(history)))
    continued = Calls(history[:place])
    facts = ("uncompensated", "compensable", "undoable", "unsettled", "being_undone", "keyed", "lost", "is_undone")
    for name in facts:
        assert getattr(continued, name) is not None, "looking changes nothing"
    for event in history[place:]:
        continued.take(event)
    whole = Calls(history)
    assert [getattr(continued, name) for name in facts] == [getattr(whole, name) for name in facts]
    assert continued.all == whole.all


class NoKeys(SimpleNamespace):
    """A store that knows no keys and no runs."""

    def effect(self, key: str) -> None:
        """No key is known."""

    def run(self, id: str) -> None:
        """No run is known."""


def test_a_once_step_that_failed_and_happened_after_a_retry_is_an_effect() -> None:
    history = [
        Recorded(1, "run_started", "", 1, ev.RunStarted("w", "1", 1, "3", "entropy")),
        Recorded(2, "step_started", "pay", 2, ev.StepStarted(1, "1", "once")),
        Recorded(3, "step_failed", "pay", 3, ev.StepFailed(1)),
        Recorded(4, "run_failed", "", 4, ev.RunFailed(call=1)),
        Recorded(5, "run_retried", "", 5, ev.RunRetried(3, "more", 1)),
        Recorded(6, "step_started", "pay", 6, ev.StepStarted(1, "1", "once", attempt=2, because="person")),
        Recorded(7, "step_completed", "pay", 7, ev.StepCompleted(1, attempt=2)),
        Recorded(8, "run_failed", "", 8, ev.RunFailed()),
    ]
    store: Any = NoKeys()
    assert [one.seq for one in effects_since(store, "r", Calls(history), 1, Relied(set(), set()))] == [7]
    assert effects_since(store, "r", Calls(history), 3, Relied(set(), set())) == []


def test_a_child_that_failed_and_is_retried_is_still_a_child_that_was_started() -> None:
    history = [
        Recorded(1, "run_started", "", 1, ev.RunStarted("w", "1", 1, "3", "entropy")),
        Recorded(2, "child_started", "w", 2, ev.ChildStarted(1, "r.1", "w", "1")),
        Recorded(3, "child_ended", "w", 3, ev.ChildEnded(1, "r.1", "failed", 1)),
        Recorded(4, "run_failed", "", 4, ev.RunFailed(call=1)),
        Recorded(5, "run_retried", "", 5, ev.RunRetried(3, "more", 1)),
    ]
    calls = Calls(history)
    assert [call.child for call in calls.open.values()] == ["r.1"]
    assert [call.child for call in calls.children() if call.outcome is None] == ["r.1"]
    (crossed,) = effects_since(NoKeys(), "r", calls, 1, Relied(set(), set()))  # type: ignore[arg-type]
    assert crossed.run == "r.1"
