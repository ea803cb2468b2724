"""How much time passes, by the kernel: this clock cannot be set, and runs while the machine is suspended."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Final

if sys.platform == "win32":
    nanoseconds: Final[Callable[[], int]] = time.monotonic_ns
    """Return nanoseconds since some moment."""

else:
    _KERNEL_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    """Linux has one that counts suspension; where the other one does (macOS), Python's own `monotonic` does not."""
    nanoseconds: Final[Callable[[], int]] = functools.partial(time.clock_gettime_ns, _KERNEL_CLOCK)
    """Return nanoseconds since some moment. Time in which the machine was suspended counts, where it is known."""


def ticks() -> int:
    """Return the same in microseconds."""
    return nanoseconds() // 1000
