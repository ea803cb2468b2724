"""The rules that one history can break by itself. One pass, whatever its length."""

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import msgspec

from everstep.model.carried import Carried, undoing_entropy
from everstep.model.digests import chain_next, chain_start, shared_key, step_key
from everstep.model.events import ENDS, EventRow, decode_body
from everstep.model.forked import copied_events, switches
from everstep.model.status import ENDED, Status
from everstep.testing.histories import RunHistory, Violation
from everstep.testing.rules_graphs import GraphJudge
from everstep.testing.rules_sagas import SagaJudge

STATUS_OF_END: Final[dict[str, Status | Literal["continued"]]] = {
    "run_completed": "completed",
    "run_failed": "failed",
    "run_cancelled": "cancelled",
    "run_continued": "continued",
}


class Call(msgspec.Struct):
    """The state of one call of the code, so far in the history."""

    kind: str
    seq: int
    step: str = ""
    key: str = ""
    effect: str = ""
    arguments: str = ""
    attempt: int = 0
    due: int = 0
    deadline: int = 0
    run: str = ""
    outcome: str = ""
    outcome_seq: int = 0
    outcome_at: int = 0
    cancelled: bool = False
    kept: bool = False
    """Whether it was not done because an earlier branch had done it."""
    adopted: bool = False
    """Whether a probe, a person or an earlier branch gave the outcome."""
    number: int = 0
    checkpoint: int = 0
    own_key: str = ""
    """With `key=`: the key that it has, or had."""
    round: int = 0
    waits: bool = False
    """Whether it does not have its key, or has lost it."""
    is_void: bool = False
    """Whether a retry made it void."""
    was_done: bool = False
    """Whether its outcome is that of its effect, and not of a fallback or a person who skipped it."""
    value: tuple[bytes, str] = (b"", "")
    is_skipped: bool = False
    compensate: str = ""
    compensates: int = 0
    is_copied: bool = False
    """Whether it belongs to the run from which this one was forked."""
    happened: bool = True
    """False if a fallback, or a person who skipped it, gave its outcome."""


class Shared(msgspec.Struct):
    """An outcome that a step took over from another one."""

    seq: int
    key: str
    run: str
    generation: int
    owner_seq: int
    by: str
    value: tuple[bytes, str]
    at: int


