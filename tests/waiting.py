"""How tests wait: for a condition, until a deadline that no healthy machine reaches, however busy it is."""

import asyncio
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

T = TypeVar("T")

DEADLINE_SECONDS = 120.0
"""A test that waits longer has found something that does not happen. Passing tests wait milliseconds."""


def wait_until(is_so: Callable[[], T], what: Callable[[], object] | str = "", pause: float = 0.01) -> T:
    """Wait until something is so, and return what the condition then returned. `what` says more if it never is."""
    until = time.monotonic() + DEADLINE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < until, _told(what)
        time.sleep(pause)
    return found


async def wait_on_loop_until(is_so: Callable[[], T], what: Callable[[], object] | str = "") -> T:
    """Wait as `wait_until` does, and let the loop turn meanwhile."""
    until = time.monotonic() + DEADLINE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < until, _told(what)
        await asyncio.sleep(0.001)
    return found


def _told(what: Callable[[], object] | str) -> str:
    return f"it does not become so: {what() if callable(what) else what}"


def open_raw(path: Path | str, **options: Any) -> apsw.Connection:
    """Open a store's file behind the engine's back. It waits while another has it locked, as every test must."""
    connection = apsw.Connection(str(path), **options)
    connection.set_busy_timeout(round(DEADLINE_SECONDS * 1000))
    return connection


def is_locked(path: Path | str) -> bool:
    """Tell whether a process that was stopped has the lock of a store's file: then everybody waits for it.

    It is asked with the store's own SQLite: another one in this process would drop the locks of an app that has the
    file open here, and the next process to close it would take itself for the last and remove the log.
    """
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(300)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except apsw.BusyError:
        return True
    finally:
        connection.close()
    return False


def stop_between_writes(path: Path | str, send_signal: Callable[[signal.Signals], Any]) -> None:
    """Stop a process that writes to a store, at a moment at which it does not have the file's lock."""
    send_signal(signal.SIGSTOP)
    while is_locked(path):
        send_signal(signal.SIGCONT)
        time.sleep(0.05)
        send_signal(signal.SIGSTOP)


def open_sqlite(path: Path | str, **options: Any) -> sqlite3.Connection:
    """Open a file by the standard library. It waits for locks as well.

    Never that of a store which an app has open in this process: see `is_locked`.
    """
    return sqlite3.connect(path, timeout=DEADLINE_SECONDS, **options)
