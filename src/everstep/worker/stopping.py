"""Ending well on a signal: the first lets go of what is driven here, a second one ends the process at once."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody wants this process to end, and by which signal."""

    def __init__(self) -> None:
        self.number = 0
        self.asked = asyncio.Event()

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended."""
        return 128 + self.number


@contextmanager
def stopping_on_signals(on_first: Callable[[], None] | None = None) -> Generator[Stop]:
    """Let SIGINT and SIGTERM set an event; a second one ends the process at once, also when the loop is stuck."""
    stop = Stop()
    loop = asyncio.get_running_loop()

    def note(number: int, frame: Any) -> None:
        if stop.number:
            os._exit(128 + number)
        stop.number = number
        loop.call_soon_threadsafe(stop.asked.set)
        if on_first is not None:
            loop.call_soon_threadsafe(on_first)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
