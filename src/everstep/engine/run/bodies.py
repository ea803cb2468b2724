"""Bodies of steps at work: attempts are started, timed, cancelled; their ends are told to the driver."""

import asyncio
import functools
import threading
import time
from contextvars import Context, copy_context
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, Final

from everstep.effects.atomic import Settled
from everstep.effects.body import SETTLED, Fate, Means, StepBody
from everstep.effects.descent import bodies_run_in
from everstep.effects.step import is_async_callable
from everstep.effects.surroundings import CURRENT, set_current
from everstep.engine.code.commands import StepCall
from everstep.engine.code.stops import pass_on, stop_in
from everstep.engine.history.clock import microseconds
from everstep.engine.run.atomic import start_atomic
from everstep.engine.run.budget import Charging, Spending
from everstep.engine.run.eager_start import Body
from everstep.engine.run.streams import Streams
from everstep.engine.run.threads import Threads
from everstep.errors import Misuse, NotDone, StepTimedOut
from everstep.model.contracts import may_run_again
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import described, is_a, logger

if TYPE_CHECKING:
    from everstep.engine.run.attempts import StepAttempts
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

LOOK_SECONDS: Final = 0.05
"""How often a failed attempt looks whether what its body started has ended."""
HEARTBEAT_SECONDS: Final = 1.0
"""Heartbeats that come faster are recorded at this pace; the newest always counts."""
CHARGES: Final = threading.Lock()
"""Two threads may charge one attempt for the first time at once."""


class Attempt(StepBody, eq=False, kw_only=True):
    """One attempt at a step, while its body runs."""

    _bodies: "Bodies"
    call: StepCall
    fallback: bool = False
    is_asked: bool = False
    """Whether this is only a question to a probe about the attempt."""
    fate: Fate | None = None
    spending: "Spending | None" = None
    task: "asyncio.Task[None] | None" = None
    failed_at: int = 0
    """When its body failed, if something that it started has gone on since."""

    def worker(self) -> str:
        return self._bodies.worker

    def shared_fate(self) -> Fate:
        if self.fate is None:
            self.fate = SETTLED if self.call.target.effect == "read" else Fate()
        return self.fate

    def settle(self) -> None:
        """Its outcome is known."""
        if self.fate is None:
            self.fate = SETTLED
        else:
            self.fate.is_settled = True

    def number(self) -> int:
        return -self.call.call if self.is_asked else self.call.call

    def idempotency_key(self) -> str:
        return self.call.idempotency_key()

    def take_heartbeat(self, details: Any) -> None:
        self._bodies.take_heartbeat(self.call.call, details)

    def means(self) -> Means:
        return self._bodies.means()

    def take_entry(self, name: str, value: Any) -> None:
        if self._bodies.running.get(self.call.call) is self:  # else nobody waits for this body any more
            self._bodies.streams_of_run().take(self, name, value)

    def refuse_given_up(self) -> None:
        bodies = self._bodies
        if bodies.running.get(self.call.call) is not self or bodies.is_over:
            raise NotDone(f"{self.step}: attempt {self.attempt} was given up. Nothing was changed.")

    def refuse_overtaken(self) -> None:
        self.refuse_given_up()
        if not self._bodies.has_the_newest_epoch():
            raise NotDone(f"{self.step}: the run was taken over during attempt {self.attempt}. Nothing was changed.")

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        with CHARGES:
            spending = self.spending = self.spending or Spending()
            charging = self._bodies.charging
        spending.add(nanos, tokens)
        charging.hear(self, spending)
        if spending.uses_nothing and (nanos or tokens):
            which = "the fallback of a step for which there is no budget" if self.fallback else "a step with cost={}"
            raise Misuse(
                f"everstep.charge() in {self.step}: {which} must not use anything. It was counted all the same."
            )