class HistoryJudge:
    """Goes through one history and records what it breaks. The other rules use what it learns about the calls."""

    def __init__(self, history: RunHistory) -> None:
        self.history = history
        self.run = history.row.id
        self.violations: list[Violation] = []
        self.calls: dict[int, Call] = {}
        self.every_call: list[Call] = []
        """Includes those that a retry made void."""
        self.consumed: dict[int, int] = {}
        """The event that consumed each inbox number."""
        self.shared: list[Shared] = []
        self.ended_by: EventRow | None = None
        self.carried_head = ""
        """The end of the previous generation, which this one continues."""
        self._signal_ids: set[str] = set()
        self._request_ids: set[str] = set()
        self._answered: dict[int, int] = {}
        """The event with the answer to each request."""
        self._subjects: set[str] = set()
        self._entropy = ""
        self._copied = 0
        self._switches: list[tuple[int, str]] = []
        self._last_call = 0
        self._last_checkpoint = 0
        self._at = 0
        self._event: EventRow
        self._carried: Carried | None = None
        self.carried: dict[int, Call] = {}
        self._carried_requests: set[int] = set()
        """Steps of older generations that can be undone."""
        self.saga = SagaJudge(self._broken)
        self.graph = GraphJudge(self._broken)
        self._go()

    def _go(self) -> None:
        digest = chain_start(self.run, self.history.generation)
        for expected, event in enumerate(self.history.events, 1):
            self._event = event
            digest = chain_next(digest, *event[:5], self.history.key)
            if event.seq != expected:
                self._broken("L5", f"it is where event {expected} should be")
            if digest != event.digest:
                self._broken("L5", "it does not match its digest")
                digest = event.digest
            if event.at < self._at:
                self._broken("L5", "its time is before that of the event before it")
            self._at = event.at
            try:
                body = decode_body(event.kind, event.body)
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
                self._broken("L5", "it cannot be read")
                continue
            self._judge(event, body)
        self._judge_row()

    def _broken(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule, self.run, self._event.seq, f"{self._event.kind} {what}".strip()))

    def _judge(self, event: EventRow, body: Any) -> None:
        if (event.seq == 1) != (event.kind == "run_started"):
            self._broken("D6", "a history begins with run_started, once")
        if event.kind == "rollback_requested":
            self.ended_by = None  # an ended run continues, to undo what it did
        while self._switches and event.seq > self._switches[0][0]:
            self._entropy = self._switches.pop(0)[1]
        if self.ended_by is not None and event.kind != "run_retried":
            rule = "D1" if event.kind in ENDS else "L3"
            self._broken(rule, f"is after the run's end (event {self.ended_by.seq})")
        if event.kind in ENDS or event.kind == "run_continued":
            self.ended_by = event
        elif event.kind in _JUDGE:
            _JUDGE[event.kind](self, body)
        self.graph.take(event.seq, event.kind, body)
        self.saga.take(event.kind, body, {**self.carried, **self.calls} if self.carried else self.calls)

    def _judge_row(self) -> None:
        row, events = self.history.row, self.history.events
        if not self.history.is_newest:
            return
        if not events or (events[-1].seq, events[-1].digest) != (row.head_seq, row.head_digest):
            self.violations.append(Violation("L5", self.run, row.head_seq, "the run's row names another head"))
        expected = STATUS_OF_END[self.ended_by.kind] if self.ended_by is not None else None
        if expected is not None and row.status != expected:
            self.violations.append(Violation("D1", self.run, row.head_seq, f"it ended, and its row says {row.status}"))
        if expected is None and row.status in ENDED:
            self.violations.append(
                Violation("L3", self.run, row.head_seq, f"{row.status} without an event that says so")
            )

    @property
    def _is_copied(self) -> bool:
        """Whether the event belongs to the run from which this one was forked."""
        return self._event.seq <= self._copied

    # -- commands ---------------------------------------------------------------------------------------------------
    def _begin(self, call: int, new: Call) -> Call:
        if call != self._last_call + 1:
            self._broken("R1", f"is call {call}, and the one before was {self._last_call}")
        self._last_call = call
        new.number = call
        self.calls[call] = new
        if self._is_copied:
            new.is_copied, new.compensate = True, ""
        else:
            self.every_call.append(new)
        return new

    def _run_started(self, body: Any) -> None:
        self._entropy = body.entropy
        self._copied, self._switches = copied_events(body), switches(body)
        self._carried = body.carried
        if body.carried is None:
            return
        self.carried_head = body.carried.head
        self._carried_requests = {number for _, number, _, _ in body.carried.requests}
        for one in body.carried.undoable:
            place = (one.step, "", one.effect, "", 1, 0, 0, "", "step_completed", one.call)
            self.carried[one.call] = Call("step_started", 0, *place, compensate=one.compensate)

    def _step_started(self, body: Any) -> None:
        event = self._event
        if body.attempt == 1 and body.because in ("", "kept"):
            undone = body.compensates
            entropy = undoing_entropy(self._carried, self._entropy, undone) if undone else self._entropy
            key = step_key(entropy, event.step, body.arguments)
            new = Call(event.kind, event.seq, event.step, key, body.effect, body.arguments, 1)
            new.compensate, new.compensates = body.compensate, undone
            if body.call in self.calls and body.call <= self._last_call:
                self._broken("L3", "begins a call again at its first attempt")
            new.kept = body.because == "kept"
            self._own(self._begin(body.call, new), body)
            return
        call = self._known(body.call)
        if call is None:
            return
        if call.outcome:
            self._broken("L3", f"runs again after its outcome (event {call.outcome_seq})")
        if body.attempt != call.attempt + 1:
            self._broken("L3", f"is attempt {body.attempt}, and the one before was {call.attempt}")
        if (body.arguments, body.effect, event.step) != (call.arguments, call.effect, call.step):
            self._broken("D7", "has other arguments, contract or name than the first attempt")
        if event.at < call.due:
            self._broken("L4", "comes before its back-off was over")
        call.attempt, call.due = body.attempt, 0
        if not call.is_copied:  # a step that waited for its key, or for a budget, names its compensation only now
            call.compensate = call.compensate or body.compensate
        self._own(call, body)

    def _own(self, call: Call, body: Any) -> None:
        """A step with a key begins, so the key belongs to it."""
        if not body.key:
            return
        if call.own_key not in ("", body.key):
            self._broken("D8", f"has another key than before ({call.own_key})")
        name = call.step.partition("#")[0]
        call.key = shared_key(self.history.entropy, body.key, name, body.arguments, body.round)
        call.own_key, call.round, call.waits = body.key, body.round, False

    def _key_taken(self, body: Any) -> None:
        event = self._event
        if not body.again:
            new = Call("step_started", event.seq, event.step, "", body.effect, body.arguments)
            call: Call | None = self._begin(body.call, new)
        else:
            call = self._known(body.call)
        if call is None:
            return
        if call.outcome:
            self._broken("L3", f"asks for its key after its outcome (event {call.outcome_seq})")
        call.own_key, call.waits = body.key, True

    def _step_shared(self, body: Any) -> None:
        call = self._settle(body.call)
        if call is None:
            return
        if not call.waits:
            self._broken("D8", "takes over an outcome, and no other step had its key")
        value = (bytes(body.value), body.ref)
        seq = self._event.seq
        if self._is_copied:
            return
        self.shared.append(
            Shared(seq, call.own_key, body.run, body.generation, body.seq, body.by, value, self._event.at)
        )

    def _call_withheld(self, body: Any) -> None:
        """This event replaces a start. A step has no attempt yet; a child may be started later."""
        event = self._event
        if not body.again and body.instead_of == "step_started":
            key = step_key(self._entropy, event.step, body.arguments)
            self._begin(body.call, Call(body.instead_of, event.seq, event.step, key, body.effect, body.arguments))
        elif not body.again:
            self._begin(body.call, Call("call_withheld", event.seq, event.step, run=body.run))
        elif (call := self._known(body.call)) is not None and (call.outcome or body.attempt != call.attempt):
            self._broken("L3", f"is about a step with an outcome, or with {call.attempt} attempts")

    def _attempt_charged(self, body: Any) -> None:
        call = self._known(body.call)
        if call is not None and body.attempt > call.attempt:
            self._broken("L3", f"is of attempt {body.attempt}, and the last one begun is {call.attempt}")

    def _timer_started(self, body: Any) -> None:
        self._begin(body.call, Call(self._event.kind, self._event.seq, deadline=body.deadline))

    def _child_started(self, body: Any) -> None:
        if body.withheld:
            if (call := self._known(body.call)) is not None:
                call.kind = self._event.kind
            return
        self._begin(body.call, Call(self._event.kind, self._event.seq, self._event.step, run=body.run))

    def _other_command(self, body: Any) -> None:
        self._begin(body.call, Call(self._event.kind, self._event.seq))

    def _witness_taken(self, body: Any) -> None:
        self._other_command(body)
        self._subjects.add(body.subject)

    def _drift_judged(self, body: Any) -> None:
        if body.subject not in self._subjects:
            self._broken("R1", f"is about {body.subject}, which the run never remembered")
        if body.decision not in ("hold", "fail", "ignore", "accept"):
            self._broken("R1", f"decides {body.decision!r}, which is no decision")

    def _checkpoint_taken(self, body: Any) -> None:
        if body.number <= self._last_checkpoint:
            self._broken("R1", f"is checkpoint {body.number}, and the one before was {self._last_checkpoint}")
        if any(not call.outcome and not call.cancelled for call in self._under_way()):
            self._broken("R1", "is where something else is under way")
        self._last_checkpoint = body.number
        self._begin(body.call, Call(self._event.kind, self._event.seq, checkpoint=body.number))

    def _under_way(self) -> Iterator[Call]:
        """Give the calls since the last checkpoint that will have an outcome."""
        for call in reversed(self.calls.values()):
            if call.kind == "checkpoint_taken":
                return
            if call.kind in ("step_started", "child_started"):
                yield call

    def _compensation_started(self, body: Any) -> None:
        """The last commands of the code may have been dropped, and their numbers with them."""
        self._last_call = max(self._last_call, body.call - 1)
        self._other_command(body)

    def _step_cancelled(self, body: Any) -> None:
        self._other_command(body)
        if body.step_call in self.calls:
            self.calls[body.step_call].cancelled = True

    # -- outcomes ---------------------------------------------------------------------------------------------------
    def _known(self, number: int) -> Call | None:
        call = self.calls.get(number)
        if call is None:
            self._broken("R1", f"is about call {number}, which the code had not given")
        return call

    def _settle(self, number: int, outcome: str = "") -> Call | None:
        call = self._known(number)
        if call is not None:
            if call.outcome:
                self._broken("D2", f"is a second outcome (the first is event {call.outcome_seq})")
            call.outcome, call.outcome_seq = outcome or self._event.kind, self._event.seq
            call.outcome_at = self._event.at
        return call

    def _step_ended(self, body: Any) -> None:
        is_fallback = getattr(body, "fallback", False)  # then the body need not have sent a request
        call = self._settle(body.call, "fallback" if is_fallback else "")
        if call is not None:
            call.adopted = getattr(body, "adopted", False)
        if call is not None and body.attempt != call.attempt:
            self._broken("L3", f"is of attempt {body.attempt}, and the last one begun is {call.attempt}")
        if call is not None and self._event.kind == "step_completed":
            if call.waits:
                self._broken("D8", "ends a step that does not have its key")
            call.was_done = call.happened = not (body.fallback or body.skipped or call.is_skipped)
            call.value = (bytes(body.value), body.ref)

    def _run_resolved(self, body: Any) -> None:
        if body.resolution == "skip" and body.call in self.calls:
            self.calls[body.call].is_skipped = True

    def _attempt_failed(self, body: Any) -> None:
        call = self._known(body.call)
        if call is not None:
            if call.outcome:
                self._broken("L3", f"comes after the step's outcome (event {call.outcome_seq})")
            if body.attempt != call.attempt:
                self._broken("L3", f"is of attempt {body.attempt}, and the last one begun is {call.attempt}")
            call.due = body.due

    def _timer_fired(self, body: Any) -> None:
        call = self.calls.get(body.call)
        if call is not None and call.outcome:
            self._broken("L4", f"fires a second time (the first is event {call.outcome_seq})")
        elif (call := self._settle(body.call)) is not None and self._event.at < call.deadline:
            self._broken("L4", f"fires {call.deadline - self._event.at} microseconds early")

    def _signal_received(self, body: Any) -> None:
        self._consume(body.number)
        if body.id and body.id in self._signal_ids:
            self._broken("D4", f"takes the signal with the id {body.id!r} a second time")
        self._signal_ids.add(body.id)

    def _request_received(self, body: Any) -> None:
        self._consume(body.number)
        if body.id in self._request_ids:
            self._broken("D4", f"takes the request with the id {body.id!r} a second time")
        self._request_ids.add(body.id)

    def _request_answered(self, body: Any) -> None:
        self._other_command(body)
        if body.number not in self.consumed and body.number not in self._carried_requests:
            self._broken("L3", f"answers request {body.number}, which it has not taken")
        if body.number in self._answered:
            self._broken("L3", f"answers request {body.number} a second time")
        self._answered[body.number] = self._event.seq

    def _cancel_requested(self, body: Any) -> None:
        self._consume(body.number)

    def _child_ended(self, body: Any) -> None:
        self._consume(body.number)
        call = self._settle(body.call, body.status)
        if call is not None and call.run != body.run:
            self._broken("L3", f"is of the run {body.run}, and the call started {call.run}")

    def _consume(self, number: int) -> None:
        if self._is_copied:
            return  # the delivery was in another run's inbox
        if number in self.consumed:
            self._broken("D4", f"takes delivery {number} a second time (first in event {self.consumed[number]})")
        elif number:
            self.consumed[number] = self._event.seq

    # -- continuing after a failure --------------------------------------------------------------------------------
    def _run_retried(self, body: Any) -> None:
        """What the code did since the event `voids` no longer counts, and its calls' numbers are used again."""
        self.ended_by = None
        for call in self.calls.values():
            is_effect = call.effect in ("once", "atomic") and call.outcome != "step_failed" and not call.kept
            is_effect = is_effect and not call.own_key  # a key guards it
            if call.seq >= body.voids and is_effect and call.outcome_seq not in body.crossed:
                self._broken("L3", f"forgets {call.step} ({call.effect}), which was begun in event {call.seq}")
        self._entropy = body.entropy
        self._answered = {number: seq for number, seq in self._answered.items() if seq < body.voids}
        for call in self.calls.values():
            call.is_void = call.seq >= body.voids
            call.waits = call.waits or bool(call.own_key and not call.outcome and call.effect == "repeat")
        self.calls = {number: call for number, call in self.calls.items() if call.seq < body.voids}
        self._last_call = max(self.calls, default=0)
        self._last_checkpoint = max((call.checkpoint for call in self.calls.values()), default=0)
        for call in self.calls.values():
            if call.outcome_seq == body.voids:
                call.outcome, call.outcome_seq, call.due = "", 0, 0
                call.waits = bool(call.own_key)


