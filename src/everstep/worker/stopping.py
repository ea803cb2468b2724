"""Stopping on a signal: the first one gives the runs back, a second one ends the process at once."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from everstep.effects.surroundings import persons_line
from everstep.model.untrusted import logger

log = logger("everstep.worker")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
DEAF_SECONDS: Final = 2.0
"""After this many seconds without a turn of the event loop, a message explains why the process does not stop."""


class Stop:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.number = 0
        self.asked = asyncio.Event()
        self.wanted, self.heard, self.over = threading.Event(), threading.Event(), False

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
        loop.call_soon_threadsafe(stop.heard.set)
        stop.wanted.set()
        if on_first is not None:
            loop.call_soon_threadsafe(on_first)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # The thread is started early: a signal may come in the middle of workflow code, which must not start one.
    try:
        threading.Thread(target=_say_if_deaf, args=(stop,), daemon=True).start()
    except (RuntimeError, MemoryError):
        log.warning("There is no thread that could say why this process does not stop, should it not.")
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        stop.over = True
        stop.wanted.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_if_deaf(stop: Stop) -> None:
    """Explain why nothing happens: code that blocks the event loop also delays the stop."""
    stop.wanted.wait()
    if stop.over or stop.heard.wait(DEAF_SECONDS) or stop.over:
        return
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = persons_line(frame) if frame is not None else ""
    at = f": it is at {where}" if where else ""
    print(
        f"This does not stop yet, because code in it does not give way{at}. The same signal again (Ctrl-C) ends it at "
        "once; nothing that is recorded is lost.",
        file=sys.stderr,
        flush=True,
    )
