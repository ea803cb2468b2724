"""The running bodies of one run: what they may ask for.

`attempts.py` starts them, stops them and takes their ends. Nothing here knows what an end means.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.effects.atomic import Permit, Settled, Work, perform
from everstep.effects.body import SETTLED, Fate, Means, StepBody
from everstep.effects.descent import bodies_run_in
from everstep.effects.step import is_async_callable
from everstep.effects.surroundings import CURRENT
from everstep.engine.code.commands import StepCall
from everstep.engine.run.budget import Charging, Spending
from everstep.engine.run.streams import Streams
from everstep.engine.run.threads import Threads
from everstep.errors import Misuse, NotDone, StepTimedOut
from everstep.model.untrusted import is_a, logger

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    from everstep.engine.run.driver import Driver


log = logger("everstep.step")

HEARTBEAT_SECONDS: Final = 1.0
"""Heartbeats that come faster are recorded at this pace; the newest always counts."""
CHARGES: Final = threading.Lock()
"""Protects the first charge of an attempt, which two threads may make at once."""


class Attempt(StepBody, eq=False, kw_only=True):
    """One attempt at a step, while its body runs."""

    bodies: "Bodies"
    call: StepCall
    fallback: bool = False
    is_asked: bool = False
    """Whether this only passes an attempt to a probe that asks about it."""
    fate: Fate | None = None
    spending: "Spending | None" = None
    task: "asyncio.Task[None] | None" = None
    failed_at: int = 0
    """When its body failed, if something that it started is still running."""

    def worker(self) -> str:
        return self.bodies.worker

    def shared_fate(self) -> Fate:
        if self.fate is None:
            self.fate = SETTLED if self.call.target.effect == "read" else Fate()
        return self.fate

    def number(self) -> int:
        return -self.call.call if self.is_asked else self.call.call

    def idempotency_key(self) -> str:
        return self.call.idempotency_key()

    def take_heartbeat(self, details: Any) -> None:
        self.bodies.take_heartbeat(self.call.call, details)

    def means(self) -> Means:
        return self.bodies.means()

    def take_entry(self, name: str, value: Any) -> None:
        if self.bodies.running.get(self.call.call) is self:  # otherwise the run no longer waits for this body
            self.bodies.streams_of_run().take(self, name, value)

    def refuse_given_up(self) -> None:
        bodies = self.bodies
        if bodies.running.get(self.call.call) is not self or bodies.is_over:
            raise NotDone(f"{self.step}: attempt {self.attempt} was given up. Nothing was changed.")

    def refuse_overtaken(self) -> None:
        self.refuse_given_up()
        if not self.bodies.has_the_newest_epoch():
            raise NotDone(f"{self.step}: the run was taken over during attempt {self.attempt}. Nothing was changed.")

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        with CHARGES:
            spending = self.spending = self.spending or Spending()
            charging = self.bodies.charging
        spending.add(nanos, tokens)
        charging.hear(self, spending)
        if spending.uses_nothing and (nanos or tokens):
            which = "the fallback of a step for which there is no budget" if self.fallback else "a step with cost={}"
            raise Misuse(
                f"everstep.charge() in {self.step}: {which} must not use anything. It was counted all the same."
            )


class Bodies:
    """What the running bodies of one run ask for."""

    def __init__(
        self, driver: "Driver", running: dict[int, Attempt], record_heartbeat: Callable[[Attempt, bytes], None]
    ) -> None:
        self.running = running
        """Those of `StepAttempts`, which adds and removes them."""
        self._charging: Charging | None = None
        self._driver = driver
        self._record_heartbeat = record_heartbeat
        self._heartbeats: dict[int, bytes] = {}
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self.streams: Streams | None = None

    @property
    def worker(self) -> str:
        """This process among the workers."""
        return self._driver.app.worker

    def attempt_at(self, call: StepCall, attempt: int) -> Attempt:
        """Return an attempt that does not run, for a question about it."""
        workflow, digest = self._driver.execution.workflow.name, call.arguments.digest
        surroundings = (self._driver.run, workflow, call.step, digest, call.entropy, attempt, None)
        return Attempt(*surroundings, bodies=self, call=call, is_asked=True)

    @property
    def charging(self) -> "Charging":
        """Records the charges of running bodies: most runs have no budget."""
        if self._charging is None:
            self._charging = Charging(self._driver)
        return self._charging

    def streams_of_run(self) -> "Streams":
        """Return the writer of the run's streams. May be called on any thread."""
        with CHARGES:
            if self.streams is None:
                self.streams = Streams(self._driver)
            return self.streams

    def means(self) -> Means:
        """Return what an atomic step needs of the app."""
        app = self._driver.app
        return Means(app.store, app.codec, app.clock.now)

    def stumble(self, error: BaseException) -> None:
        """Evict the run and resume it, because something that was done for a body raised."""
        self._driver.app.stumbling.leave(self._driver, error)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is recorded of bodies here: the run has ended, is held or has left."""
        return self._driver.is_over

    def has_the_newest_epoch(self) -> bool:
        """Ask the store whether the run is still this driver's. May be called on any thread."""
        row, mine = self._driver.app.store.run(self._driver.run), self._driver.row
        return row is not None and (row.epoch, row.generation) == (mine.epoch, mine.generation)

    async def call(self, attempt: Attempt) -> Any:
        """Return the result of a body with a timeout, of a fallback, or of a body for a thread."""
        seconds = attempt.call.target.timeout
        if seconds is None:
            return await self._call(attempt)
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

    def record_charges(self) -> None:
        """Record the charges and stream entries of running bodies, because they may be cut off."""
        if self.streams is not None:
            self.streams.flush()
        for attempt in self.running.values():
            self.charging.write(attempt)

    def write_down(self, attempt: Attempt) -> None:
        """Write down what a body that is stopped was charged, and has appended."""
        try:
            if attempt.spending is not None:
                self.charging.write(attempt)
            if self.streams is not None:
                self.streams.end(attempt)
        except Exception:  # the other bodies of a run that leaves memory are stopped all the same
            log.exception("What %s of run %s had charged or appended cannot be written", attempt.step, attempt.run)

    def stop(self) -> None:
        """All bodies were stopped: the run leaves this process."""
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
        """Record the newest heartbeats that are not recorded yet."""
        for call, payload in self._heartbeats.items():
            attempt = self.running.get(call)
            if attempt is not None:
                self._record_heartbeat(attempt, payload)
        self._heartbeats.clear()


