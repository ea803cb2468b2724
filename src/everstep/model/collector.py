"""Pausing the garbage collector while very much is built up that stays: it would walk all of it again and again."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


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
        if gc.get_count()[0] > gc.get_threshold()[0] and not gc.get_freeze_count():
            gc.freeze()  # and back: what was built up counts as old, so that it is not walked at once
            gc.unfreeze()
        gc.enable()
