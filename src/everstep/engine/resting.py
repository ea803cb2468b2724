"""Waiting runs that stay in memory for a while, so that what wakes them need not replay them."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from everstep.engine.driver import Driver
    from everstep.engine.driving import Driving

RESTING_MAX: Final = 256
"""So many waiting runs stay in memory, so that a signal need not replay them."""


class Resting:
    """The waiting runs of an app, the longest waiting first."""

    def __init__(self, app: "Driving") -> None:
        self._app = app
        self._drivers: OrderedDict[str, Driver] = OrderedDict()

    def add(self, driver: "Driver") -> None:
        """Keep a run that waits now; the one that has waited longest leaves."""
        if driver.execution.witnesses and driver.is_idle:
            self._evict(driver)  # what it remembers of the outside is compared again before it goes on
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

    def forget(self, driver: "Driver") -> None:
        """The run leaves memory in another way."""
        self._drivers.pop(driver.run, None)

    def _evict(self, driver: "Driver") -> None:
        self._drivers.pop(driver.run, None)
        self._app.drivers.pop(driver.run, None)
        driver.stop()
        self._app.pump.nudge()  # from now on it wakes this run
