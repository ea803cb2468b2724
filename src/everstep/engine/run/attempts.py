"""A step in progress: its start, its body once that is allowed, and what follows the end of the body.

In the order in which it happens: `begin` records what the code asked for, `start` starts a body (once its intent is
durable, unless it is a `read`), `_perform` runs it, `end` takes what became of it, and `completed` records its outcome.
What follows when it raises is in `doubts.py`; what it may ask for while it runs, in `bodies.py`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator
from contextvars import Context
from functools import cached_property, partial
from types import coroutine
from typing import TYPE_CHECKING, Any, Final

from everstep.codec import is_immutable_scalar
from everstep.effects.atomic import Settled
from everstep.effects.body import SETTLED
from everstep.effects.descent import bodies_run_in
from everstep.effects.surroundings import CURRENT, set_current
from everstep.engine.code.commands import StepCall, set_variables
from everstep.engine.code.step_state import DOUBT, EARLIER, FALLBACK, KEY, NEVER, ROOM, SLOT, StepState
from everstep.engine.code.stops import pass_on
from everstep.engine.history.clock import microseconds
from everstep.engine.run.bodies import Attempt, Bodies, start_atomic
from everstep.engine.run.budget import Spending
from everstep.engine.run.compensation import note_compensated
from everstep.engine.run.doubts import Doubts, Failures
from everstep.engine.run.keys import Keys
from everstep.errors import NotDone, NotEncodable
from everstep.model import events as ev
from everstep.model.budgets import Charge
from everstep.model.contracts import EXPENSIVE_SECONDS, KEPT, may_run_again
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import logger

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

TURN_SECONDS: Final = 0.001
"""Bodies that lead to further bodies keep the loop to themselves for no longer than this."""
LEFT_SECONDS: Final = 0.5
"""Pause before an app that stops checks again an attempt that it has left to others, in seconds."""


Performs = Callable[["Attempt"], Coroutine[Any, Any, None]]


class BodyTasks:
    """Runs the bodies of an app as tasks of its loop, in the order in which they may start.

    Most bodies end without ever waiting. These share a task, one after the other, each in its own context: a task and a
    turn of the loop for each would cost a quarter of a `read`. A body that waits keeps the task that it began in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context) -> None:
        self._loop = loop
        self._context = context
        self._waiting: deque[tuple[Performs, Attempt, Context]] = deque()
        self._takers: set[asyncio.Task[None]] = set()
        """The tasks that take the next of those that wait."""

    def add(self, performs: Performs, attempt: Attempt, context: Context) -> None:
        """Run a body soon, never inside of anything that applies an outcome."""
        self._waiting.append((performs, attempt, context))
        if not self._takers:
            self._add_task()

    def _add_task(self) -> None:
        run = self._run()
        try:
            # Directly and with the app's context: it is no task of the body in whose context this may be called.
            task = asyncio.Task(run, loop=self._loop, context=self._context.copy())
            task.add_done_callback(self._note_end)
            self._takers.add(task)
        except Exception as error:  # noqa: BLE001  # there is no memory for it: the runs are resumed later
            run.close()
            while self._waiting:
                _, attempt, _ = self._waiting.popleft()
                attempt.bodies.stumble(error)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        """A task has ended. One that an application cancels may have taken none of those that wait."""
        self._takers.discard(task)
        if self._waiting and not self._takers:
            self._add_task()

    def _leave(self, task: "asyncio.Task[None]") -> None:
        """A task continues with its body. Others follow, twice as many if more bodies wait in their turn."""
        self._takers.discard(task)
        task.remove_done_callback(self._note_end)
        for _ in range(min(2, len(self._waiting) - len(self._takers))):
            self._add_task()

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        waiting = self._waiting
        came_before = len(waiting)  # they all have waited for this turn of the loop
        until = time.monotonic() + TURN_SECONDS
        while waiting and not task.cancelling():  # a body may have cancelled its task just before it ended
            if came_before <= 0 and time.monotonic() > until:
                await asyncio.sleep(0)
                came_before, until = len(waiting), time.monotonic() + TURN_SECONDS
            came_before -= 1
            performs, attempt, context = waiting.popleft()
            if attempt.bodies.running.get(attempt.call.call) is not attempt:
                continue  # it is not wanted any more
            try:
                body = performs(attempt)
                task.set_name(attempt.step)
                awaited = context.run(body.send, None)
            except StopIteration:
                continue  # it has ended
            except Exception as error:  # noqa: BLE001  # it reaches this run alone
                attempt.bodies.stumble(error)
                continue
            attempt.task = task
            self._leave(task)
            if attempt.bodies.running.get(attempt.call.call) is not attempt:
                task.cancel()  # it was given up in its first turn
            await _rest_of(body, context, awaited)
            return


