"""How much time passes, by the machine's kernel: that clock cannot be set, and goes on while it is suspended."""

import time
from typing import Final

_KERNEL_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""Linux has one that counts suspension; where the other one does (macOS), Python's own `monotonic` does not."""


def ticks() -> int:
    """Return microseconds since some moment. Time in which the machine was suspended counts, where that is known."""
    if _KERNEL_CLOCK is None:
        return time.monotonic_ns() // 1000
    return time.clock_gettime_ns(_KERNEL_CLOCK) // 1000
