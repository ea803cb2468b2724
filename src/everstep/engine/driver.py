"""One run in memory, driven: where a reader of this engine starts.

A driver is made for a run that this process has claimed (`resume.py`: claim, load and verify, replay). From then on:

    an outcome arrives  →  it is recorded  →  applied to the code (if it was expensive: once it is durable)
    the code asks       →  each command is recorded  →  performed, when the output-commit rule allows it
    the code rests      →  the run waits; after a while it leaves memory
    the code ends       →  the end is recorded; once durable, whoever waits is told

Nothing leaves a run before what it depends on is durable: bodies of steps that are not `read` start, and ends, children
and signals reach anyone, only from `_when_durable`.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from everstep.codec import Codec
from everstep.engine.bodies import Attempt, Bodies
from everstep.engine.clock import Clock, microseconds
from everstep.engine.commands import (
    CancelChild,
    CancelStep,
    ChildCall,
    Command,
    EndRun,
    PublishValue,
    StartTimer,
    StepCall,
)
from everstep.engine.committer import Committer
from everstep.engine.deadlines import Deadlines
from everstep.engine.execution import Execution
from everstep.engine.holding import HoldReport, exhausted_report, stuck_report
from everstep.engine.journal import Journal
from everstep.engine.loop import SpinningWorkflow
from everstep.engine.replay import NEVER, Attempts, Replayed
from everstep.engine.starting import new_run
from everstep.errors import Fatal, NotDecodable, NotEncodable, RunTimedOut
from everstep.model import events as ev
from everstep.model.contracts import needs_intent
from everstep.model.crash_points import crash_point
from everstep.model.events import ENDS
from everstep.model.status import Status
from everstep.stores.protocol import (
    Accepted,
    Append,
    Delivery,
    Failed,
    HoldRow,
    Post,
    Refused,
    RowChange,
    RunRow,
    Store,
    Verdict,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

log = logging.getLogger("everstep.run")

EXPENSIVE_SECONDS: Final = 0.05
"""An outcome that took longer than this is durable before workflow code sees it."""
STATUS_OF_END: Final[dict[str, Status]] = {
    "run_completed": "completed",
    "run_failed": "failed",
    "run_cancelled": "cancelled",
}


class Surrounding(Protocol):
    """What a driver needs of the app that it belongs to."""

    store: Store
    committer: Committer
    codec: Codec
    clock: Clock
    loop: asyncio.AbstractEventLoop
    context: Context
    pool: "Executor"
    thread: int
    threads: set[Any]
    randomness: random.Random
    worker: str
    draining: bool

    def adopt(self, run: str) -> None: ...
    def wake(self, run: str) -> None: ...
    def rested(self, driver: "Driver") -> None: ...
    def let_go(self, driver: "Driver", error: BaseException | None = None) -> None: ...


class Driver:
    """Takes one claimed run as far as it can go."""

    def __init__(self, app: Surrounding, row: RunRow, replayed: Replayed, journal: Journal, started_at: int) -> None:
        self.app = app
        self.row = row
        self.run = row.id
        self.epoch = row.epoch
        self.execution: Execution = replayed.execution
        self.fresh = replayed.fresh
        """What the code asks for beyond its history."""
        self.journal = journal
        self.bodies = Bodies(self)
        self.stopped = False
        self.ending: str = ""
        self.outcome: bytes | None = None
        self.hold: HoldRow | None = None
        self.status: Status = "running"
        self._attempts: dict[int, Attempts] = replayed.attempts
        self._published = replayed.published
        self._publishes = False
        self._starting: set[int] = set()
        self._deadlines = Deadlines()
        self._alarm: asyncio.TimerHandle | None = None
        self._unapplied: deque[tuple[int, bool, str, Any, int]] = deque()
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._durable = journal.seq
        self._sent = (journal.seq, journal.digest)
        self._taken: set[int] = set()
        self._pulling = False
        self._written: tuple[Status, int | None] = (row.status, row.wake_at)
        self._applying = False
        self._set_up_deadlines(replayed, started_at)

    def _set_up_deadlines(self, replayed: Replayed, started_at: int) -> None:
        for call, timer in self.execution.loop.timers.items():
            if timer.deadline:
                self._deadlines.add(timer.deadline, "timer", call)
        timeout = self.execution.workflow.timeout
        if timeout is not None and self.execution.cancel is None:
            self._deadlines.add(started_at + microseconds(timeout), "run")
        if self.execution.cancel is not None:
            self._deadlines.add(replayed.cancel_at + microseconds(self.execution.cancel.grace), "grace")

    # -- going on after a replay ----------------------------------------------------------------------------------------
    def go_on(self, fresh: Sequence[Command]) -> None:
        """Settle the steps that are open by their contracts, then do what the code asks for beyond its history."""
        self._applying = True
        new = {command.call for command in fresh if isinstance(command, StepCall)}
        for call in [call for number, call in self.execution.steps.items() if number not in new]:
            self._settle_open_step(call)
        self._perform(fresh)
        self._applying = False
        self._come_to_rest()

    def _settle_open_step(self, call: StepCall) -> None:
        """A step was begun and its outcome is not recorded. `read` and `repeat` say: run it again, with the same key."""
        attempts = self._attempts.setdefault(call.call, Attempts(attempt=1))
        if attempts.due is None:
            self._begin_again(call, "crash")
        elif attempts.due != NEVER:
            self._deadlines.add(attempts.due, "attempt", call.call)

    # -- outcomes -------------------------------------------------------------------------------------------------------
    def deliver(self, kind: str, step: str, body: Any, *, expensive: bool = False) -> None:
        """Record an outcome and give it to the code, in the order of the log."""
        if self.stopped or self.ending or self.hold:
            return
        body.early = bool(self._unapplied) or self._applying
        seq = self._record(kind, step, body)
        self._unapplied.append((seq, expensive, kind, body, self.journal.at))
        if expensive:
            self._when_durable(seq, self._apply_outcomes)
        else:
            self._save(waited_for=False)
        if not self._applying:
            self._apply_outcomes()

    def _apply_outcomes(self) -> None:
        """Apply what may be applied: outcomes in order, an expensive one only when it is durable."""
        if self._applying:
            return
        self._applying = True
        try:
            while self._unapplied and not self.stopped:
                seq, expensive, kind, body, at = self._unapplied[0]
                if expensive and seq > self._durable:
                    break
                self._unapplied.popleft()
                self.execution.apply(kind, body, at)
                self._perform(self.execution.take_commands())
        except (SpinningWorkflow, NotDecodable, RecursionError) as error:
            self.put_on_hold(stuck_report(self.execution, error))
        finally:
            self._applying = False
        self._come_to_rest()

    # -- commands -------------------------------------------------------------------------------------------------------
    def _perform(self, commands: Sequence[Command]) -> None:
        """Record what the code asked for, and do it when the output-commit rule allows."""
        if self.execution.new_patches:
            self._record_patches()
        for command in commands:
            if isinstance(command, StepCall):
                self._perform_step(command)
            elif isinstance(command, StartTimer):
                self._perform_timer(command)
            elif isinstance(command, EndRun):
                self._end(command)
            else:
                self._perform_other(command)

    def _perform_step(self, command: StepCall) -> None:
        seq = self._record("step_started", command.step, command.body())
        if not command.cancelled:
            self._attempts[command.call] = Attempts(attempt=1)
            self._start_when_allowed(command, seq)

    def _start_when_allowed(self, call: StepCall, seq: int) -> None:
        """A read may start at once. Anything else starts when its intent, and all before it, is durable."""
        if needs_intent(call.target.effect):
            self._starting.add(call.call)
            self._when_durable(seq, lambda: self._start_body(call))
        else:
            self._save(waited_for=False)
            self._start_body(call)

    def _start_body(self, call: StepCall) -> None:
        self._starting.discard(call.call)
        if self.stopped or self.hold or self.ending or call.cancelled or self.app.draining:
            return
        attempts = self._attempts[call.call]
        self.bodies.start(call, attempts.attempt, attempts.details)

    def _perform_timer(self, command: StartTimer) -> None:
        timer = command.timer
        timer.deadline = max(self.app.clock.now(), self.journal.at) + timer.duration
        self._record("timer_started", "", command.body())
        self._deadlines.add(timer.deadline, "timer", command.call)
        self._save(waited_for=False)

    def _perform_other(self, command: Command) -> None:
        if isinstance(command, ChildCall):
            new = new_run(
                command.target,
                command.run,
                command.arguments,
                at=self.app.clock.now(),
                randomness=self.app.randomness,
                parent=self.run,
                call=command.call,
            )
            self.journal.starts.append(new)
            seq = self._record(command.kind, command.step, command.body())
            self._when_durable(seq, lambda: self.app.adopt(command.run))
            return
        body = command.body()
        if isinstance(command, PublishValue):
            self._published[command.name] = msgspec.Raw(command.payload)
            self._publishes = True
            body = self.journal.pack_into(body, "value")
        elif isinstance(command, CancelStep):
            self.bodies.cancel(command.target.call)
            self._attempts.pop(command.target.call, None)
        elif isinstance(command, CancelChild):
            self._cancel_child(command.target.run, self.journal.seq + 1)
        self._record(command.kind, command.step, body)
        self._save(waited_for=False)

    def _cancel_child(self, child: str, seq: int) -> None:
        request = ev.CancelRequested(reason=f"its parent {self.run} no longer waits for it", by=self.run)
        self.journal.posts.append(Post(child, "cancel", value=ev.encode_body(request), at=self.app.clock.now()))
        self._when_durable(seq, lambda: self.app.wake(child))

    def _record_patches(self) -> None:
        for name in self.execution.new_patches:
            self._record("patched", "", ev.Patched(name, self.execution.patches[name]))
        self.execution.new_patches.clear()

    # -- attempts -------------------------------------------------------------------------------------------------------
    def attempt_completed(self, attempt: Attempt, value: Any, seconds: float) -> None:
        """A body returned."""
        call = attempt.call
        try:
            payload = self.app.codec.encode(value, call.target.signature.result, f"the outcome of {call.step}")
        except NotEncodable as refused:
            self.attempt_failed(attempt, refused, seconds, final=True)
            return
        self.bodies.finish(attempt)
        if call.call not in self.execution.steps:
            return
        attempts = self._attempts.pop(call.call)
        raw, ref = self.journal.pack(payload)
        body = ev.StepCompleted(call.call, raw, ref, attempts.attempt, round(seconds, 3))
        body.fallback = attempt.fallback
        body.key_unused = attempts.attempt > 1 and call.target.effect == "repeat" and not attempt.body.key_used
        self.deliver("step_completed", call.step, body, expensive=seconds > EXPENSIVE_SECONDS)

    def attempt_failed(self, attempt: Attempt, error: BaseException, seconds: float, *, final: bool = False) -> None:
        """A body raised: another attempt by its policy, a fallback, a person, or the workflow gets the error."""
        call, policy = attempt.call, attempt.call.target.retry
        self.bodies.record_heartbeats()
        self.bodies.finish(attempt)
        if call.call not in self.execution.steps or self.stopped:
            return
        attempts = self._attempts[call.call]
        attempts.failures += 1
        raw, ref = self.journal.pack(self.app.codec.encode_error(error))
        again = not final and not attempt.fallback and policy.allows(attempts.failures, error)
        fallback = call.target.fallback is not None and not attempt.fallback and not again
        needs_person = policy.then == "hold" and not isinstance(error, Fatal) and not again and not fallback
        if again or fallback or needs_person:
            delay = policy.delay(attempts.failures, error, self.app.randomness) if again else 0.0
            due = NEVER if needs_person else self.app.clock.now() + microseconds(delay)
            attempts.due = due
            body = ev.AttemptFailed(call.call, attempts.attempt, due, raw, ref, round(seconds, 3))
            self._record("attempt_failed", call.step, body)
            self._save(waited_for=False)
            if needs_person:
                self.put_on_hold(exhausted_report(call, attempts.attempt, error))
            elif fallback:
                self.bodies.start(call, attempts.attempt, attempts.details, fallback=True)
            else:
                self._deadlines.add(due, "attempt", call.call)
                self._come_to_rest()
            return
        del self._attempts[call.call]
        failed = ev.StepFailed(call.call, raw, ref, attempts.attempt, round(seconds, 3))
        self.deliver("step_failed", call.step, failed, expensive=seconds > EXPENSIVE_SECONDS)

    def _begin_again(self, call: StepCall, because: str) -> None:
        """Record and start another attempt."""
        attempts = self._attempts[call.call]
        if attempts.failures >= call.target.retry.attempts and call.target.fallback is not None:
            self.bodies.start(call, attempts.attempt, attempts.details, fallback=True)
            return
        attempts.attempt += 1
        attempts.due = None
        attempts.by_person = False
        body = call.body()
        body.attempt, body.because = attempts.attempt, because
        seq = self._record("step_started", call.step, body)
        self._start_when_allowed(call, seq)

    def record_heartbeat(self, attempt: Attempt, payload: bytes) -> None:
        """Write down how far a body is, for its next attempt."""
        call = attempt.call
        if call.call in self._attempts:
            self._attempts[call.call].details = payload
            raw, ref = self.journal.pack(payload)
            self._record("heartbeat", call.step, ev.Heartbeat(call.call, attempt.body.attempt, raw, ref))
            self._save(waited_for=False)

    # -- deadlines ------------------------------------------------------------------------------------------------------
    def ring(self) -> None:
        """Do what is due by now."""
        self._alarm = None
        if not self.stopped:
            self._fire_due(self.app.clock.now())
            self._come_to_rest()

    def _fire_due(self, until: int) -> None:
        """Fire deadlines up to a time, in their order."""
        while (top := self._deadlines.top()) is not None and not self.stopped:
            if not self._is_live(top.kind, top.call):
                self._deadlines.pop()
                continue
            if top.at > until or self.ending or self.hold:
                break
            self._deadlines.pop()
            if top.kind == "timer":
                self.deliver("timer_fired", "", ev.TimerFired(top.call))
            elif top.kind == "attempt":
                call = self.execution.steps[top.call]
                self._begin_again(call, "person" if self._attempts[top.call].by_person else "retry")
            elif top.kind == "run":
                self._request_cancel(ev.CancelRequested(reason="the run's timeout", timeout=True), top.at)
            else:
                self._force_end()

    def _is_live(self, kind: str, call: int) -> bool:
        if kind == "timer":
            return call in self.execution.loop.timers
        if kind == "attempt":
            attempts = self._attempts.get(call)
            return attempts is not None and attempts.due is not None and call in self.execution.steps
        return kind == "grace" or self.execution.cancel is None

    def _request_cancel(self, request: ev.CancelRequested, at: int) -> None:
        if request.now:
            self._record("cancel_requested", "", request)
            self.execution.cancel = request
            self._force_end()
            return
        self._deadlines.add(max(at, self.journal.at) + microseconds(request.grace), "grace")
        self.deliver("cancel_requested", "", request)

    def _force_end(self) -> None:
        """The grace is over, or was refused: the run ends without its code."""
        cancel = self.execution.cancel
        if cancel is not None and cancel.timeout:
            error = RunTimedOut(f"The run took longer than {self.execution.workflow.timeout} s and did not stop.")
            self.outcome = self.app.codec.encode_error(error)
            self._record_end("run_failed", ev.RunFailed(msgspec.Raw(self.outcome), forced=True))
        else:
            self._record_end("run_cancelled", ev.RunCancelled(forced=True))

    # -- the inbox ------------------------------------------------------------------------------------------------------
    async def pull_inbox(self) -> None:
        """Take what has arrived for this run, in the order of arrival."""
        if self._pulling or self.stopped:
            return
        self._pulling = True
        try:
            deliveries = self.app.store.inbox(self.run)
        finally:
            self._pulling = False
        self.take(deliveries)

    def take(self, deliveries: Sequence[Delivery]) -> None:
        """Take deliveries into the history. A timer that was due before one arrived comes first."""
        for delivery in deliveries:
            if self.stopped or self.hold or (self.ending and delivery.kind != "cancel"):
                return
            if delivery.number in self._taken:
                continue
            self._fire_due(delivery.at)
            if self.stopped or self.hold:
                return
            self._taken.add(delivery.number)
            self.journal.consumed.append(delivery.number)
            _TAKE[delivery.kind](self, delivery)
        self._come_to_rest()

    def _take_signal(self, delivery: Delivery) -> None:
        raw, ref = self.journal.pack(delivery.value)
        body = ev.SignalReceived(delivery.number, delivery.name, raw, ref, delivery.id)
        self.deliver("signal_received", "", body)

    def _take_cancel(self, delivery: Delivery) -> None:
        request: ev.CancelRequested = msgspec.json.decode(delivery.value, type=ev.CancelRequested)
        request.number = delivery.number
        if self.execution.cancel is None or request.now:
            self._request_cancel(request, delivery.at)
        else:
            self._save(waited_for=False)

    def _take_child(self, delivery: Delivery) -> None:
        end = msgspec.json.decode(delivery.value, type=_ChildEnd)
        if int(delivery.id) not in self.execution.children:
            self._save(waited_for=False)
            return
        raw, ref = self.journal.pack(bytes(end.outcome) if end.status in ("completed", "failed") else b"")
        body = ev.ChildEnded(int(delivery.id), delivery.name, end.status, delivery.number, raw, ref)
        self.deliver("child_ended", "", body)

    def _take_hold(self, delivery: Delivery) -> None:
        report = msgspec.json.decode(delivery.value, type=HoldReport)
        self.put_on_hold(report)

    # -- ends and holds -------------------------------------------------------------------------------------------------
    def _end(self, command: EndRun) -> None:
        """The code is done. Children that should not outlive it are asked to stop, in the same transaction."""
        body = command.body()
        self.outcome = command.payload or None
        if command.kind != "run_cancelled":
            body = self.journal.pack_into(body, "value" if command.kind == "run_completed" else "error")
        self._record_end(command.kind, body)

    def _record_end(self, kind: str, body: ev.Body) -> None:
        crash_point("run.end")
        self.bodies.cancel_all()
        seq = self.journal.seq + 1
        for child in self.execution.children.values():
            if child.target.on_parent_end == "cancel":
                self._cancel_child(child.run, seq)
        self.ending = kind
        self._record(kind, "", body)
        self._save(waited_for=True)

    def put_on_hold(self, report: HoldReport) -> None:
        """Stop here and ask a person."""
        if self.stopped or self.hold or self.ending:
            return
        self.bodies.cancel_all()
        at = self.app.clock.now()
        self.hold = report.row(self.run, at, self.app.randomness)
        self._record("run_held", report.step, ev.RunHeld(self.hold.id, report.reason, report.summary))
        self._save(waited_for=True)

    # -- resting --------------------------------------------------------------------------------------------------------
    def _come_to_rest(self) -> None:
        """Say how the run is, set the alarm, and if the code can never go on, say that too."""
        if self.stopped or self.ending or self.hold or self._applying:
            return
        if self.bodies.running or self._unapplied or self._starting:
            self.status = "running"
        else:
            self.execution.forget_stale_receives()
            if not self.execution.is_waiting:
                self.put_on_hold(stuck_report(self.execution, None))
                return
            self.status = "waiting"
            if self._written != ("waiting", self._wake_at()):
                self._save(waited_for=False)
            self.app.rested(self)
        self._set_alarm()

    def _wake_at(self) -> int | None:
        while (top := self._deadlines.top()) is not None and not self._is_live(top.kind, top.call):
            self._deadlines.pop()
        return top.at if top is not None else None

    def _set_alarm(self) -> None:
        wake_at = self._wake_at()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_at is not None:
            seconds = min(max(0, wake_at - self.app.clock.now()) / 1e6, 3600.0)
            self._alarm = self.app.loop.call_later(seconds, self.ring)

    # -- writing --------------------------------------------------------------------------------------------------------
    def _record(self, kind: str, step: str, body: ev.Body) -> int:
        return self.journal.record(kind, step, body, self.app.clock.now())

    def _save(self, *, waited_for: bool) -> None:
        self.app.committer.ready(self, waited_for=waited_for)

    def _when_durable(self, seq: int, callback: Callable[[], None]) -> None:
        self._waiters.append((seq, callback))
        self._save(waited_for=True)

    def unit(self) -> Append | None:
        """Return everything that is not saved yet (for the committer)."""
        journal = self.journal
        wake_at = self._wake_at() if self.status == "waiting" else None
        if self.stopped or (not journal.unsaved and not journal.consumed and self._written == (self.status, wake_at)):
            return None
        events = journal.unsaved
        unit = Append(
            run=self.run,
            generation=journal.generation,
            epoch=self.epoch,
            expected_seq=self._sent[0],
            expected_digest=self._sent[1],
            events=events,
            row=self._row_change(wake_at),
            payloads=journal.payloads,
            consumed=journal.consumed,
            starts=journal.starts,
            posts=journal.posts,
            hold=self.hold,
            release=self.hold is not None,
        )
        self._sent = (journal.seq, journal.digest)
        self._written = (unit.row.status, wake_at)
        journal.unsaved, journal.payloads, journal.consumed, journal.starts, journal.posts = [], [], [], [], []
        return unit

    def _row_change(self, wake_at: int | None) -> RowChange:
        status: Status = STATUS_OF_END[self.ending] if self.ending else "held" if self.hold else self.status
        published = None
        if self._publishes:
            published = msgspec.json.encode(self._published)
            self._publishes = False
        steps = self.execution.steps
        current = next(iter(steps.values())).step if steps else ""
        return RowChange(status, self.journal.at, wake_at, current, published, self.outcome if self.ending else None)

    def settle(self, unit: Append, verdict: Verdict) -> None:
        """Take the committer's verdict."""
        if self.stopped:
            return
        if isinstance(verdict, Accepted):
            if unit.events:
                self._durable = unit.events[-1].seq
            self._wake_waiters()
            if unit.row.status == "held" or (unit.events and unit.events[-1].kind in ENDS):
                self.app.let_go(self)
        elif isinstance(verdict, Refused) and verdict.why == "inbox":
            self._take_back_end(unit)
        elif isinstance(verdict, Failed):
            self.fail(verdict.error)
        else:
            log.info("Run %s was taken over by another worker; this one lets go of it.", self.run)
            self.app.let_go(self)

    def _wake_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self._durable:
            self._waiters.popleft()[1]()

    def _take_back_end(self, unit: Append) -> None:
        """A cancel arrived before the end was durable: the end is taken back and the cancel comes first."""
        journal = self.journal
        journal.unsaved = list(unit.events[:-1])
        journal.payloads, journal.consumed = list(unit.payloads), list(unit.consumed)
        journal.starts = list(unit.starts)
        journal.posts = list(unit.posts)
        last = unit.events[-2] if len(unit.events) > 1 else None
        journal.seq = last.seq if last else unit.expected_seq
        journal.digest = last.digest if last else unit.expected_digest
        self._sent = (unit.expected_seq, unit.expected_digest)
        self._written = ("running", None)
        self.ending, self.outcome = "", None
        self.app.wake(self.run)

    def fail(self, error: BaseException) -> None:
        """The store has failed: nothing is assumed, and nothing more is done."""
        self.app.let_go(self, error)

    def stop(self) -> None:
        """Leave memory. Nothing is recorded; the code is unwound."""
        if self.stopped:
            return
        self.stopped = True
        self.bodies.cancel_all()
        if self._alarm is not None:
            self._alarm.cancel()
        self._waiters.clear()
        self._unapplied.clear()
        self.execution.evict()

    def ended_as(self) -> Status | None:
        """Return the status in which the run left this process for good: an end, or held; None if it just left."""
        if self.journal.unsaved or self._durable != self.journal.seq:
            return None
        return STATUS_OF_END[self.ending] if self.ending else "held" if self.hold else None

    @property
    def is_idle(self) -> bool:
        """Whether the run waits and everything about it is durable, so that it can leave memory."""
        quiet = not (self.bodies.running or self._unapplied or self._starting or self._waiters or self._pulling)
        return self.status == "waiting" and quiet and not self.journal.unsaved and self._durable == self.journal.seq


class _ChildEnd(msgspec.Struct):
    status: str
    outcome: msgspec.Raw = msgspec.Raw(b"null")


_TAKE: Final[dict[str, Callable[[Driver, Delivery], None]]] = {
    "signal": Driver._take_signal,
    "cancel": Driver._take_cancel,
    "child": Driver._take_child,
    "hold": Driver._take_hold,
}