@coroutine
def _rest_of(body: Coroutine[Any, Any, None], context: Context, awaited: Any) -> Generator[Any, Any, None]:
    """Go on with a body that waits for something: what its task sends and throws is for the body, in its context."""
    run, send, throw = context.run, body.send, body.throw
    step: Callable[[Any], Any]
    try:
        while True:
            step = send
            try:
                given = yield awaited
            except BaseException as error:  # noqa: BLE001
                step, given = throw, error
            awaited = run(step, given)
            given = None  # an error would be kept alive by its own traceback
    except StopIteration:
        return


class StepAttempts:
    """The state of each open step, and what follows when an attempt ends."""

    slots_wanted: Collection[int] = ()
    """Calls that wait for a slot of their named limit."""

    def __init__(self, driver: "Driver", known: dict[int, StepState]) -> None:
        self.running: dict[int, Attempt] = {}
        """The attempts whose bodies run, by their calls."""
        self.bodies = Bodies(driver, self.running, self._record_heartbeat)
        self.has_doubts = self.has_keys = self.has_failures = False
        self.starting: dict[int, None] = {}
        """Calls whose intent is not durable yet. (The garbage collector skips a dict of numbers.)"""
        self.restarts = 0
        """The number of events, since the last unit, that only repeat what a crash had cut off."""
        self._driver = driver
        self._known = known
        self._when_over: Callable[[int], None] | None = None

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

    @cached_property
    def failures(self) -> "Failures":
        """What follows when a body does not return: most return."""
        self.has_failures = True
        return Failures(self._driver, self, self._known)

    def let_go(self) -> None:
        """The run leaves memory. These point back here: see Execution.evict."""
        del self.bodies
        if self.has_failures:
            del self.failures
        if self.has_doubts:
            del self.doubts
        if self.has_keys:
            del self.keys

    @property
    def are_under_way(self) -> bool:
        """Whether any body or probe runs, or is about to."""
        asks = self.has_doubts and self.doubts.asking
        return bool(self.running or self.starting or asks or self.slots_wanted)

    def must_not_be_cut_off(self, *, starting: bool = True) -> bool:
        """Whether a body runs, or (with `starting`) is about to, whose effect could not be known afterwards."""
        calls = [attempt.call for attempt in self.running.values()]
        if starting:
            steps = self._driver.execution.steps
            calls += [steps[call] for call in self.starting if call in steps]
        return any(not may_run_again(call.target.effect) for call in calls)

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
        self.running[call.call] = attempt
        context, target = app.context.copy(), call.target
        if call.variables:
            context.run(set_variables, call.variables)
        if fallback or (target.effect != "atomic" and (target.is_async or target.timeout is not None)):
            app.body_tasks.add(self._perform, attempt, context)
            return
        context.run(CURRENT.set, attempt)
        if target.effect == "atomic":
            start_atomic(driver, attempt, context, self._settle_atomic, cut_off=self.was_cut_off(call.call))
        else:
            began = time.monotonic()
            body = partial(context.run, target.function, *call.arguments.args, **call.arguments.kwargs)
            app.threads.start(driver.run, body, lambda value, error: self.end(attempt, value, error, began), call.call)

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
            self.end(attempt, None, error, began)
        else:
            self.end(attempt, value, None, began)

    def _is_left(self, call: StepCall) -> bool:
        """Return True if the worker that continues the run can take a step: nothing would be in doubt then."""
        driver = self._driver
        is_leaving = driver.stopped_by is not None or (driver.hold_wanted is not None and not driver.lets_bodies_end)
        return (driver.app.draining or is_leaving) and may_run_again(call.target.effect)

    def was_cut_off(self, call: int, *, coming: bool = False) -> bool:
        """Return True if an attempt before the newest one (or the coming one) is not known to have failed."""
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
        self.cancel(call)
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

    # -- stopping --------------------------------------------------------------------------------------------------
    def tell_when_over(self, callback: Callable[[int], None]) -> None:
        """Call back with each call whose body runs no more, or is not waited for any more."""
        self._when_over = callback

    def cancel(self, call: int) -> None:
        """Stop a body whose outcome is not wanted any more."""
        if (attempt := self.running.get(call)) is not None:
            self.bodies.write_down(attempt)
            task = attempt.task
            self.finish(attempt)
            if task is not None:
                task.cancel()

    def cancel_all(self) -> None:
        """Stop all bodies: the run leaves this process."""
        for call in list(self.running):
            self.cancel(call)
        self.bodies.stop()

    # -- ending ----------------------------------------------------------------------------------------------------
    def end(self, attempt: Attempt, value: Any, error: BaseException | None, began: float) -> None:
        """A body has ended. If the code no longer waits, or the run has left memory, nothing is recorded."""
        crash_point("body.after")
        bodies = attempt.bodies
        if self.running.get(attempt.call.call) is not attempt:
            if error is not None:
                pass_on(error, self._driver.app.loop)
            return
        try:
            if bodies.streams is not None:
                bodies.streams.end(attempt)
            if error is None:
                self.completed(attempt, value, time.monotonic() - began)
            else:
                self.failures.raised(attempt, error, time.monotonic() - began)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            bodies.stumble(raised)

    def completed(self, attempt: Attempt, value: Any, seconds: float) -> None:
        """A body returned."""
        call, driver = attempt.call, self._driver
        try:
            payload = driver.app.codec.encode(value, call.target.signature.result, call.step)
        except NotEncodable as refused:
            self.failures.not_encodable(attempt, refused, seconds)
            return
        self.finish(attempt, is_settled=True)
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

    def finish(self, attempt: Attempt, *, is_settled: bool = False) -> None:
        """The attempt is over; `is_settled` if its outcome is known, and is the step's."""
        call = attempt.call.call
        self.running.pop(call, None)
        attempt.task = None  # its context points back here, and a circle would wait for the garbage collector
        if is_settled:
            if attempt.fate is None:
                attempt.fate = SETTLED
            else:
                attempt.fate.is_settled = True
        if self._when_over is not None:
            self._when_over(call)

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
        if self.running.get(attempt.call.call) is not attempt:
            return
        try:
            if bodies.streams is not None:
                bodies.streams.end(attempt)
            if settled is None:
                assert error is not None
                self.failures.raised(attempt, error, seconds)
            elif settled.refused is not None:
                self.failures.failed(attempt, settled.refused, seconds, final=True)
            else:
                self._settled(attempt, settled, seconds)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            bodies.stumble(raised)

    def _settled(self, attempt: Attempt, settled: "Settled", seconds: float) -> None:
        """Record that an atomic step has happened, in this attempt or in an earlier one."""
        call, driver = attempt.call, self._driver
        self.finish(attempt, is_settled=True)
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

    def _record_heartbeat(self, attempt: Attempt, payload: bytes) -> None:
        """Record the details of a heartbeat, for the next attempt."""
        call = attempt.call
        if call.call in self._known:
            self._known[call.call].details = payload
            raw, ref = self._driver.journal.pack(payload)
            body = ev.Heartbeat(call.call, attempt.attempt, raw, ref, call.is_secret)
            self._driver.record("heartbeat", call.step, body)
            self._driver.writer.save(waited_for=False)


bodies_run_in(StepAttempts._perform, lambda frame: frame.f_locals["attempt"])
