"""Pausing the garbage collector while very much is built up that stays: it would walk all of it again and again."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

IMMORTAL_MAX: Final = 1000
"""CPython 3.12 puts its own immortal tuples, a few hundred, beside what is frozen. A program freezes thousands."""


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
        # Little may have been built up after all; and to count what is frozen, all of it is walked.
        if gc.get_count()[0] > gc.get_threshold()[0] and gc.get_freeze_count() < IMMORTAL_MAX:
            gc.freeze()  # and back: what was built up counts as old, so that it is not walked at once
            gc.unfreeze()
        gc.enable()
