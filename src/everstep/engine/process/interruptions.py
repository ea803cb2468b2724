"""Runs whose code, or one of whose bodies, was stopped: they leave memory unfinished and are resumed after a pause.

Each stop counts like the death of a process: a run that is stopped again and again without progress is held as
`poisoned`. A cancellation counts only if the app outlives it: an application that ends cancels its tasks, and that is
no fault of theirs.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from everstep.engine.code.stops import pass_on
from everstep.engine.history.clock import Alarm, microseconds, set_alarm
from everstep.engine.process.background import pause_after
from everstep.engine.run.driver import Driver
from everstep.engine.run.holds import HoldReport
from everstep.errors import StoreError
from everstep.model.untrusted import Stopped, attribute, described, is_a, is_refusal, logger, type_name
from everstep.stores.protocol import Claim, Claimed, Release, RunRow

if TYPE_CHECKING:  # a real cycle: a host has this part, which drives the host's runs
    from everstep.engine.process.host import Host


log = logger("everstep.run")

FIRST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 60.0
"""The longest pause before a run that was stopped is resumed: 1, 2, 4 … 60 seconds."""


class Interrupted:
    """The runs of an app that were stopped, and have not ended since."""

    def __init__(self, app: "Host") -> None:
        self._app = app
        self._counts: dict[str, int] = {}
        self._alarms: dict[str, Alarm] = {}
        self._causes: dict[str, str] = {}

    def is_pausing(self, run: str) -> bool:
        """Return True if a run must not be resumed here yet."""
        return run in self._alarms

    def cause(self, run: str) -> str:
        """Return what last stopped a run here; "" if nothing did."""
        return self._causes.get(run, "")

    def leave(self, driver: "Driver", stop: BaseException, where: str) -> None:
        """Evict a driven run that was stopped, and resume it later."""
        self._app.let_go(driver)
        self.set_aside(driver.row, stop, where)

    def set_aside(self, row: RunRow, stop: BaseException, where: str) -> None:
        """Give back a claimed run that was stopped before it was in memory. If the whole process stops, that
        follows.
        """
        app, run = self._app, row.id
        count = self._counts[run] = self._counts.get(run, 0) + 1
        pause = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(count - 1, 20))
        said = stop if isinstance(stop, Stopped) else Stopped(stop)
        cause = self._causes[run] = f"{where} raised {said}"
        log.warning("Run %s was stopped and is unfinished: %s. It is resumed in %g s.", run, cause, pause)
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
        """Forget a run that has ended or is held."""
        self._counts.pop(run, None)
        self._causes.pop(run, None)

    def close(self) -> None:
        """Stop: other workers resume the runs that wait here."""
        for alarm in self._alarms.values():
            alarm.cancel()
        self._alarms.clear()


STUMBLES_MAX: Final = 5
"""A run for which the engine itself fails this many times is held."""
CALM_SECONDS: Final = 60.0
"""After this many seconds without a failure, a run's failures are counted from zero."""


def _is_detected(error: BaseException) -> bool:
    """Return True if a detector of blocking calls has refused the engine a call. That says nothing about the run."""
    module: str = attribute(type(error), "__module__", "")
    return module.partition(".")[0] == "blockbuster"


class Stumbling:
    """The runs of an app for which the engine itself failed, and that have not ended since."""

    def __init__(self, app: "Host") -> None:
        self._app = app
        self._counts: dict[str, tuple[int, float]] = {}
        """How often the engine failed for a run, and when it last did."""
        self._refusals: dict[str, int] = {}

    def leave(self, driver: "Driver", error: BaseException, *, is_own: bool = True) -> None:
        """Evict a run for which the engine raised, and resume it later."""
        app = self._app
        there = app.drivers.get(driver.run)
        if there is driver and is_a(error, Stopped):  # by a user's function that the engine asked something
            app.interrupted.leave(driver, error, "what the engine asked of its code")
            return
        if there is driver:
            app.forget_driver(driver)
        app.resting.forget(driver)
        try:
            driver.stop()
        except Exception:
            log.exception("Run %s did not leave memory in good order", driver.run)
        if there is driver or there is None:
            self.take_later(driver.run, error, is_own=is_own)

    def take_later(self, run: str, error: BaseException, *, is_own: bool = True) -> None:
        """Resume a run after a pause. Until then it is left alone."""
        app, now = self._app, self._app.loop.time()
        if is_own and not is_refusal(error) and not is_a(error, StoreError) and not _is_detected(error):
            count, last = self._counts.get(run, (0, now))
            count = count + 1 if now - last < CALM_SECONDS else 1
            self._counts[run] = (count, now)
        else:
            count = self._refusals[run] = self._refusals.get(run, 0) + 1
        pause = pause_after(count)
        text = "The engine failed while it drove run %s, and resumes it in %g s: %s"
        log.error(text, run, pause, described(error), exc_info=error)
        app.put_aside(run)
        app.loop.call_later(pause, self._take_again, run, type_name(error))

    def _take_again(self, run: str, error: str) -> None:
        app = self._app
        app.put_back(run)
        if app.draining or app.is_failed or run in app.drivers:
            return
        if self._counts.get(run, (0, 0.0))[0] >= STUMBLES_MAX:
            app.spawn(self._hold(run, error), run=run)
        else:
            app.want(run)
            app.pump.nudge()

    async def _hold(self, run: str, error: str) -> None:
        """Hold a run for which the engine fails again and again: no worker can continue it as it is."""
        app = self._app
        with app.setting_aside(run):
            await app.become_worker()
            claim = Claim(run, app.worker, app.clock.now(), ("queued", "running", "waiting"))
            verdict = await app.committer.submit(claim)
            if isinstance(verdict, Claimed):
                summary = f"the engine failed {STUMBLES_MAX} times while it drove it: {error}; the log says where"
                await app.holding.hold_claimed(verdict.row, HoldReport("stuck", summary))
                self.forget(run)
            else:
                app.watchers.look_again(run)

    def forget(self, run: str) -> None:
        """Forget a run that has ended or is held."""
        if self._counts or self._refusals:
            self._counts.pop(run, None)
            self._refusals.pop(run, None)