def _attempt_on_thread(frame: FrameType) -> StepBody | None:
    """Return the attempt whose body a thread of the engine runs, from the body's context."""
    work = getattr(frame.f_locals.get("one"), "function", None)
    context = getattr(getattr(work, "func", None), "__self__", None)
    body = context.get(CURRENT) if isinstance(context, Context) else None
    return body if isinstance(body, StepBody) else None


bodies_run_in(Threads._work, _attempt_on_thread)


# -- atomic steps: each attempt on one thread, given up in time, and told to the driver when it is settled ----------
Settle = Callable[[Attempt, Settled | None, BaseException | None, float], None]


def start_atomic(driver: "Driver", attempt: Attempt, context: Context, settle: Settle, *, cut_off: bool) -> None:
    """Start an attempt; `settle` is told what became of it, and after how many seconds.

    If the code was cancelled since one was cut off, it only finds out what became of that.
    """
    call = attempt.call
    only_settle = cut_off and (call.future.is_cancel_wanted or driver.end_wanted)
    target: Any = call.target
    work: Work = target.work(attempt, call.arguments, cut_off=cut_off, only_settle=only_settle)
    going = _AtomicAttempt(driver, attempt, context, work, settle)
    if target.timeout is None:
        going.on_thread(work, going.settle)
    else:
        within = going.within(target.timeout)
        attempt.task = asyncio.Task(within, loop=driver.app.loop, name=call.step, context=context)


class _AtomicAttempt:
    """An attempt, seen from the driver's loop."""

    def __init__(self, driver: "Driver", attempt: Attempt, context: Context, work: Work, settle: Settle) -> None:
        self._app = driver.app
        self._attempt = attempt
        self._context = context
        self._work = work
        self._settle = settle
        self._began = time.monotonic()

    def on_thread(self, work: Work, done: Any) -> None:
        """Let a thread do the work; `done` gets what became of it, on the loop."""
        # A copy: the thread of an attempt that was given up may still be in the other one.
        body = functools.partial(self._context.copy().run, perform, work)
        self._app.threads.start(self._attempt.run, body, done, self._attempt.call.call)

    def settle(self, settled: Settled | None, error: BaseException | None) -> None:
        """Tell what became of it."""
        self._settle(self._attempt, settled, error, time.monotonic() - self._began)

    async def within(self, seconds: float) -> None:
        """Wait for the attempt, but not too long. One that is about to commit is waited for all the same."""
        future = self._begin(self._work)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(future)
        except TimeoutError:
            if self._work.permit.withdraw():
                late = StepTimedOut(f"An attempt at {self._attempt.call.step} took longer than {seconds} s.")
                await self._give_up(late)
                return
        except asyncio.CancelledError:
            pass  # it is this task's: the attempt is on a thread, and tells how it ends
        future.add_done_callback(lambda ended: self.settle(*ended.result()))

    async def _give_up(self, late: StepTimedOut) -> None:
        """The attempt cannot commit any more. If an earlier one could have, that is found out first."""
        settled: Settled | None = None
        error: BaseException | None = late
        if self._work.cut_off:
            looking = self._begin(msgspec.structs.replace(self._work, only_settle=True, permit=Permit()))
            try:
                settled, error = await looking
            except asyncio.CancelledError as stop:
                settled, error = None, stop
            if settled is not None and settled.refused is not None:
                settled, error = None, late
        self.settle(settled, error)

    def _begin(self, work: Work) -> "asyncio.Future[tuple[Settled | None, BaseException | None]]":
        future: asyncio.Future[tuple[Settled | None, BaseException | None]] = self._app.loop.create_future()

        def done(settled: Settled | None, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((settled, error))

        self.on_thread(work, done)
        return future
