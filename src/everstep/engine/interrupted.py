"""Runs whose code, or one of whose bodies, was stopped: they leave memory unfinished and are taken up after a pause.

Each time counts like the death of a process: a run that is stopped again and again without getting any further is held
as `poisoned`. A cancellation counts only if the app outlives it. An application that ends cancels its tasks, and that
is no fault of theirs.
"""

import asyncio
import functools
from typing import TYPE_CHECKING, Final

from everstep.engine.clock import Alarm, microseconds, set_alarm
from everstep.engine.stops import Stopped, pass_on
from everstep.model.untrusted import logger
from everstep.stores.protocol import Release, RunRow, Verdict

if TYPE_CHECKING:
    from everstep.engine.driver import Driver
    from everstep.engine.driving import Driving

log = logger("everstep.run")

FIRST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 60.0
"""A run that was stopped is taken up again after 1, 2, 4 … 60 seconds."""


class Interrupted:
    """The runs of an app that were stopped, and have not ended since."""

    def __init__(self, app: "Driving") -> None:
        self._app = app
        self._counts: dict[str, int] = {}
        self._alarms: dict[str, Alarm] = {}
        self._causes: dict[str, str] = {}

    def is_pausing(self, run: str) -> bool:
        """Tell whether a run is not to be taken up here yet."""
        return run in self._alarms

    def cause(self, run: str) -> str:
        """Return what stopped a run here last; "" if nothing did."""
        return self._causes.get(run, "")

    def leave(self, driver: "Driver", stop: BaseException, where: str) -> None:
        """A driven run was stopped: let it leave memory, and come back later."""
        self._app.let_go(driver)
        self.set_aside(driver.row, stop, where)

    def set_aside(self, row: RunRow, stop: BaseException, where: str) -> None:
        """A claimed run was stopped, and is not in memory. If all of the process is to stop, that follows."""
        app, run = self._app, row.id
        count = self._counts[run] = self._counts.get(run, 0) + 1
        pause = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(count - 1, 20))
        said = stop if isinstance(stop, Stopped) else Stopped(stop)
        cause = self._causes[run] = f"{where} raised {said}"
        log.warning("Run %s was stopped and is unfinished: %s. It is taken up again in %g s.", run, cause, pause)
        until = app.clock.now() + microseconds(pause)
        is_cancel = isinstance(stop, asyncio.CancelledError)
        if not is_cancel:
            self._give_back(row)
        if not app.draining:
            again = functools.partial(self._ring, row, is_counted=not is_cancel)
            self._alarms[run] = set_alarm(app.clock, app.loop, until, again)
        pass_on(stop, app.loop)

    def _give_back(self, row: RunRow) -> "asyncio.Future[Verdict]":
        """Count the stop. It is in the queue at once: what stops the process may leave no task a turn."""
        future = self._app.committer.submit(Release(row.id, row.epoch, "queued", died=True))
        future.add_done_callback(_note_failure)
        return future

    def _ring(self, row: RunRow, *, is_counted: bool) -> None:
        self._alarms.pop(row.id, None)
        if not self._app.draining:
            self._app.spawn(self._take_up(row, is_counted=is_counted))

    async def _take_up(self, row: RunRow, *, is_counted: bool) -> None:
        if not is_counted:
            await self._give_back(row)
        self._app.want(row.id)
        await self._app.take_up_run(row.id)

    def forget(self, run: str) -> None:
        """A run has ended, or is held."""
        self._counts.pop(run, None)
        self._causes.pop(run, None)

    def close(self) -> None:
        """The app stops: others take up what waits here."""
        for alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()


def _note_failure(future: "asyncio.Future[Verdict]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("That a run was stopped cannot be written just now: %s", error)
