"""How much time passes, by the kernel: this clock cannot be set, and runs while the machine is suspended."""

import sys
import time
from typing import Final

if sys.platform == "win32":

    def ticks() -> int:
        """Return microseconds since an arbitrary moment."""
        return time.monotonic_ns() // 1000

else:
    _KERNEL_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    """Linux has one that counts suspension; where the other one does (macOS), Python's own `monotonic` does not."""

    def ticks() -> int:
        """Return microseconds since an arbitrary moment. Time in which the machine was suspended counts, where it is
        known.
        """
        return time.clock_gettime_ns(_KERNEL_CLOCK) // 1000
