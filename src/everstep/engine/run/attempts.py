"""A step in progress: its start, its body once that is allowed, and what follows the end of the body.

In the order in which it happens: `begin` records what the code asked for, `start` starts a body (once its intent is
durable, unless it is a `read`), `ended` takes its result, and `_completed` or `failed` records it: an outcome, another
attempt, a fallback, or a question to a person.
"""

import asyncio
import time
from collections.abc import Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from everstep.codec import is_immutable_scalar, near
from everstep.effects.atomic import Settled, Undecided
from everstep.effects.descent import bodies_run_in
from everstep.effects.surroundings import CURRENT, set_current
from everstep.engine.code.commands import StepCall
from everstep.engine.code.step_state import DOUBT, EARLIER, FALLBACK, KEY, NEVER, ROOM, SLOT, StepState
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.history.clock import microseconds
from everstep.engine.run.bodies import Attempt, Bodies, start_atomic
from everstep.engine.run.budget import Spending
from everstep.engine.run.compensation import note_compensated
from everstep.engine.run.doubts import Doubts
from everstep.engine.run.holds import exhausted_report
from everstep.engine.run.keys import Keys
from everstep.errors import Fatal, FolderBusy, NotDone, NotEncodable
from everstep.model import events as ev
from everstep.model.budgets import Charge
from everstep.model.contracts import EXPENSIVE_SECONDS, KEPT, may_run_again
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import Stopped, described, is_a, logger

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

LOOK_SECONDS: Final = 0.05
"""How often a failed attempt looks whether what its body started has ended."""
LEFT_SECONDS: Final = 0.5
"""Pause before an app that stops checks again an attempt that it has left to others, in seconds."""


