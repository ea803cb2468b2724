"""Runs for which the engine itself raised: each leaves memory alone, and is taken up again from its history.

Whatever a callback of one run raises, in a commit with many others or in a timer, that run stumbles and no other.
Nothing is assumed: it is claimed, verified and replayed again, after a pause that grows. A run that stumbles again and
again is held as `stuck`, so that a person sees it. If the machine refused memory, a thread or a descriptor, or the
store failed, that is no fault of the run: it is tried again for as long as it takes.
"""

from typing import TYPE_CHECKING, Final

from everstep.engine.background import pause_after
from everstep.errors import StoreError
from everstep.model.untrusted import Stopped, described, is_a, is_refusal, logger, type_name
from everstep.stores.protocol import Claim, Claimed

if TYPE_CHECKING:
    from everstep.engine.driver import Driver
    from everstep.engine.driving import Driving

log = logger("everstep.run")

STUMBLES_MAX: Final = 5
"""A run that stumbles this often is held."""
CALM_SECONDS: Final = 60.0
"""After this time without one, stumbles are counted from the beginning."""


class Stumbling:
    """The runs of an app that have stumbled and have not ended since."""

    def __init__(self, app: "Driving") -> None:
        self._app = app
        self._counts: dict[str, tuple[int, float]] = {}
        """How often a run has stumbled by its own fault, and when it last did."""
        self._refusals: dict[str, int] = {}

    def leave(self, driver: "Driver", error: BaseException, *, is_own: bool = True) -> None:
        """What the engine did for a run raised: it leaves memory, and is taken up again later."""
        app = self._app
        there = app.drivers.get(driver.run)
        if there is driver and is_a(error, Stopped):  # by a user's function that the engine asked something
            app.interrupted.leave(driver, error, "what the engine asked of its code")
            return
        if there is driver:
            del app.drivers[driver.run]
            app.pump.has_left()
        app.resting.forget(driver)
        try:
            driver.stop()
        except Exception:
            log.exception("Run %s did not leave memory in good order", driver.run)
        if there is driver or there is None:
            self.take_later(driver.run, error, is_own=is_own)

    def take_later(self, run: str, error: BaseException, *, is_own: bool = True) -> None:
        """Take a run up again after a pause. Until then it is let alone."""
        app, now = self._app, self._app.loop.time()
        if is_own and not is_refusal(error) and not is_a(error, StoreError):
            count, last = self._counts.get(run, (0, now))
            count = count + 1 if now - last < CALM_SECONDS else 1
            self._counts[run] = (count, now)
        else:
            count = self._refusals[run] = self._refusals.get(run, 0) + 1
        pause = pause_after(count)
        text = "The engine failed while it drove run %s, and takes it up again in %g s: %s"
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
        """Hold a run that stumbles again and again: no worker can go on with it as it is."""
        from everstep.engine.holding import HoldReport  # seldom needed

        app = self._app
        with app.setting_aside(run):
            await app.become_worker()
            claim = Claim(run, app.worker, app.clock.now(), ("queued", "running", "waiting"))
            verdict = await app.committer.submit(claim)
            if isinstance(verdict, Claimed):
                summary = f"the engine failed {STUMBLES_MAX} times while it drove it: {error}; the log says where"
                await app.hold_claimed(verdict.row, HoldReport("stuck", summary))
                self.forget(run)
            else:
                app.watchers.look_again(run)

    def forget(self, run: str) -> None:
        """The run has ended or is held."""
        if self._counts or self._refusals:
            self._counts.pop(run, None)
            self._refusals.pop(run, None)
