"""Callers in this process that wait for the end of a run."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from everstep.engine.history.verify import check_ends, refuse_unreadable, unknown_run
from everstep.model.durations import Duration
from everstep.model.options import checked_timeout
from everstep.model.status import ENDED, Status

if TYPE_CHECKING:  # a real cycle: a host has this part, which drives the host's runs
    from everstep.engine.process.host import Host


End = tuple[Status, bytes | None]


class Watchers:
    """Futures for the ends of runs, by run."""

    def __init__(self, app: "Host") -> None:
        self._app = app
        self._waiting: dict[str, list[asyncio.Future[End | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, run: str) -> bool:
        return run in self._waiting

    async def wait_for_end(self, run: str, timeout: Duration | None = None) -> End:
        """Wait until a run has ended or is held; return how, and its outcome's payload."""
        if timeout is not None:
            async with asyncio.timeout(checked_timeout(timeout)):
                return await self.wait_for_end(run)
        app = self._app
        nudged = checked = False
        while True:
            app.refuse_when_failed()
            with self.watching(run) as news:
                if run not in app.drivers:
                    row = await app.read(app.store.run, run)
                    if row is None:
                        raise unknown_run(app.store, run)
                    if row.status == "held":
                        return row.status, None
                    refuse_unreadable(row)  # no worker will ever claim it
                    if row.status in ENDED or not (checked or run in app.wanted):
                        # No process here saw how the row came to be. (A run that is about to be driven here is verified
                        # then.)
                        await app.read(check_ends, app.store, row)
                        checked = True
                    if row.status in ENDED:
                        return row.status, row.outcome
                    app.pump.start()
                    if not nudged:  # once: after a nudge the waiter looks again, and would nudge for ever
                        nudged = True
                        app.pump.nudge()
                ended = await news
            if ended is not None:
                return ended

    @contextmanager
    def watching(self, run: str) -> Iterator["asyncio.Future[End | None]"]:
        """Give a future for the next change of a run: its end, or None when the caller should read its row again.

        It exists before the caller looks: a change between the look and the wait is noticed as well.
        """
        news = self._news_of(run)
        try:
            yield news
        finally:
            self._forget(run, news)

    def _news_of(self, run: str) -> "asyncio.Future[End | None]":
        news: asyncio.Future[End | None] = self._app.loop.create_future()
        self._waiting.setdefault(run, []).append(news)
        self._app.pump.look_after()
        return news

    def _forget(self, run: str, news: "asyncio.Future[End | None]") -> None:
        waiting = self._waiting.get(run, [])
        if news in waiting:
            waiting.remove(news)
        if not waiting:
            self._waiting.pop(run, None)

    def tell(self, run: str, status: Status, outcome: bytes | None) -> None:
        """Complete the futures of a run that has ended or is held."""
        if self._app.has_scheduler and run in self._app.scheduler.awaited:
            self._app.scheduler.look_closely()
        for future in self._waiting.pop(run, []):
            if not future.done():
                future.set_result((status, outcome))

    def look_again(self, run: str) -> None:
        """Make the waiters of a run read its row again."""
        for future in self._waiting.get(run, []):
            if not future.done():
                future.set_result(None)

    def look_at_what_is_elsewhere(self) -> None:
        """Make the waiters for runs that are not driven here, or for writes of others, look again."""
        if self._app.recover:
            self._app.scheduler.look()
        for run in [run for run in self._waiting if run not in self._app.drivers]:
            self.look_again(run)

    def look_all_again(self) -> None:
        """Make all waiters look again."""
        for run in list(self._waiting):
            self.look_again(run)
