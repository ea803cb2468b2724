"""Pausing the garbage collector while large structures are built that stay: it would walk them again and again."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

IMMORTAL_MAX: Final = 1000
"""An upper bound for CPython 3.12's own immortal tuples (a few hundred), which count as frozen. A program that freezes
its objects has thousands.
"""


@contextmanager
def paused_collector() -> Generator[None]:
    """Pause the collector within the block, unless it is off already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Little may have been built after all, and counting what is frozen walks all of it.
        if gc.get_count()[0] > gc.get_threshold()[0] and gc.get_freeze_count() < IMMORTAL_MAX:
            gc.freeze()  # and unfreeze: what was built counts as old, so the next collection does not walk it
            gc.unfreeze()
        gc.enable()
