"""Time as a parameter. Clocks decide only timers and leases; what changed is decided by content, never by time."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

SECOND: Final = 1_000_000
"""Microseconds."""
READINGS: Final = 3
"""So often are two clocks compared. The quickest reading counts: in the others the process may have been put aside."""


class Clock(Protocol):
    """A source of time. Tests give one that stands still until it is told to move."""

    def now(self) -> int:
        """Return microseconds since 1970. Never goes backwards."""
        ...


class StoreClock:
    """The monotonic clock, offset to the store's: a jump of the machine's clock does not reach a running process."""

    def __init__(self, store_now: Callable[[], int]) -> None:
        self._offset = min(_offset(store_now) for _ in range(READINGS))[1]

    def now(self) -> int:
        return time.monotonic_ns() // 1000 + self._offset


def _offset(store_now: Callable[[], int]) -> tuple[int, int]:
    """Return how long it took to read both clocks, and how far the store's is from the monotonic one."""
    began = time.monotonic_ns() // 1000
    now = store_now()
    took = time.monotonic_ns() // 1000 - began
    return took, now - began - took


class Alarm(Protocol):
    """What `set_alarm` returns."""

    def cancel(self) -> None:
        """Do not ring."""
        ...


def set_alarm(clock: Clock, loop: asyncio.AbstractEventLoop, at: int, callback: Callable[[], None]) -> Alarm:
    """Call back at a time, or an hour from now if that is earlier. A clock that a test moves rings by itself."""
    own: Callable[..., Alarm] | None = getattr(clock, "alarm", None)
    if own is not None:
        return own(loop, at, callback)
    return loop.call_later(min(max(0, at - clock.now()) / SECOND, 3600.0), callback)


def microseconds(seconds: float) -> int:
    """Return whole microseconds."""
    return round(seconds * SECOND)


def wall_seconds() -> float:
    """Return this machine's time in seconds since 1970, for what is compared with another machine's."""
    return time.time()
