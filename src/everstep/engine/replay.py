"""Verified replay: the code is run against its history, with no effects, and every command must match.

Kind, callee, arguments' digest, order, durations, names and types of signals, child workflows and results are compared.
A difference is found before anything new is done; the caller then holds the run.
"""

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from everstep.engine.commands import Command, Difference, EndRun, StartTimer
from everstep.engine.execution import OUTCOMES, Execution
from everstep.engine.guard import Silence
from everstep.engine.history import Recorded
from everstep.engine.loop import SpinningWorkflow
from everstep.errors import NotDecodable
from everstep.model.events import ENDS

COMMANDS: Final = frozenset(
    {
        "step_cancelled",
        "timer_started",
        "signal_awaited",
        "signal_rejected",
        "child_started",
        "child_cancelled",
        "value_published",
        "witness_taken",
        "witness_released",
        "charged",
        "budget_narrowed",
    }
)
NEVER: Final = -1
"""The due time of an attempt that waits for a person."""
FALLBACK: Final = -2
"""The due time of an attempt that is never made: the step's fallback takes its place."""
DOUBT: Final = -3
"""The due time of an attempt about which nobody knows yet whether the one before it happened."""
ROOM: Final = -4
"""The due time of an attempt that is made when there is room for it in the budget."""


class Attempts(msgspec.Struct, gc=False):
    """What the history says about the attempts at one open step."""

    attempt: int = 0
    failures: int = 0
    due: int | None = None
    details: bytes = b""
    by_person: bool = False
    by: str = ""
    """The worker that began the last attempt (with `once`)."""
    doubted_at: int = 0
    happened: bool = False
    """Whether it surely happened, and only its outcome is missing."""
    probes: int = 0
    refused: bool = False
    """Whether the budget had no room for it, so that its fallback takes its place."""


class Replayed(msgspec.Struct):
    """The result of a replay."""

    execution: Any
    differences: list[Difference]
    fresh: list[Command]
    """What the code asks for beyond the end of the history."""
    attempts: dict[int, Attempts]
    published: dict[str, msgspec.Raw]
    cancel_at: int = 0
    """When the cancel was requested, if it was."""
    retried: bool = False
    """Whether the run was ever retried."""
    spins: bool = False
    """Whether the code did not come to rest."""


def first_run(execution: Execution, started: Recorded) -> Replayed:
    """Run the code of a new run to its first rest: there is nothing to compare it with yet."""
    try:
        execution.begin(started.body, started.at)
    except SpinningWorkflow:
        return Replayed(execution, [], [], {}, {}, spins=True)
    return Replayed(execution, [], execution.take_commands(), {}, {})


