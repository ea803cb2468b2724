"""A clock that stands still until it is told to move.

    clock = FakeClock()
    async with everstep.open("memory:", clock=clock) as app:
        run = await app.start(reminder, "ann")
        await clock.rest(app)        # the code has come to its `asyncio.sleep(86400)`
        clock.advance(86400)
        print(await run.result())

A day of waiting so takes no time, and a test says exactly when what happens.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from everstep.engine.history.clock import SECOND, microseconds
from everstep.model.durations import Duration
from everstep.model.options import LONGEST_SECONDS, checked_seconds

if TYPE_CHECKING:  # start-up: programs that only set a clock load no engine
    from everstep.engine.process.host import Host

BEGINNING: Final = 2_000_000_000 * SECOND
"""The first time of a clock, unless it is given another one: in May 2033."""
TURN_SECONDS: Final = 0.0005


class Alarm:
    """A callback for when the clock has reached a time."""

    __slots__ = ("callback", "is_cancelled", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self.loop = loop
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not call."""
        self.is_cancelled = True

    def ring(self) -> None:
        """Call, on the loop's own thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        if not self.is_cancelled:
            self.callback()


class FakeClock:
    """Time as a test wants it. Give it to `everstep.open(…, clock=clock)`; several apps may share one."""

    def __init__(self, at: int = BEGINNING) -> None:
        self._at = at
        self._alarms: list[tuple[int, int, Alarm]] = []
        self._order = itertools.count()

    def now(self) -> int:
        """Return microseconds since 1970."""
        return self._at

    def ticks(self) -> int:
        """Return how much time has passed: as much as the clock was advanced."""
        return self._at

    def alarm(self, loop: asyncio.AbstractEventLoop, at: int, callback: Callable[[], None]) -> Alarm:
        """Call back when this clock has reached a time."""
        alarm = Alarm(loop, callback)
        if at <= self._at:
            alarm.ring()
        else:
            heapq.heappush(self._alarms, (at, next(self._order), alarm))
        return alarm

    def advance(self, seconds: Duration) -> None:
        """Move forwards, and ring what became due on the way."""
        self._at += microseconds(checked_seconds("seconds", seconds, least=-LONGEST_SECONDS))
        while self._alarms and self._alarms[0][0] <= self._at:
            heapq.heappop(self._alarms)[2].ring()

    def advance_to_next(self) -> bool:
        """Move to the next alarm that is still wanted. Returns False if there is none."""
        while self._alarms and self._alarms[0][2].is_cancelled:
            heapq.heappop(self._alarms)
        if not self._alarms:
            return False
        self.advance((self._alarms[0][0] - self._at) / SECOND)
        return True

    async def rest(self, *apps: "Host") -> None:
        """Wait until each run that these apps drive waits, has ended or is held, and all of that is durable.

        That includes runs that an app has not claimed yet: it has looked at everything that is due by now.
        """
        await asyncio.sleep(0)  # alarms that have just been rung come first
        while not all(app.is_at_rest() and app.pump.is_pausing() for app in apps):  # noqa: ASYNC110  # it comes to rest in many ways
            await asyncio.sleep(TURN_SECONDS)

    async def play(self, app: "Host", run: str, *, jumps: int = 1_000) -> None:
        """Run until a run has ended: whenever everything rests, move to what is due next."""
        for _ in range(jumps):
            await self.rest(app)
            if run not in app.drivers or not self.advance_to_next():
                return
