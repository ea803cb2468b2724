"""An app for tests that skips the time that runs would wait.

    with skipping_app() as app:
        assert app.run(reminder, "ann") == "reminded after 30 days"      # at once

Its clock stops, except while a test waits for a result: then, whenever every run rests, it moves to what is due next.
So a test can start a run, look at it, send it a signal, and only then let the time pass.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp
from everstep.engine.app.handles import Run
from everstep.engine.process.elsewhere import on_a_thread
from everstep.errors import RunActive
from everstep.stores.opening import open_store
from everstep.testing.clock import TURN_SECONDS, FakeClock

R = TypeVar("R")

PATIENCE_SECONDS: Final = 5.0
"""After this many real seconds in which nothing can happen any more, waiting for a result fails."""


class SkippingApp(BlockingApp):
    """A `BlockingApp` on a `FakeClock`, whose `result()` and `run()` skip the time that runs wait."""

    def __init__(self, url: str, clock: FakeClock) -> None:
        self.clock = clock
        """Move it with `app.clock.advance(seconds)`."""

        async def make() -> App:
            return App(await on_a_thread(open_store, url), clock=clock)

        super().__init__(make)

    def wait(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Wait as `BlockingApp` does; time is skipped while the caller waits for a result."""
        if getattr(coroutine, "cr_code", None) is Run.result.__code__:
            return super().wait(self._skip_until(coroutine))
        return super().wait(coroutine)

    def rest(self) -> None:
        """Wait until each run waits, has ended or is held."""
        self.wait(self.clock.rest(self.inner))

    async def _skip_until(self, coroutine: Coroutine[Any, Any, R]) -> R:
        task = asyncio.ensure_future(coroutine)
        idle_turns = 0
        try:
            while not task.done():
                await asyncio.wait([task], timeout=TURN_SECONDS)
                if task.done() or not self.inner.is_at_rest() or self._move_on():
                    idle_turns = 0
                else:
                    idle_turns += 1
                    if idle_turns * TURN_SECONDS > PATIENCE_SECONDS:
                        raise RunActive("Every run waits for something that only the test can do, such as a signal.")
            return await task
        finally:
            task.cancel()

    def _move_on(self) -> bool:
        """Move to what is due next: in memory, or of a run that has left it."""
        if self.clock.advance_to_next():
            return True
        due = self.inner.store.next_wake(worker=self.inner.worker, everyone=self.inner.recover)
        if due is None or due <= self.clock.now():
            return False
        self.clock.advance((due - self.clock.now()) / 1e6)
        self.inner.pump.nudge()
        return True


@contextmanager
def skipping_app(url: str = "memory:", clock: FakeClock | None = None) -> Iterator[SkippingApp]:
    """Open an app for a test. It leaves nothing behind, unless `url` names a file."""
    app = SkippingApp(url, clock or FakeClock())
    try:
        yield app
    finally:
        app.close()
