"""Time as a parameter. Clocks decide only timers and leases; what changed is decided by content, never by time."""

import time
from typing import Final, Protocol

SECOND: Final = 1_000_000
"""Microseconds."""


class Clock(Protocol):
    """A source of time. Tests give one that stands still until it is told to move."""

    def now(self) -> int:
        """Return microseconds since 1970. Never goes backwards."""
        ...


class StoreClock:
    """The monotonic clock, offset to the store's: a jump of the machine's clock does not reach a running process."""

    def __init__(self, store_now: int) -> None:
        self._offset = store_now - time.monotonic_ns() // 1000

    def now(self) -> int:
        return time.monotonic_ns() // 1000 + self._offset


def microseconds(seconds: float) -> int:
    """Return whole microseconds."""
    return round(seconds * SECOND)
