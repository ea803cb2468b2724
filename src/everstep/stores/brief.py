"""How long a thread waits for a database: without a limit, except on the thread of an application's loop.

What is asked of a store within `briefly` raises `Busy` as soon as it has waited for `LOOP_SECONDS`, or would have to
wait for what may take longer: a new connection, a lock that another thread of this process has, files. Nothing has been
changed then, and the caller asks again on another thread, where it may take as long as it takes.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

LOOP_SECONDS: Final = 0.05
"""How long the loop of an application waits for a database, in seconds."""
QUICK_SECONDS: Final = 0.01
"""A store that was slow is called on the loop again once a call on another thread took no longer than this (seconds).
"""

POLL_SECONDS: Final = 0.0005
"""How often a thread that waits only briefly looks whether a lock is free, in seconds."""

R = TypeVar("R")


class Busy(Exception):
    """The call would have to wait for the store. Nothing was done: the caller calls again on a thread that may wait."""


class _Thread(threading.local):
    until: float | None = None
    """When this thread stops waiting, by the monotonic clock; None for no limit."""


_thread: Final = _Thread()


def briefly(function: Callable[..., R], /, *args: Any, **named: Any) -> R:
    """Call a function that asks a store, on the thread of a loop. Raises `Busy` if the store does not answer soon."""
    before, until = _thread.until, time.monotonic() + LOOP_SECONDS
    _thread.until = until if before is None else min(before, until)
    try:
        return function(*args, **named)
    finally:
        _thread.until = before


def waits_until() -> float | None:
    """Return when this thread must stop waiting; None if it may wait as long as it takes."""
    return _thread.until


def refuse_when_brief() -> None:
    """Raise `Busy` on a thread that waits only briefly, because what comes next takes longer or cannot be
    interrupted.
    """
    if _thread.until is not None:
        raise Busy


def acquire(lock: threading.Semaphore) -> None:
    """Take a place that other threads may hold for long. Raises `Busy` on a thread that waits only briefly."""
    if (until := _thread.until) is None:
        lock.acquire()
    elif not lock.acquire(timeout=max(0.0, until - time.monotonic())):
        raise Busy


def wait_until_free(lock: threading.Lock) -> threading.Lock:
    """Return a lock, for a `with`, when no other thread has it. Raises `Busy` on a thread that waits only briefly.

    It is not taken here: a signal's handler that raises between an `acquire` and a `try` would keep it for ever. The
    price: if another thread takes it between this look and the `with`, the caller waits for that thread.
    """
    if (until := _thread.until) is not None:
        while lock.locked():
            if time.monotonic() >= until:
                raise Busy
            time.sleep(POLL_SECONDS)
    return lock
