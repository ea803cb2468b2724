"""The waiting runs that stay in memory for a while: a signal or a timer then finds them without a replay."""

from collections import OrderedDict
from typing import Final

from everstep.engine.process.process import Process
from everstep.engine.run.driver import Driver

RESTING_MAX: Final = 256
"""Number of waiting runs cached in memory, to avoid a replay when a signal arrives."""


class Resting:
    """The waiting runs of an app, the longest waiting first."""

    def __init__(self, app: Process) -> None:
        self._app = app
        self._drivers: OrderedDict[str, Driver] = OrderedDict()

    def add(self, driver: Driver) -> None:
        """Keep a run that waits now; the one that has waited longest leaves."""
        if driver.execution.witnesses and driver.is_idle:
            self._evict(driver)  # what it remembers of the outside is compared again before it continues
            return
        self._drivers[driver.run] = driver
        self._drivers.move_to_end(driver.run)
        self.evict_oldest()

    def evict_oldest(self) -> None:
        """Let waiting runs leave memory while there are too many, the longest waiting first."""
        while len(self._drivers) > RESTING_MAX:
            run, oldest = next(iter(self._drivers.items()))
            if oldest.status != "waiting" or oldest.stopped:
                del self._drivers[run]
            elif oldest.is_idle:
                self._evict(oldest)
            else:
                return  # what it wrote is not durable yet; the pump looks again

    def forget(self, driver: Driver) -> None:
        """The run leaves memory in another way."""
        self._drivers.pop(driver.run, None)

    def _evict(self, driver: Driver) -> None:
        self._drivers.pop(driver.run, None)
        self._app.drivers.pop(driver.run, None)
        driver.stop()
        self._app.pump.nudge()  # from now on it wakes this run
