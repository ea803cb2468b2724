"""Atomic steps at work: each attempt on one thread, given up in time, and told to the driver when it is settled."""

import asyncio
import functools
import time
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.effects.atomic import Permit, Settled, Work, perform
from everstep.errors import StepTimedOut

if TYPE_CHECKING:
    from everstep.engine.run.bodies import Attempt
    from everstep.engine.run.driver import Driver

Settle = Callable[["Attempt", Settled | None, BaseException | None, float], None]


def start_atomic(driver: "Driver", attempt: "Attempt", context: Context, settle: Settle, *, cut_off: bool) -> None:
    """Start an attempt; `settle` is told what became of it, and after how many seconds.

    If the code was cancelled since one was cut off, it only finds out what became of that.
    """
    call = attempt.call
    only_settle = cut_off and (call.future.is_cancel_wanted or driver.end_wanted)
    target: Any = call.target
    work: Work = target.work(attempt, call.arguments, cut_off=cut_off, only_settle=only_settle)
    going = _Attempt(driver, attempt, context, work, settle)
    if target.timeout is None:
        going.on_thread(work, going.settle)
    else:
        within = going.within(target.timeout)
        attempt.task = asyncio.Task(within, loop=driver.app.loop, name=call.step, context=context)


class _Attempt:
    """An attempt, seen from the driver's loop."""

    def __init__(self, driver: "Driver", attempt: "Attempt", context: Context, work: Work, settle: Settle) -> None:
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
