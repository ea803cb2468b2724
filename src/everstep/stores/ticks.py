"""How much time passes, by the machine's kernel: that clock cannot be set, and goes on while it is suspended."""

import time
from typing import Final

_KERNEL_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", -1))
"""Linux has one that counts suspension; where the other one does (macOS), Python's own `monotonic` does not."""


def ticks() -> int:
    """Return microseconds since some moment. Time in which the machine was suspended counts, where that is known."""
    return clock_gettime_ns(_KERNEL_CLOCK) // 1000


def _monotonic(_: int) -> int:
    return time.monotonic_ns()


clock_gettime_ns = time.clock_gettime_ns if hasattr(time, "clock_gettime_ns") else _monotonic