class StepAttempts:
    """The state of each open step, and what follows when an attempt ends."""

    slots_wanted: Collection[int] = ()
    """Calls that wait for a slot of their named limit."""

    def __init__(self, driver: "Driver", known: dict[int, StepState]) -> None:
        self.bodies = Bodies(driver, self._record_heartbeat)
        self.has_doubts = self.has_keys = False
        self.starting: dict[int, None] = {}
        """Calls whose intent is not durable yet. (The garbage collector skips a dict of numbers.)"""
        self.restarts = 0
        """The number of events, since the last unit, that only repeat what a crash had cut off."""
        self._driver = driver
        self._known = known

    @cached_property
    def doubts(self) -> "Doubts":
        """The steps of which it is unknown whether they happened: most runs have none."""
        self.has_doubts = True
        return Doubts(self._driver, self, self._known)

    @cached_property
    def keys(self) -> "Keys":
        """The steps with `key=`: most runs have none."""
        self.has_keys = True
        return Keys(self._driver, self, self._known)

    def let_go(self) -> None:
        """The run leaves memory. These point back here: see Execution.evict."""
        del self.bodies
        if self.has_doubts:
            del self.doubts
        if self.has_keys:
            del self.keys

    @property
    def are_under_way(self) -> bool:
        """Whether any body or probe runs, or is about to."""
        asks = self.has_doubts and self.doubts.asking
        return bool(self.bodies.running or self.starting or asks or self.slots_wanted)

    def must_not_be_cut_off(self) -> bool:
        """Whether a body runs, or is about to, whose effect nobody could tell afterwards."""
        steps = self._driver.execution.steps
        starting = (steps[call] for call in self.starting if call in steps)
        return self.bodies.must_not_be_cut_off() or any(not may_run_again(call.target.effect) for call in starting)

    def has_unsettled(self) -> bool:
        """Whether any step was begun whose effect must be known before the run may end, and is not."""
        steps = self._driver.execution.steps
        begun = (steps[call] for call, one in self._known.items() if call in steps and one.due in (None, DOUBT))
        return any(call.target.is_accounted_for for call in begun)

    def begun_steps(self) -> list[StepCall]:
        """Return the open steps that have begun, as far as known: not those that still wait for room or a key."""
        unbegun = {call for call, one in self._known.items() if not one.attempt or one.due in (ROOM, SLOT)}
        return [call for number, call in self._driver.execution.steps.items() if number not in unbegun]

    # -- beginning -------------------------------------------------------------------------------------------------
    def begin(self, call: StepCall) -> None:
        """Record a step that the code asked for, and start it when that is allowed."""
        driver, target = self._driver, call.target
        execution = driver.execution
        if not target.is_plain or driver.budgets is not None or execution.kept is not None:
            if self._begins_otherwise(call):
                return
            seq = self.record_start(call, call.body())
        else:
            seq = driver.record("step_started", call.step, call.body())
        if call.cancelled:
            return
        self._known[call.call] = StepState(1, by=driver.app.worker)
        if execution.caution and self._may_have_happened_unseen(call):
            self.doubts.begin(call, None, because=execution.caution)
        elif target.needs_intent:  # see start_when_allowed
            self.starting[call.call] = None
            driver.writer.start_when_durable(seq, call, False)
        else:
            self.start_when_allowed(call, seq)

    def _begins_otherwise(self, call: StepCall) -> bool:
        """Begin a step that has to wait for a slot, its key or room, or whose outcome is known; False for any other."""
        driver = self._driver
        if call.target.limit is not None and not call.cancelled:
            driver.app.limits.begin(driver, call)
            return True
        if driver.execution.kept is not None and self.take_kept(call):
            return True
        if call.keyed is not None:
            self.keys.begin(call)
            return True
        return driver.budgets is not None and not (call.cancelled or self.has_room(call))

    def take_kept(self, call: StepCall) -> bool:
        """Give a call the outcome of an effect that was done before the run was retried, so that it is not done again.

        Both events are recorded at once, so that no crash comes between them.
        """
        kept = self._driver.execution.kept
        if kept is None or may_run_again(call.target.effect) or call.cancelled:
            return False
        outcome = kept.take(call.step, call.arguments.digest)
        if outcome is None:
            return False
        body = call.body()
        body.because = KEPT
        self.record_start(call, body)
        given = ev.StepCompleted(call.call, outcome.value, outcome.ref, 1, adopted=True)
        self._driver.deliver("step_completed", call.step, given)
        return True

    def record_start(self, call: StepCall, body: ev.StepStarted) -> int:
        """Record a start. An effect that must not happen twice keeps its arguments and its worker, which settling it
        needs.

        One with a compensation keeps its arguments for that.
        """
        if call.target.is_accounted_for:
            if not may_run_again(call.target.effect):
                body.by = body.by or self._driver.app.worker
            if call.target.compensate is not None:
                body.compensate = call.target.compensate.name
            body.whole, body.ref = self._driver.journal.pack(call.arguments.payload)
            if call.target.database is not None:
                body.database = call.target.database.name
        driver = self._driver
        if driver.budgets is not None:
            driver.budgets.reserve(call, body)
        return driver.record("step_started", call.step, body)

    def settle_open(self, call: StepCall) -> None:
        """Do what the contract says about a step that was begun and whose outcome is not recorded.

        `read` and `repeat`: run it again, with the same key. `once`: it is in doubt. `atomic`: its next attempt begins
        with its marker, unless the code names another database by now.
        """
        attempts = self._known.setdefault(call.call, StepState(attempt=1))
        attempts.doubted_at = min(attempts.doubted_at, self._driver.app.clock.now())
        if call.keyed is not None:
            self.keys.take_up(call)
        if attempts.due == DOUBT:
            self.doubts.go_on(call)
        elif attempts.due is None and call.target.effect == "once":
            self.doubts.begin(call, None)
        elif attempts.due is None and attempts.database and attempts.database != call.target.database.name:
            self.doubts.begin(call, None, because="database")
        elif attempts.due is None:
            self.begin_again(call.call, "crash")
        elif attempts.due == FALLBACK:
            self.start_fallback(call, self._driver.writer.durable)
        elif attempts.due == SLOT:
            because = "crash" if attempts.attempt and self.was_cut_off(call.call, coming=True) else "limit"
            self._driver.app.limits.ask(self._driver, call, because)
        elif attempts.due not in (NEVER, KEY, ROOM):
            self._driver.deadlines.add(attempts.due, "attempt", call.call)

    def begin_again(self, number: int, because: str = "", *, has_slot: bool = False) -> None:
        """Record and start another attempt."""
        call = self._driver.execution.steps[number]
        attempts = self._known[number]
        if self._driver.app.draining:
            self._leave_to_the_next(number, attempts)
            return
        if attempts.by_person and call.target.effect == "once" and (still := self.doubts.may_still_act(call)):
            self.doubts.hold(call, f"it was said that it has not happened, but {still}")
            return
        if self._may_have_happened_unseen(call) and not attempts.asked:
            self.doubts.begin(call, None, because=self._driver.execution.caution)
            return
        is_unwanted = call.future.is_cancel_wanted or self._driver.end_wanted
        if is_unwanted and call.target.is_accounted_for and not self._must_look(call, because):
            self.settle_as_not_done(call)
            return
        if call.keyed is None and not self.has_room(call, again=True):
            return
        if call.target.limit is not None and not has_slot:
            self._driver.app.limits.withhold(self._driver, call, because, again=True)
            return
        self.restarts += because == "crash"
        because = because or ("person" if attempts.by_person else "retry")
        crash_point("attempt.again")
        if call.keyed is not None:
            self.keys.begin_again(call, because)
            return
        body = call.body()
        body.because = because
        attempts.attempt += 1
        attempts.due = None
        attempts.by_person = attempts.refused = False
        attempts.by = self._driver.app.worker
        body.attempt = attempts.attempt
        self.start_when_allowed(call, self.record_start(call, body))

    def _leave_to_the_next(self, number: int, attempts: StepState) -> None:
        """Leave a body to the next worker because the app stops: the history says what is due."""
        at = self._driver.app.clock.now() + microseconds(LEFT_SECONDS)
        self._driver.deadlines.add(at, "probe" if attempts.due == DOUBT else "attempt", number)
        self._driver.come_to_rest()

    def has_room(self, call: StepCall, *, again: bool = False) -> bool:
        """Return True if the budget has room for an attempt. Otherwise record that, and the step waits or its fallback
        runs.

        Compensations are never stopped: what was done half-way is undone, whatever that costs. Nor is an attempt that
        must find out what happened to one which a crash cut off, where that must be known before the run may end.
        """
        budgets = self._driver.budgets
        if budgets is None:
            return True
        lack = budgets.lack(call)
        if lack is None or call.compensates or (again and self._was_lost_sight_of(call)):
            return True
        attempts = self._known.setdefault(call.call, StepState())
        attempts.due = ROOM
        budgets.withhold(call, lack, attempts.attempt, again=again)
        if again:
            self._driver.come_to_rest()
        return False

    def _was_lost_sight_of(self, call: StepCall) -> bool:
        target = call.target
        return target.is_accounted_for and target.effect != "once" and self.was_cut_off(call.call, coming=True)

    def _may_have_happened_unseen(self, call: StepCall) -> bool:
        """Return True if a step that must not happen twice may have been begun in a part of the history that is lost.

        An `atomic` one needs no confirmation: its attempt begins with its marker.
        """
        return bool(self._driver.execution.caution) and call.target.effect == "once"

    def _must_look(self, call: StepCall, because: str) -> bool:
        """Return True if only another attempt can tell whether a step that was cut off has happened."""
        if call.target.effect == "atomic":
            return self.was_cut_off(call.call, coming=True)
        return because == "crash" and may_run_again(call.target.effect)

    def of(self, call: int) -> StepState | None:
        """Return the state of an open step, or None."""
        return self._known.get(call)

    def note(self, call: int, attempts: StepState) -> StepState:
        """Start to keep the state of a call."""
        self._known[call] = attempts
        return attempts

    def want_slot(self, call: int) -> None:
        """Note a call that waits for a slot: the run stays active until it has it."""
        self.slots_wanted = {*self.slots_wanted, call}

    def settle_as_not_done(self, call: StepCall) -> None:
        """End a step that did not happen (or failed, if it may be repeated), because the code was cancelled
        meanwhile.
        """
        attempts = self._known.pop(call.call)
        if call.keyed is not None:
            self.keys.settle(call, None)
        error: BaseException = NotDone(f"{call.step} has not happened, and was cancelled before another attempt.")
        if may_run_again(call.target.effect):
            error = asyncio.CancelledError(f"{call.step} failed, and was cancelled before another attempt.")
        raw, ref = self._driver.journal.pack(self._driver.app.codec.encode_error(error))
        self._driver.deliver("step_failed", call.step, ev.StepFailed(call.call, raw, ref, attempts.attempt))

    def fail(self, call: StepCall, error: BaseException, *, secret: bool = False) -> None:
        """Fail a step that is not begun, or not again: the workflow gets the error, which is `secret` if it may
        reveal too much.
        """
        attempts = self._known.pop(call.call)
        if call.keyed is not None:
            self.keys.settle(call, None)
        raw, ref = self._driver.journal.pack(self._driver.app.codec.encode_error(error))
        body = ev.StepFailed(call.call, raw, ref, attempts.attempt, secret=secret)
        self._driver.deliver("step_failed", call.step, body)

    def start_fallback(self, call: StepCall, seq: int) -> None:
        """Start the fallback in the step's place, when event `seq`, on which it depends, is durable."""
        self.start_when_allowed(call, seq, fallback=True)

    def start_when_allowed(self, call: StepCall, seq: int, *, fallback: bool = False) -> None:
        """Start a read at once, anything else when its intent, and everything before it, is durable.

        In a run with a budget a read waits as well: its reservation must be durable.
        """
        driver = self._driver
        writer = driver.writer
        must_wait = call.target.needs_intent or driver.budgets is not None
        if must_wait and seq > writer.durable:
            self.starting[call.call] = None
            writer.start_when_durable(seq, call, fallback)
        else:
            driver.app.committer.ready(writer, waited_for=False)
            self.start(call, fallback)

    def start(self, call: StepCall, fallback: bool) -> None:
        """Start the body of a call, or its fallback, unless it is no longer wanted: it is allowed now."""
        self.starting.pop(call.call, None)
        driver = self._driver
        if call.cancelled or driver.stopped or driver.ending or driver.hold:
            return
        app = driver.app
        if (app.draining or driver.hold_wanted is not None or driver.stopped_by) and self._is_left(call):
            return
        known = self._known[call.call]
        if driver.execution.caution and not (known.asked or fallback) and self._may_have_happened_unseen(call):
            self.doubts.begin(call, None, because=driver.execution.caution)  # it has a key, which it has got only now
            return
        if known.inherited and call.target.effect == "once" and not (known.asked or fallback):
            self.doubts.begin(call, None, because=EARLIER)
            return
        crash_point("body.before")
        attempt = Attempt(
            driver.run,
            driver.execution.workflow.name,
            call.step,
            call.arguments.digest,
            call.entropy,
            known.attempt,
            app.codec.decode(known.details) if known.details else None,
            bodies=self.bodies,
            call=call,
            fallback=fallback,
        )
        if driver.budgets is not None:
            attempt.spending = Spending(uses_nothing=driver.budgets.must_use_nothing(call.call, fallback=fallback))
        self.bodies.running[call.call] = attempt
        context, target = app.context.copy(), call.target
        if fallback or (target.effect != "atomic" and (target.is_async or target.timeout is not None)):
            app.body_tasks.add(self._perform, attempt, context)
            return
        context.run(CURRENT.set, attempt)
        if target.effect == "atomic":
            start_atomic(driver, attempt, context, self._settle_atomic, cut_off=self.was_cut_off(call.call))
        else:
            began = time.monotonic()
            body = partial(context.run, target.function, *call.arguments.args, **call.arguments.kwargs)
            app.threads.start(driver.run, body, lambda value, error: self._end(attempt, value, error, began), call.call)

    async def _perform(self, attempt: Attempt) -> None:
        """Run a body to its end."""
        set_current(attempt)
        call = attempt.call
        target = call.target
        began = time.monotonic()
        try:
            if target.is_async and target.timeout is None and not attempt.fallback:
                _, _, args, kwargs = call.arguments
                value = await (target.function(*args, **kwargs) if kwargs else target.function(*args))
            else:
                value = await attempt.bodies.call(attempt)
        except BaseException as error:  # noqa: BLE001  # whatever a body raises
            self._end(attempt, None, error, began)
        else:
            self._end(attempt, value, None, began)

    def _is_left(self, call: StepCall) -> bool:
        """Return True if a step is left to the worker that continues the run, because nothing would be in doubt
        then.
        """
        driver = self._driver
        is_leaving = driver.stopped_by is not None or (driver.hold_wanted is not None and not driver.lets_bodies_end)
        return (driver.app.draining or is_leaving) and may_run_again(call.target.effect)

    def was_cut_off(self, call: int, *, coming: bool = False) -> bool:
        """Return True if an attempt before the newest one (or the coming one) did not end by failing, as far as
        known.
        """
        attempts = self._known[call]
        return attempts.attempt - 1 + coming > attempts.failures

    def ask_again(self) -> None:
        """Ask again about everything, because a part of the history is lost."""
        for attempts in self._known.values():
            attempts.asked = False

    def is_due_later(self, call: int) -> bool:
        """Return True if a step waits for the time of its next attempt."""
        attempts = self._known.get(call)
        return attempts is not None and (attempts.due or 0) > 0 and call in self._driver.execution.steps

    def forget(self, call: int) -> None:
        """The code no longer waits for this step."""
        self.bodies.cancel(call)
        if self.has_keys:
            self.keys.forget(call)
        self._known.pop(call, None)

    def forget_all(self) -> None:
        """Forget all steps, because they are compensated from here on. None of them is in doubt."""
        for call in self._driver.execution.steps.values():
            call.cancelled = True  # one whose intent is not durable yet must not start
            self.forget(call.call)
        if self.has_doubts:
            self.doubts.cancel_all()
        self.starting.clear()
        self._known.clear()

    # -- ending ----------------------------------------------------------------------------------------------------
    def _end(self, attempt: Attempt, value: Any, error: BaseException | None, began: float) -> None:
        """A body has ended. If the code no longer waits, or the run has left memory, nothing is recorded."""
        crash_point("body.after")
        bodies = attempt.bodies
        if bodies.running.get(attempt.call.call) is not attempt:
            if error is not None:
                pass_on(error, self._driver.app.loop)
            return
        try:
            if bodies.streams is not None:
                bodies.streams.end(attempt)
            if error is None:
                self._completed(attempt, value, time.monotonic() - began)
            else:
                self._raised(attempt, error, time.monotonic() - began)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            bodies.stumble(raised)

    def _completed(self, attempt: Attempt, value: Any, seconds: float) -> None:
        """A body returned."""
        call, driver = attempt.call, self._driver
        try:
            payload = driver.app.codec.encode(value, call.target.signature.result, call.step)
        except NotEncodable as refused:
            self._not_encodable(attempt, refused, seconds)
            return
        self.bodies.finish(attempt, is_settled=True)
        if call.call not in driver.execution.steps:
            return
        if is_immutable_scalar(value):
            call.returned = value
        attempts = self._known.pop(call.call)
        raw, ref = driver.journal.pack(payload)
        body = ev.StepCompleted(call.call, raw, ref, attempts.attempt)
        if seconds >= 0.001:
            body.seconds = round(seconds, 3)
        if attempts.attempt > 1:
            body.key_unused = call.target.effect == "repeat" and not attempt.key_used
        if attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        is_expensive = seconds > EXPENSIVE_SECONDS
        if attempt.fallback or call.compensates or call.keyed is not None or not call.target.is_plain:
            self._note_more(attempt, payload, body)
            is_expensive = is_expensive or call.target.cost is not None
        driver.deliver("step_completed", call.step, body, expensive=is_expensive)

    def _not_encodable(self, attempt: Attempt, refused: NotEncodable, seconds: float) -> None:
        """A body returned what cannot be stored."""
        call = attempt.call
        if call.compensates:
            self._completed(attempt, None, seconds)  # it is done, and nobody needs what it returned
        elif call.target.effect == "once" and not attempt.fallback:
            self.bodies.charging.write(attempt)
            self.bodies.finish(attempt)
            self.doubts.begin(call, refused, happened=True)
        else:
            self.failed(attempt, refused, seconds, final=True)

    def _note_more(self, attempt: Attempt, payload: bytes, body: ev.StepCompleted) -> None:
        """Record the return value of a step with options."""
        if (call := attempt.call).keyed is not None:
            self.keys.settle(call, None if attempt.fallback else payload)
        if call.compensates:
            self.note_compensated(call)
        body.fallback, body.secret = attempt.fallback, call.is_secret

    def note_compensated(self, call: StepCall) -> None:
        """Note a compensation that has happened; its outcome is recorded next."""
        undone = self._driver.execution.saga.completed.get(call.compensates)
        if undone is not None:
            note_compensated(self._driver.journal, call.compensates, undone.key, undone.carried)

    def _settle_atomic(
        self, attempt: Attempt, settled: Settled | None, error: BaseException | None, seconds: float
    ) -> None:
        """Handle the result of an attempt at an atomic step."""
        crash_point("body.after")
        bodies = attempt.bodies
        if bodies.running.get(attempt.call.call) is not attempt:
            return
        try:
            if bodies.streams is not None:
                bodies.streams.end(attempt)
            if settled is None:
                assert error is not None
                self._raised(attempt, error, seconds)
            elif settled.refused is not None:
                self.failed(attempt, settled.refused, seconds, final=True)
            else:
                self._settled(attempt, settled, seconds)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            bodies.stumble(raised)

    def _settled(self, attempt: Attempt, settled: "Settled", seconds: float) -> None:
        """Record that an atomic step has happened, in this attempt or in an earlier one."""
        call, driver = attempt.call, self._driver
        self.bodies.finish(attempt, is_settled=True)
        if call.call not in driver.execution.steps:
            return
        attempts = self._known.pop(call.call)
        if call.compensates:
            self.note_compensated(call)
        raw, ref = driver.journal.pack(settled.payload)
        body = ev.StepCompleted(call.call, raw, ref, attempts.attempt, round(seconds, 3), adopted=settled.adopted)
        body.secret = call.is_secret
        if settled.adopted and driver.budgets is not None:
            body.charged = Charge(0, 0)  # an earlier attempt did it, and was charged; this one only read the marker
        elif attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        is_expensive = seconds > EXPENSIVE_SECONDS or call.target.cost is not None
        driver.deliver("step_completed", call.step, body, expensive=is_expensive)

    def _raised(self, attempt: Attempt, error: BaseException, seconds: float) -> None:
        """A body raised. A cancellation that the engine wanted does not come here: its attempt runs no more."""
        stop = stop_in(error)
        if stop is None and attempt.task is not None and attempt.task.cancelling():
            stop = asyncio.CancelledError(f"and then {described(error)}")
        if stop is None:
            self.failed(attempt, error, seconds)
        else:
            self._stopped(attempt, stop, error, seconds)

    def _stopped(self, attempt: Attempt, stop: BaseException, error: BaseException, seconds: float) -> None:
        """A body was stopped, which is no outcome: its contract says what that means, as after a crash.

        A `once` is in doubt now, with what it raised. Anything else is settled in the run's next life.
        """
        call, driver = attempt.call, self._driver
        if call.target.effect == "once" and not attempt.fallback:
            self.failed(attempt, error.stop if type(error) is Stopped else error, seconds)
            pass_on(stop, driver.app.loop)
            return
        if attempt.spending is not None:
            self.bodies.charging.write(attempt)
        self.bodies.record_heartbeats()
        self.bodies.finish(attempt)
        driver.leave_unfinished(stop, f"the body of {call.step}")

    def failed(self, attempt: Attempt, error: BaseException, seconds: float, *, final: bool = False) -> None:
        """A body raised: another attempt by its policy, a fallback, a person, or the workflow gets the error."""
        call, driver = attempt.call, self._driver
        is_certain = call.target.effect != "once" or attempt.fallback or _is_certain(call, error)
        if is_certain and call.target.effect == "once" and not attempt.fallback:
            left = driver.app.acting.left_behind(driver.run, call.call)
            if left and self._end_later(attempt, error, seconds, left):
                return
            # What it said about the effect, it said before all of it had ended.
            is_certain = not left and (not attempt.failed_at or is_a(error, Fatal, *call.target.retry.never))
        self.bodies.record_heartbeats()
        self.bodies.finish(attempt)
        if call.call not in driver.execution.steps or driver.is_over:
            return
        if not is_certain:
            self.bodies.charging.write(attempt)
            self.doubts.begin(call, error, because="left" if attempt.failed_at else "error")
            return
        if call.target.effect == "atomic" and isinstance(error, Undecided):
            self.bodies.charging.write(attempt)
            self.doubts.begin(call, error.error, because="commit" if error.is_lasting else "error")
            return
        attempts = self._known[call.call]
        attempts.failures += 1
        policy = call.target.retry
        if not final and not attempt.fallback:
            if policy.allows(attempts.failures, error):
                delay = policy.delay(attempts.failures, error, driver.app.randomness)
                self._record_failure(attempt, attempts, error, seconds, driver.app.clock.now() + microseconds(delay))
                driver.deadlines.add(attempts.due or 0, "attempt", call.call)
                driver.come_to_rest()
                return
            if call.target.fallback is not None:
                self.start_fallback(call, self._record_failure(attempt, attempts, error, seconds, FALLBACK))
                return
            if is_a(error, FolderBusy) or (policy.then == "hold" and not is_a(error, Fatal)):
                self._record_failure(attempt, attempts, error, seconds, NEVER)
                driver.put_on_hold(exhausted_report(call, attempts.attempt, error))
                return
        if call.compensates:  # there is no code in which it could be raised
            self._record_failure(attempt, attempts, error, seconds, NEVER)
            driver.put_on_hold(exhausted_report(call, attempts.attempt, error))
            return
        del self._known[call.call]
        self.bodies.finish(attempt, is_settled=True)
        if call.keyed is not None:
            self.keys.settle(call, None)
        with near(call.target.function, driver.execution.workflow.function):
            raw, ref = driver.journal.pack(driver.app.codec.encode_error(error))
        body = ev.StepFailed(call.call, raw, ref, attempts.attempt, round(seconds, 3), call.is_secret)
        if attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        is_expensive = seconds > EXPENSIVE_SECONDS or call.target.cost is not None
        driver.deliver("step_failed", call.step, body, expensive=is_expensive)

    def _end_later(self, attempt: Attempt, error: BaseException, seconds: float, left: str) -> bool:
        """A `once` body failed for certain, but something that it started still acts: its attempt has not ended.

        Until that has ended nothing is recorded, so that any other process finds the step begun and in doubt. Returns
        False when it has been waited for as long as a probe would be asked.
        """
        app = self._driver.app
        now = app.clock.now()
        if not attempt.failed_at:
            attempt.failed_at = now
            log.warning("%s of run %s failed, and waits for %s to end.", attempt.step, attempt.run, left)
        if now > attempt.failed_at + microseconds(attempt.call.target.probe_for):
            return False
        app.loop.call_later(LOOK_SECONDS, self._end, attempt, None, error, time.monotonic() - seconds)
        return True

    def _record_failure(
        self, attempt: Attempt, attempts: StepState, error: BaseException, seconds: float, due: int
    ) -> int:
        call = attempt.call
        attempts.due = due
        raw, ref = self._driver.journal.pack(self._driver.app.codec.encode_error(error))
        body = ev.AttemptFailed(call.call, attempts.attempt, due, raw, ref, round(seconds, 3), call.is_secret)
        if attempt.spending is not None:
            body.charged = attempt.spending.take_total()
        seq = self._driver.record("attempt_failed", call.step, body)
        self._driver.writer.save(waited_for=False)
        return seq

    def _record_heartbeat(self, attempt: Attempt, payload: bytes) -> None:
        """Record the details of a heartbeat, for the next attempt."""
        call = attempt.call
        if call.call in self._known:
            self._known[call.call].details = payload
            raw, ref = self._driver.journal.pack(payload)
            body = ev.Heartbeat(call.call, attempt.attempt, raw, ref, call.is_secret)
            self._driver.record("heartbeat", call.step, body)
            self._driver.writer.save(waited_for=False)


def _is_certain(call: StepCall, error: BaseException) -> bool:
    """Tell whether an error of a `once` step says for sure that the effect did not happen, or has failed for good."""
    return is_a(error, NotDone, Fatal, *call.target.not_done, *call.target.retry.never)


bodies_run_in(StepAttempts._perform, lambda frame: frame.f_locals["attempt"])