class Replay:
    """One replay of one history."""

    def __init__(self, execution: Execution, history: Sequence[Recorded]) -> None:
        self.history = history
        self.execution = execution
        self.differences: list[Difference] = []
        self.attempts: dict[int, Attempts] = {}
        self.published: dict[str, msgspec.Raw] = {}
        self.cancel_at = 0
        self._queue: deque[Command] = deque()
        self._accepted: dict[int, str] = {}
        self._void: set[int] = set()
        self._kept: set[int] = set()
        """Outcomes that arrived between a failure and its retry. What follows from them is recorded after the retry."""
        self._branches: dict[int, tuple[int, str]] = {}
        self._reopened: dict[int, set[int]] = {}
        self._kinds = set(map(itemgetter(1), history))
        self._position = 0
        self._look_ahead()

    def go(self, *, quiet: bool = False) -> Replayed:
        """Replay everything and return the execution at its last rest, with whatever differs."""
        last_silent = len(self.history) if quiet else self._count_silent()
        self.execution.replaying = self.execution.loop.quiet = len(self.history) > 1
        try:
            if last_silent:
                with Silence():
                    self._take_until(last_silent)
            self._take_until(len(self.history))
        except (NotDecodable, SpinningWorkflow) as error:
            self._differ(self._position, "outcome", str(error) or "the code does not come to rest")
        self.execution.replaying = False
        self.execution.loop.quiet = False
        self.execution.begun = {call for call, attempts in self.attempts.items() if attempts.attempt}
        return Replayed(
            self.execution,
            self.differences,
            list(self._queue),
            self.attempts,
            self.published,
            self.cancel_at,
            "run_retried" in self._kinds,
        )

    # -- looking ahead ---------------------------------------------------------------------------------------------
    def _look_ahead(self) -> None:
        """Find what later events say about earlier ones: patches, accepted differences, failures that were retried."""
        if self._kinds.isdisjoint(("patched", "run_resolved", "run_retried")):
            return
        for event in self.history:
            if event.kind == "patched":
                self.execution.patches[event.body.name] = event.body.value
            elif event.kind == "run_resolved":
                self._accepted.update(event.body.accepted)
            elif event.kind == "run_retried":
                self._void_before(event)

    def _void_before(self, retried: Recorded) -> None:
        """What the code did between a failure and its retry no longer counts; what arrived from outside still does.

        Steps that were open and failed meanwhile are open again as well: who retries a run means all that failed.
        """
        begun_after: set[int] = set()
        reopened = self._reopened[retried.seq] = {retried.body.call}
        self._branches[retried.body.voids] = (len(self._reopened), retried.body.entropy)
        for event in self.history[retried.body.voids - 1 : retried.seq - 1]:
            kind, call = event.kind, getattr(event.body, "call", 0)
            if kind in ENDS or event.seq == retried.body.voids or kind == "cancel_requested":
                self._void.add(event.seq)
            elif _is_command(event):
                self._void.add(event.seq)
                begun_after.add(call)
            elif call in begun_after:
                self._void.add(event.seq)
            elif kind == "step_failed":
                self._void.add(event.seq)
                reopened.add(call)
            elif kind in OUTCOMES:
                self._kept.add(event.seq)

    def _count_silent(self) -> int:
        """Return how many events were surely followed by the code's own output already.

        Output of the code after the newest outcome was seen if the commands that followed are recorded; otherwise the
        process may have died before, and the code speaks again.
        """
        for event in reversed(self.history):
            if event.kind in OUTCOMES or event.kind == "run_started":
                return int(event.seq) - 1
            if event.kind in COMMANDS or event.kind in ENDS or event.kind in ("step_started", "call_withheld"):
                return len(self.history)
        return len(self.history)

    # -- one event -------------------------------------------------------------------------------------------------
    @property
    def _is_broken(self) -> bool:
        return bool(self.differences) and not self.differences[-1].acceptable

    def _take_until(self, end: int) -> None:
        """Take events, up to a place in the history or to where code and history have parted."""
        history, void, branches, differences = self.history, self._void, self._branches, self.differences
        books = self.execution.books
        last = len(history) - 1
        for position in range(self._position, end):
            if differences and self._is_broken:
                return
            self._position = position
            event = history[position]
            if position == last:
                self.execution.replaying = self.execution.loop.quiet = False
            if branches and event.seq in branches:
                self.execution.branch, self.execution.entropy = branches[event.seq]
            if books is not None:
                books.replay(event, is_void=event.seq in void)
            if void and event.seq in void:
                continue
            kind = event.kind
            if kind == "step_started":
                self._begin_attempt(event)
            elif kind in OUTCOMES:
                self._apply(event)
            elif kind in COMMANDS:
                self._match_command(event)
            else:
                self._take_other(event)
        self._position = end

    def _take_other(self, event: Recorded) -> None:
        if event.kind == "run_started":
            self.execution.begin(event.body, event.at)
            self._queue.extend(self.execution.take_commands())
        elif event.kind in ENDS:
            self._match_end(event)
        elif event.kind == "call_withheld":
            self._withhold(event)
        elif event.kind != "attempt_charged":  # that is for the books
            self._note(event)

    def _apply(self, event: Recorded) -> None:
        seq, kind, _, at, body = event
        if kind == "cancel_requested":
            self._drop_overtaken_end()
            self.cancel_at = at
        if self._queue and not body.early and seq not in self._kept:
            extra = self._queue[0]
            self._add(event, "extra call", _recorded_text(event), extra)
            return
        try:
            self.execution.apply(kind, body, at)
        except KeyError:
            self._add(event, "outcome", _recorded_text(event), None)
            return
        if kind == "step_completed" or kind == "step_failed":  # a tuple would be built for each event
            self.attempts.pop(body.call, None)
        self._queue.extend(self.execution.take_commands())

    def _drop_overtaken_end(self) -> None:
        """A cancel may arrive when the code has finished but its end is not recorded: the end is then the cancel's."""
        if any(isinstance(command, EndRun) for command in self._queue):
            self._queue = deque(command for command in self._queue if not isinstance(command, EndRun))

    def _match_command(self, event: Recorded) -> None:
        if event.kind == "child_started" and event.body.withheld:
            self.attempts.pop(event.body.call, None)  # what the code asked for was matched when it had to wait
        else:
            self._match(event)

    def _withhold(self, event: Recorded) -> None:
        """The budget had no room for a call: it waits, or its fallback takes its place."""
        body = event.body
        if not body.again:
            self._match(event)
        attempts = self.attempts.setdefault(body.call, Attempts())
        attempts.refused = body.then == "fallback"
        attempts.due = FALLBACK if attempts.refused else ROOM

    def _match(self, event: Recorded) -> None:
        if not self._queue:
            self._add(event, "missing call", _recorded_text(event), None)
            return
        command = self._queue.popleft()
        if command.kind != event.kind and not (event.kind == "call_withheld" and event.body.instead_of == command.kind):
            self._add(event, "kind", _recorded_text(event), command)
            return
        if command.step != event.step:
            self._add(event, "callee", _recorded_text(event), command)
            return
        what, acceptable = command.compare(event.body)
        if what and not (acceptable and self._accepted.get(event.seq) == command.digest()):
            self._add(event, what, _recorded_text(event), command, acceptable)
        if event.kind == "step_started":
            return
        if isinstance(command, StartTimer):
            command.timer.deadline = event.body.deadline
        elif event.kind == "value_published":
            self.published[event.body.name] = msgspec.Raw(self.execution.payload(event.body.value, event.body.ref))

    def _match_end(self, event: Recorded) -> None:
        self.execution.ended = True
        if not getattr(event.body, "forced", False):
            self._match(event)

    def _begin_attempt(self, event: Recorded) -> None:
        body = event.body
        if body.attempt == 1 and not body.because:
            self.attempts[body.call] = Attempts(1, by=body.by)
            self._match(event)
            return
        attempts = self.attempts.setdefault(body.call, Attempts())
        attempts.attempt, attempts.by = body.attempt, body.by
        attempts.due = None
        attempts.by_person = attempts.refused = False

    def _note(self, event: Recorded) -> None:
        kind, body = event.kind, event.body
        attempts = self.attempts.setdefault(body.call, Attempts()) if getattr(body, "call", 0) else None
        if kind == "attempt_failed" and attempts is not None:
            attempts.failures += 1
            attempts.due = body.due
        elif kind == "heartbeat" and attempts is not None:
            attempts.details = self.execution.payload(body.details, body.ref)
        elif kind == "step_doubted" and attempts is not None:
            attempts.due, attempts.doubted_at, attempts.probes = DOUBT, event.at, 0
            attempts.happened = body.because == "outcome"
        elif kind == "probe_answered" and attempts is not None:
            attempts.probes += 1
        elif kind == "run_resolved":
            for subject, fact in body.facts.items():
                if subject in self.execution.witnesses:  # not if it was taken between a failure and its retry
                    self.execution.witnesses[subject].payload = bytes(fact)
            if attempts is not None:
                self._note_resolution(attempts, body.resolution, event.at)
        elif kind == "run_retried":
            self._retry(event)

    def _note_resolution(self, attempts: Attempts, resolution: str, at: int) -> None:
        """What a person decided about one step: fresh attempts, another one, or another round of questions."""
        if resolution == "retry":
            attempts.failures, attempts.due, attempts.by_person = 0, at, True
        elif resolution == "not-done":
            attempts.due, attempts.by_person = at, True
        elif resolution == "probe":
            attempts.due, attempts.doubted_at, attempts.probes = DOUBT, at, 0

    def _retry(self, event: Recorded) -> None:
        """A person's retry: what failed is open again, with all its attempts."""
        self.execution.ended = False
        self.cancel_at = 0
        for call in self._reopened[event.seq] & self.execution.steps.keys():
            attempts = self.attempts.setdefault(call, Attempts())
            attempts.failures, attempts.due, attempts.by_person = 0, event.at, True
        if len(self._queue) == 1 and isinstance(self._queue[0], EndRun):
            # The code's own error, raised again by the same code. Its end counts as new.
            self.execution.ended = True

    # -- differences -----------------------------------------------------------------------------------------------
    def _add(
        self, event: Recorded, what: str, recorded: str, command: Command | None, acceptable: bool = False
    ) -> None:
        now = command.text() if command is not None else self._what_the_code_does()
        self.differences.append(
            Difference(
                seq=event.seq,
                what=what,
                recorded=recorded,
                now=now,
                recorded_source=getattr(event.body, "source", ""),
                now_source=command.source if command is not None else "",
                acceptable=acceptable,
                digest=command.digest() if command is not None and acceptable else "",
            )
        )

    def _differ(self, position: int, what: str, now: str) -> None:
        event = self.history[position]
        what = "arguments" if event.kind == "run_started" else what
        self.differences.append(Difference(event.seq, what, _recorded_text(event), f"fail: {now}"))

    def _what_the_code_does(self) -> str:
        main = self.execution.main
        if main is not None and main.done() and not main.cancelled():
            error = main.exception()
            return f"raise {type(error).__name__}: {error}" if error is not None else "return"
        return "wait"


def _is_command(event: Recorded) -> bool:
    """Tell whether an event is the first that records something which the code asked for."""
    kind, body = event.kind, event.body
    if kind == "step_started":
        return bool(body.attempt == 1 and not body.because)
    if kind == "call_withheld":
        return not body.again
    return kind in COMMANDS and not (kind == "child_started" and body.withheld)


def _recorded_text(event: Recorded) -> str:
    """Return a recorded event as a person would say it."""
    body, kind = event.body, event.kind
    if kind == "call_withheld":
        kind = body.instead_of
    if kind == "run_started":
        return f"start of {body.workflow}"
    if kind == "step_started":
        return f"step {event.step}({body.preview}) [{body.effect}]"
    if kind == "timer_started":
        return f"timer of {body.duration / 1e6:g} s"
    if kind == "signal_awaited":
        return f"receive {body.name!r} as {body.type}"
    if kind == "child_started":
        return f"child run {body.run} of {body.workflow}({body.preview})"
    if kind == "value_published":
        return f"publish {body.name!r}"
    if kind in ENDS:
        return {"run_completed": "return", "run_failed": "raise an error", "run_cancelled": "stop, cancelled"}[kind]
    return f"{kind} {event.step}".strip()