_JUDGE: Final[dict[str, Callable[[HistoryJudge, Any], None]]] = {
    "run_started": HistoryJudge._run_started,
    "step_started": HistoryJudge._step_started,
    "step_completed": HistoryJudge._step_ended,
    "step_shared": HistoryJudge._step_shared,
    "key_taken": HistoryJudge._key_taken,
    "run_resolved": HistoryJudge._run_resolved,
    "step_failed": HistoryJudge._step_ended,
    "step_cancelled": HistoryJudge._step_cancelled,
    "attempt_failed": HistoryJudge._attempt_failed,
    "timer_started": HistoryJudge._timer_started,
    "timer_fired": HistoryJudge._timer_fired,
    "signal_awaited": HistoryJudge._other_command,
    "signal_received": HistoryJudge._signal_received,
    "signal_rejected": HistoryJudge._other_command,
    "value_converted": HistoryJudge._other_command,
    "request_awaited": HistoryJudge._other_command,
    "request_received": HistoryJudge._request_received,
    "request_answered": HistoryJudge._request_answered,
    "approval_asked": HistoryJudge._other_command,
    "approval_withdrawn": HistoryJudge._other_command,
    "stream_appended": HistoryJudge._other_command,
    "graph_started": HistoryJudge._other_command,
    "graph_moved": HistoryJudge._other_command,
    "child_started": HistoryJudge._child_started,
    "child_cancelled": HistoryJudge._other_command,
    "child_ended": HistoryJudge._child_ended,
    "value_published": HistoryJudge._other_command,
    "witness_taken": HistoryJudge._witness_taken,
    "witness_changed": HistoryJudge._other_command,
    "witness_released": HistoryJudge._other_command,
    "drift_judged": HistoryJudge._drift_judged,
    "checkpoint_taken": HistoryJudge._checkpoint_taken,
    "call_withheld": HistoryJudge._call_withheld,
    "charged": HistoryJudge._other_command,
    "attempt_charged": HistoryJudge._attempt_charged,
    "budget_narrowed": HistoryJudge._other_command,
    "cancel_requested": HistoryJudge._cancel_requested,
    "rollback_requested": HistoryJudge._cancel_requested,
    "compensation_started": HistoryJudge._compensation_started,
    "run_retried": HistoryJudge._run_retried,
}
