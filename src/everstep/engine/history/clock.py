"""Time as a parameter. Clocks decide only about timers; changes are detected by content, never by time.

Three rules prevent harm by a wrong clock: - Durations (a lease, the pause between two looks) are measured in `ticks`,
which cannot be set. - The store's clock decides when something is due. It is read again with every renewal of the
lease, so a process whose own clock drifts, or whose machine was paused, is corrected within a third of a lease. - Time
never goes back. A process whose ticks are too fast, by any share, waits until the store's clock has caught up. A
store's clock that was itself set back is followed at its pace, from where it had been: what was due in two hours is due
in two hours.
"""

import asyncio
import contextvars
import heapq
import itertools
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from everstep.stores.ticks import nanoseconds as machine_nanoseconds
from everstep.stores.ticks import ticks as machine_ticks

SECOND: Final = 1_000_000
"""Microseconds."""
READINGS: Final = 3
"""How often two clocks are compared each time. The fastest reading counts: in others the process may have waited."""
DRIFT_SHARE: Final = 0.02
"""Two sound clocks differ by less than this share of the time that has passed. If a store's clock was set back and
is further ahead of its last reading than that, it was corrected again.
"""
NOISE: Final = 5_000
"""Differences between two readings up to this many microseconds are ignored."""
CANCELLED_MAX: Final = 100
"""When more alarms than this were cancelled, and they are most of all, they are removed."""
LOOK_SECONDS: Final = 1.0
"""How often pending alarms are compared with the clock. The loop's own time stops while a machine is suspended."""


class Clock(Protocol):
    """A source of time. A test's clock stands still until the test advances it.

    It may also have `ticks()`, microseconds that pass whatever is done to the clock, instead of the machine's.
    """

    def now(self) -> int:
        """Return microseconds since 1970. Never goes backwards."""
        ...


class StoreClock:
    """The store's clock, extrapolated between two readings by the machine's ticks. It never goes back."""

    def __init__(self, store_now: Callable[[], int], nanoseconds: Callable[[], int] = machine_nanoseconds) -> None:
        self._nanoseconds = nanoseconds
        self._store_now = store_now
        self._lock = threading.Lock()
        self._floor = 0
        _, self._read_at, self._read = self._reading()
        self._offset = self._read - self._read_at
        self._ahead = 0
        """How far the store's clock was set back since it was first read."""
        self._alarms: Alarms | None = None

    def now(self) -> int:
        """Return microseconds since 1970, by the store's clock."""
        at = self._nanoseconds() // 1000 + self._offset  # a driver asks for each event
        return at if at > self._floor else self._floor

    def ticks(self) -> int:
        """Return microseconds that pass whatever is done to the store's clock."""
        return self._nanoseconds() // 1000

    def read_again(self) -> int:
        """Read the store's clock again and return it; `now` may be ahead of that. On any thread."""
        with self._lock:
            took, at, now = self._reading()
            passed, advanced = at - self._read_at, now - self._read
            # Ticks that are too fast leave behind a store's clock that runs on; one that was set back is behind its own
            # last reading, or equals the last recorded time: a store is never behind that.
            is_noted = now in (self._read, self._read + self._ahead) and passed > NOISE
            is_put_right = advanced - passed > passed * DRIFT_SHARE + NOISE + took
            if advanced < 0 or is_noted or is_put_right:
                self._ahead = max(0, self._ahead + passed - advanced)
            self._read_at, self._read = at, now
            self._floor = self.now()
            self._offset = now - at + self._ahead
            return now + self._ahead

    def alarm(self, loop: asyncio.AbstractEventLoop, at: int, callback: Callable[[], None]) -> "Alarm":
        """Call back on the loop when this clock has reached a time."""
        if self._alarms is None or self._alarms.loop is not loop:
            self._alarms = Alarms(self, loop)
        return self._alarms.add(at, callback)

    def _reading(self) -> tuple[int, int, int]:
        """Return how long it took to read the store's clock, the ticks then, and the reading."""
        found: list[tuple[int, int, int]] = []
        for _ in range(READINGS):
            began = self.ticks()
            now = self._store_now()
            ended = self.ticks()
            found.append((ended - began, ended, now))
        return min(found)


class Alarm(Protocol):
    """What `set_alarm` returns."""

    def cancel(self) -> None:
        """Cancel the alarm."""
        ...