class Bodies:
    """The bodies of one run that are running now."""

    def __init__(self, driver: "Driver", attempts: "StepAttempts") -> None:
        self.running: dict[int, Attempt] = {}
        self._charging: Charging | None = None
        self._driver = driver
        self._attempts = attempts
        self._heartbeats: dict[int, bytes] = {}
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self.streams: Streams | None = None

    def start(self, call: StepCall, attempt: int, details: bytes, *, fallback: bool = False) -> None:
        """Start a body. For contracts other than `read`, its `step_started` is durable now."""
        crash_point("body.before")
        driver = self._driver
        app = driver.app
        running = Attempt(
            driver.run,
            driver.execution.workflow.name,
            call.step,
            call.arguments.digest,
            call.entropy,
            attempt,
            app.codec.decode(details) if details else None,
            _bodies=self,
            call=call,
            fallback=fallback,
        )
        if driver.budgets is not None:
            running.spending = Spending(uses_nothing=driver.budgets.must_use_nothing(call.call, fallback=fallback))
        context: Context = app.context.copy()
        self.running[call.call] = running
        target = call.target
        if (target.is_async or target.timeout is not None or fallback) and (fallback or target.effect != "atomic"):
            app.first_turns.add(self, running, call.step, context)
            return
        context.run(CURRENT.set, running)
        if target.effect == "atomic":
            start_atomic(driver, self, running, context, cut_off=self._attempts.was_cut_off(call.call))
        else:
            began = time.monotonic()
            body = functools.partial(context.run, target.function, *call.arguments.args, **call.arguments.kwargs)
            app.threads.start(driver.run, body, lambda value, error: self._end(running, value, error, began), call.call)

    @property
    def worker(self) -> str:
        """This process among the workers."""
        return self._driver.app.worker

    def attempt_at(self, call: StepCall, attempt: int) -> Attempt:
        """Return an attempt that somebody asks about, and that does not run."""
        workflow, digest = self._driver.execution.workflow.name, call.arguments.digest
        surroundings = (self._driver.run, workflow, call.step, digest, call.entropy, attempt, None)
        return Attempt(*surroundings, _bodies=self, call=call, is_asked=True)

    @property
    def charging(self) -> "Charging":
        """What writes down the charges of running bodies: most runs have no budget."""
        if self._charging is None:
            self._charging = Charging(self._driver)
        return self._charging

    def streams_of_run(self) -> "Streams":
        """Return what writes to the run's streams. May be called on any thread."""
        with CHARGES:
            if self.streams is None:
                self.streams = Streams(self._driver)
            return self.streams

    def means(self) -> Means:
        """Return what an atomic step needs of the app."""
        app = self._driver.app
        return Means(app.store, app.codec, app.clock.now)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is recorded of bodies here: the run has ended, is held or has left."""
        return self._driver.is_over

    def has_the_newest_epoch(self) -> bool:
        """Ask the store whether the run is still this driver's. May be called on any thread."""
        row, mine = self._driver.app.store.run(self._driver.run), self._driver.row
        return row is not None and (row.epoch, row.generation) == (mine.epoch, mine.generation)

    def begin(self, attempt: Attempt) -> Body | None:
        """Return the body of an attempt whose turn has come, if it is still wanted."""
        return self._perform(attempt) if self.running.get(attempt.call.call) is attempt else None

    def stumble(self, error: BaseException) -> None:
        """What was done for a body raised: the run leaves memory, and is taken up again."""
        self._driver.app.stumbling.leave(self._driver, error)

    def goes_on(self, attempt: Attempt, task: "asyncio.Task[None]") -> None:
        """The body of an attempt has to wait for something. It may have been cancelled even in its first turn."""
        attempt.task = task
        if self.running.get(attempt.call.call) is not attempt:
            task.cancel()

    async def _perform(self, attempt: Attempt) -> None:
        """Run the body to its end, whatever that is, and tell the driver."""
        set_current(attempt)
        call = attempt.call
        began = time.monotonic()
        try:
            target = call.target
            if target.is_async and target.timeout is None and not attempt.fallback:
                _, _, args, kwargs = call.arguments
                value = await (target.function(*args, **kwargs) if kwargs else target.function(*args))
            elif target.timeout is None:
                value = await self._call(attempt)
            else:
                value = await self._call_within(attempt, target.timeout)
        except BaseException as error:  # noqa: BLE001  # whatever a body raises: see _end
            self._end(attempt, None, error, began)
        else:
            self._end(attempt, value, None, began)

    def _end(self, attempt: Attempt, value: Any, error: BaseException | None, began: float) -> None:
        """A body has ended. If the code no longer waits, or the run has left memory, nothing is recorded."""
        crash_point("body.after")
        if self.running.get(attempt.call.call) is not attempt:
            if error is not None:
                pass_on(error, self._driver.app.loop)
            return
        try:
            if self.streams is not None:
                self.streams.end(attempt)
            if error is None:
                self._attempts.completed(attempt, value, time.monotonic() - began)
            else:
                self._raised(attempt, error, time.monotonic() - began)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            self.stumble(raised)

    def _raised(self, attempt: Attempt, error: BaseException, seconds: float) -> None:
        """A body raised. A cancellation that the engine wanted does not come here: its attempt runs no more."""
        stop = stop_in(error)
        if stop is None and attempt.task is not None and attempt.task.cancelling():
            stop = asyncio.CancelledError(f"and then {described(error)}")
        if stop is None:
            self._attempts.failed(attempt, error, seconds)
        else:
            self._attempts.stopped(attempt, stop, error, seconds)

    def end_later(self, attempt: Attempt, error: BaseException, seconds: float, left: str) -> bool:
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

    def settle(self, attempt: Attempt, settled: "Settled | None", error: BaseException | None, seconds: float) -> None:
        """An attempt at an atomic step is settled."""
        crash_point("body.after")
        if self.running.get(attempt.call.call) is not attempt:
            return
        try:
            if self.streams is not None:
                self.streams.end(attempt)
            if settled is None:
                assert error is not None
                self._raised(attempt, error, seconds)
            elif settled.refused is not None:
                self._attempts.failed(attempt, settled.refused, seconds, final=True)
            else:
                self._attempts.settled(attempt, settled, seconds)
        except Exception as raised:  # noqa: BLE001  # it reaches this run alone
            self.stumble(raised)

    async def _call_within(self, attempt: Attempt, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._call(attempt)
        except TimeoutError as error:
            if limit.expired():
                raise StepTimedOut(f"An attempt at {attempt.call.step} took longer than {seconds} s.") from None
            raise error

    async def _call(self, attempt: Attempt) -> Any:
        call = attempt.call
        target = call.target
        args, kwargs = call.arguments.args, call.arguments.kwargs
        if attempt.fallback:
            return await self._call_fallback(attempt, target.fallback, args, kwargs)
        if target.is_async:
            return await target.function(*args, **kwargs)
        return await self.call_in_thread(attempt, target.function, args, kwargs, call.call)

    async def call_in_thread(self, attempt: Attempt, function: Any, args: Any, kwargs: Any, call: int = 0) -> Any:
        """Run a `def` body on a thread. A thread cannot be stopped: the attempt may act on after its timeout."""
        app = self._driver.app
        future: asyncio.Future[tuple[Any, BaseException | None]] = app.loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((value, error))

        body = functools.partial(copy_context().run, function, *args, **kwargs)
        app.threads.start(attempt.run, body, done, call)
        value, error = await future
        if error is not None:
            raise error
        return value

    async def _call_fallback(self, attempt: Attempt, fallback: Any, args: Any, kwargs: Any) -> Any:
        if not callable(fallback):
            return fallback
        if is_async_callable(fallback):
            return await fallback(*args, **kwargs)
        value = await self.call_in_thread(attempt, fallback, args, kwargs)
        return await value if is_a(value, CoroutineType) else value

    def finish(self, attempt: Attempt) -> None:
        """The attempt is over."""
        self.running.pop(attempt.call.call, None)
        attempt.task = None  # its context points back here, and a circle would wait for the garbage collector

    def cancel(self, call: int) -> None:
        """Stop a body that nobody waits for any more."""
        attempt = self.running.get(call)
        if attempt is None:
            return
        try:
            if attempt.spending is not None:
                self.charging.write(attempt)
            if self.streams is not None:
                self.streams.end(attempt)
        except Exception:  # the other bodies of a run that leaves memory are stopped all the same
            log.exception("What %s of run %s had charged or appended cannot be written", attempt.step, attempt.run)
        del self.running[call]
        if attempt.task is not None:
            attempt.task.cancel()

    def record_charges(self) -> None:
        """Write down what running bodies were charged, and have appended: they may be cut off."""
        if self.streams is not None:
            self.streams.flush()
        for attempt in self.running.values():
            self.charging.write(attempt)

    def must_not_be_cut_off(self) -> bool:
        """Whether a body runs whose effect nobody could tell afterwards."""
        return any(not may_run_again(attempt.call.target.effect) for attempt in self.running.values())

    def cancel_all(self) -> None:
        """Stop all bodies: the run leaves this process."""
        for call in list(self.running):
            self.cancel(call)
        if self._charging is not None:
            self._charging.stop()
        if self.streams is not None:
            self.streams.stop()
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()

    # -- heartbeats ------------------------------------------------------------------------------------------------
    def take_heartbeat(self, call: int, details: Any) -> None:
        """May be called on any thread."""
        app = self._driver.app
        payload = app.codec.encode(details, where="heartbeat")
        if threading.get_ident() == app.thread:
            self._note_heartbeat(call, payload)
        else:
            app.loop.call_soon_threadsafe(self._driver.call, self._note_heartbeat, call, payload)

    def _note_heartbeat(self, call: int, payload: bytes) -> None:
        if call not in self.running or self._driver.stopped:
            return
        self._heartbeats[call] = payload
        if self._heartbeat_timer is None:
            self.record_heartbeats()
            self._heartbeat_timer = self._driver.app.loop.call_later(
                HEARTBEAT_SECONDS, self._driver.call, self._heartbeat_pause_over
            )

    def _heartbeat_pause_over(self) -> None:
        self._heartbeat_timer = None
        if self._heartbeats and not self._driver.stopped:
            self.record_heartbeats()
            self._heartbeat_timer = self._driver.app.loop.call_later(
                HEARTBEAT_SECONDS, self._driver.call, self._heartbeat_pause_over
            )

    def record_heartbeats(self) -> None:
        """Write down the newest heartbeats that are not recorded yet."""
        for call, payload in self._heartbeats.items():
            attempt = self.running.get(call)
            if attempt is not None:
                self._attempts.record_heartbeat(attempt, payload)
        self._heartbeats.clear()


def _attempt_on_thread(frame: FrameType) -> StepBody | None:
    """Return the attempt whose body a thread of the engine runs: it is in the context that the body is given."""
    work = getattr(frame.f_locals.get("one"), "function", None)
    context = getattr(getattr(work, "func", None), "__self__", None)
    body = context.get(CURRENT) if isinstance(context, Context) else None
    return body if isinstance(body, StepBody) else None


bodies_run_in(Bodies._perform, lambda frame: frame.f_locals["attempt"])
bodies_run_in(Threads._work, _attempt_on_thread)
