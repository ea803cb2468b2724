"""The part of an app that keeps to its retention: from time to time it deletes what is old enough, in the background.

It deletes as `collecting.py` does, a little at a time, so runs that go on hardly notice. Each process with a retention
does it; two that meet leave each other's runs alone. A process that dies in between leaves the rest to the others.
"""

from typing import TYPE_CHECKING, Final

from everstep.engine.clock import SECOND, Alarm, microseconds, set_alarm, ticks_of
from everstep.model.untrusted import logger

if TYPE_CHECKING:
    from datetime import timedelta

    from everstep.engine.driving import Driving
    from everstep.model.retention import Retention

log = logger("everstep.gc")

LEAP_SECONDS: Final = 30 * 86400.0
"""A store's clock that is ahead by more than this of what was last seen, without time having passed, may be wrong."""
TRUST_SECONDS: Final = 86400.0
"""Delay before anything is deleted after such a leap: time for a person to put the clock right."""
FIRST_SECONDS: Final = 1.0
"""How soon after its start a process looks for the first time, so that short ones do their share."""


class Collector:
    """Deletes in the background what need not be kept. Without a retention it does nothing."""

    def __init__(self, app: "Driving", retention: "Retention | float | timedelta | None") -> None:
        self.retention: Retention | None = None
        if retention is not None:
            from everstep.model.retention import retention_of

            self.retention = retention_of(retention)
        self._app = app
        self._alarm: Alarm | None = None
        self._ticks = ticks_of(app.clock)
        self._seen = 0, 0
        """What the store's clock was, and the ticks then."""
        self._trusted_at = 0

    def begin(self) -> None:
        """The app has become a worker: look soon, and then from time to time."""
        if self.retention is not None and self._alarm is None:
            self._seen = self._app.store.noted or self._app.clock.now(), self._ticks()
            self._look_after(min(FIRST_SECONDS, self.retention.seconds_between))

    def close(self) -> None:
        """Look no more. What is being deleted just now stops by itself."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _look_after(self, seconds: float) -> None:
        app = self._app
        self._alarm = set_alarm(app.clock, app.loop, app.clock.now() + microseconds(seconds), self._ring)

    def _ring(self) -> None:
        if not self._app.draining:
            self._app.background.keep("retention", self._look)

    def _is_trusted(self) -> bool:
        """Whether the store's clock may decide what is old. A clock that is a year ahead must not delete everything."""
        (seen, then), now, ticks = self._seen, self._app.clock.now(), self._ticks()
        self._seen = now, ticks
        leapt = (now - seen - (ticks - then)) / SECOND
        if leapt > LEAP_SECONDS:
            self._trusted_at = ticks + microseconds(TRUST_SECONDS)
            log.warning(
                "The store's clock is %.0f days ahead of what it was when it was last used: nothing is deleted for a "
                "day, unless you say `everstep gc`. If the clock is wrong, put it right and start again.",
                leapt / 86400,
            )
        return ticks >= self._trusted_at

    async def _look(self) -> None:
        from everstep.engine.collecting import collect

        assert self.retention is not None
        if self._is_trusted():
            done = await collect(self._app, self.retention)
            if done.runs or done.keys:
                log.info("%d runs and %d keys were old enough, and were deleted.", len(done.runs), done.keys)
        if not self._app.draining:
            self._look_after(self.retention.seconds_between)