class PendingAlarm:
    """A callback for when a clock has reached a time."""

    __slots__ = ("_alarms", "callback", "context")

    def __init__(self, alarms: "Alarms", callback: Callable[[], None]) -> None:
        self._alarms = alarms
        self.callback: Callable[[], None] | None = callback
        self.context = contextvars.copy_context()

    def cancel(self) -> None:
        """Cancel the callback."""
        if self.callback is not None:
            self.callback = None
            self._alarms.note_cancelled()


class Alarms:
    """The pending alarms of one clock and loop, served by one timer of the loop.

    It never waits for longer than a second, because the loop's time and the clock drift apart, and part when the
    machine is suspended or the clock is set.
    """

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._clock = clock
        self._heap: list[tuple[int, int, PendingAlarm]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._cancelled = 0

    def add(self, at: int, callback: Callable[[], None]) -> PendingAlarm:
        """Call back when the clock has reached a time."""
        alarm = PendingAlarm(self, callback)
        heapq.heappush(self._heap, (at, next(self._order), alarm))
        if self._timer is None or at < self._timer_at:
            self._set_timer()
        return alarm

    def note_cancelled(self) -> None:
        """Count a cancelled alarm. It stays in the heap until its time has come, or until cancelled ones are the
        majority.
        """
        self._cancelled += 1
        if self._cancelled > max(CANCELLED_MAX, len(self._heap) // 2):
            self._heap = [one for one in self._heap if one[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        if self._heap:
            self._timer_at = self._heap[0][0]
            seconds = max(0, self._timer_at - self._clock.now()) / SECOND
            self._timer = self.loop.call_later(min(seconds, LOOK_SECONDS), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        due: list[PendingAlarm] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        self._set_timer()
        for alarm in due:
            if alarm.callback is not None:
                self.loop.call_soon(self._ring, alarm, context=alarm.context)

    def _ring(self, alarm: PendingAlarm) -> None:
        callback, alarm.callback = alarm.callback, None
        if callback is not None:
            callback()


def set_alarm(clock: Clock, loop: asyncio.AbstractEventLoop, at: int, callback: Callable[[], None]) -> Alarm:
    """Call back when a clock has reached a time. A clock that a test moves rings by itself."""
    own: Callable[..., Alarm] | None = getattr(clock, "alarm", None)
    return own(loop, at, callback) if own is not None else Alarms(clock, loop).add(at, callback)


def ticks_of(clock: Clock) -> Callable[[], int]:
    """Return the function that measures how much time passes by a clock."""
    own: Callable[[], int] = getattr(clock, "ticks", machine_ticks)
    return own


def read_again(clock: Clock) -> int:
    """Read the store's clock again, if the clock follows that, and return the time to record. On any thread."""
    again: Callable[[], int] = getattr(clock, "read_again", clock.now)
    return again()


def microseconds(seconds: float) -> int:
    """Return whole microseconds."""
    return round(seconds * SECOND)


def wall_seconds() -> float:
    """Return this machine's time in seconds since 1970, for comparison with another machine's."""
    return time.time()


BLOCK_BYTES: Final = 4096


class MachineRandom(random.Random):
    """`random.SystemRandom` with a buffered block of bytes. A forked child draws its own block."""

    def __init__(self) -> None:
        self._block = b""
        self._used = 0
        self._process = 0
        super().__init__()

    def getrandbits(self, k: int) -> int:
        """Return an integer of `k` random bits."""
        count = (k + 7) // 8
        return int.from_bytes(self._take(count), "big") >> (count * 8 - k)

    def randbytes(self, n: int) -> bytes:
        """Return `n` random bytes."""
        return self._take(n)

    def random(self) -> float:
        """Return a number from 0.0 up to, but not including, 1.0."""
        return self.getrandbits(53) / (1 << 53)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the machine is not seeded."""

    def _take(self, count: int) -> bytes:
        process = os.getpid()
        if self._used + count > len(self._block) or process != self._process:
            self._block = os.urandom(max(BLOCK_BYTES, count))
            self._used, self._process = 0, process
        taken = self._block[self._used : self._used + count]
        self._used += count
        return taken


_STATE: Final = struct.Struct("<625I")
"""The state of a `random.Random`."""


def packed_state(source: random.Random) -> tuple[bytes, float | None]:
    """Return the state of a source of randomness in the form in which a checkpoint keeps it."""
    _, words, gauss = source.getstate()
    return _STATE.pack(*words), gauss


def from_packed_state(packed: bytes, gauss: float | None) -> random.Random:
    """Return a source of randomness that continues from a state."""
    source = random.Random(0)
    source.setstate((3, _STATE.unpack(packed), gauss))
    return source
