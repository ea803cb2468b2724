"""Runs whose code, or one of whose bodies, was stopped: they leave memory unfinished and are taken up after a pause.

Each time counts like the death of a process: a run that is stopped again and again without getting any further is held
as `poisoned`. A cancellation counts only if the app outlives it. An application that ends cancels its tasks, and that
is no fault of theirs.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from everstep.engine.clock import Alarm, microseconds, set_alarm
from everstep.engine.stops import Stopped, pass_on
from everstep.model.untrusted import logger
from everstep.stores.protocol import Release, RunRow

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
        release = Release(run, row.epoch, "queued", died=True)
        take_up = functools.partial(self._take_up, run)
        again: Callable[[], object] = take_up
        if isinstance(
            stop, asyncio.CancelledError
        ):  # the application may be about to end: count it only after the pause
            again = functools.partial(app.returns.give_back, release, take_up)
        else:
            app.returns.give_back(release)  # submitted at once: what stops the process may leave no task a turn
        if not app.draining:
            self._alarms[run] = set_alarm(app.clock, app.loop, until, functools.partial(self._ring, run, again))
        pass_on(stop, app.loop)

    def _ring(self, run: str, again: Callable[[], object]) -> None:
        self._alarms.pop(run, None)
        if not self._app.draining:
            again()

    def _take_up(self, run: str) -> None:
        self._app.want(run)
        self._app.spawn(self._app.take_up_run(run), run=run)

    def forget(self, run: str) -> None:
        """A run has ended, or is held."""
        self._counts.pop(run, None)
        self._causes.pop(run, None)

    def close(self) -> None:
        """The app stops: others take up what waits here."""
        for alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()
