"""Connections to one SQLite file: settings, patience with other processes, and what an error means."""

import errno
import os
import random
import sys
import time
from typing import Final, Literal

import apsw

from everstep.errors import (
    Misuse,
    StoreBusy,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    StoreUnusable,
)
from everstep.stores.brief import waits_until

Durability = Literal["power", "process"]

PATIENCE_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 0.5
"""How often a store checks, while it is used, whether its path still leads to its file, in seconds."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Patience:
    """A busy handler: waits for another process's transaction, up to minutes, unless configured not to.

    A commit takes a fraction of a millisecond, so the first waits are as short. They are random, because otherwise two
    processes could meet again and again. They grow, so that waiting for a stopped process costs nothing.
    """

    def __init__(self) -> None:
        self.is_patient = True
        self._since = 0.0

    def __call__(self, waits: int) -> bool:
        """Wait a little and return True, or return False to give up."""
        if not self.is_patient:
            return False
        now = time.monotonic()
        if (until := waits_until()) is not None and now >= until:
            return False
        if waits == 0:
            self._since = now
        if now - self._since > PATIENCE_SECONDS:
            return False
        time.sleep(random.uniform(0.5, 1.5) * min(0.0002 * 1.15**waits, 0.025))
        return True


def connect(path: str, *, durability: Durability, patience: Patience, flags: int, vfs: str | None) -> apsw.Connection:
    """Open a connection with the common settings. It never creates the file."""
    connection = apsw.Connection(path, flags=flags, vfs=vfs, statementcachesize=256)
    connection.set_busy_handler(patience)
    # A store may come from a disk that others can write, so nothing in its schema is trusted.
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.pragma("cell_size_check", 1)
    connection.pragma("synchronous", "FULL" if durability == "power" else "NORMAL")
    if sys.platform == "darwin" and durability == "power":
        # There an ordinary fsync does not reach the disk's platters or cells.
        connection.pragma("fullfsync", 1)
        connection.pragma("checkpoint_fullfsync", 1)
    connection.pragma("journal_size_limit", 64 << 20)
    return connection


Ground = Literal["value", "full", "failed", "read-only", "unusable", "moved", "again"]
"""The cause of an error. value: the unit that was written, which is then tried by itself. failed: after it nothing may
be assumed, so this process stops writing. All others concern the store, and hold no run: work pauses, and the writes
are tried again.
"""

GROUNDS: Final[dict[int, Ground]] = {
    apsw.SQLITE_PERM: "read-only",
    apsw.SQLITE_READONLY: "read-only",
    apsw.SQLITE_AUTH: "read-only",
    apsw.SQLITE_IOERR: "failed",
    apsw.SQLITE_CORRUPT: "failed",
    apsw.SQLITE_NOTADB: "failed",
    apsw.SQLITE_FULL: "full",
    apsw.SQLITE_CANTOPEN: "unusable",
    apsw.SQLITE_NOLFS: "unusable",
    apsw.SQLITE_TOOBIG: "value",
    apsw.SQLITE_CONSTRAINT: "value",
    apsw.SQLITE_MISMATCH: "value",
    apsw.SQLITE_RANGE: "value",
    # Extended codes:
    apsw.SQLITE_READONLY_DBMOVED: "moved",
    apsw.SQLITE_IOERR_NOMEM: "again",
}
"""The meaning of SQLite's result codes. A code that is not listed says nothing: busy, locked, interrupted, out of
memory, …
"""


def ground(error: Exception) -> Ground:
    """Return the cause of an error."""
    if isinstance(error, MemoryError):
        return "again"
    if not isinstance(error, apsw.Error) or isinstance(error, apsw.BindingsError):
        return "value"  # it cannot be sent
    details: int = getattr(error, "extendedresult", 0)
    code: int = getattr(error, "result", 0) or _CODES.get(type(error), 0)
    if code == apsw.SQLITE_ERROR:  # of a statement: a table that is not there, or a value that a function refuses
        return "unusable" if str(error).startswith("no such") else "value"
    return GROUNDS.get(details) or GROUNDS.get(code, "again")


_CODES: Final[dict[type[Exception], int]] = {
    type(apsw.exception_for(code)): code for code in (*GROUNDS, apsw.SQLITE_ERROR) if code < 0x100
}
"""The codes of exceptions that SQLite itself did not raise, and that therefore have none."""


def translated(error: Exception, path: str, *, writing: bool) -> Exception:
    """Return the error that users see instead of SQLite's, or the error itself if it is about a value."""
    match error:
        case StoreError() | Misuse():
            return error
        case apsw.BusyError() | apsw.LockedError():
            return StoreBusy(
                f"{path} has been locked by another process for {PATIENCE_SECONDS:.0f} seconds. Nothing was written. "
                "It is probably stopped in the middle of a write: let it continue, or end it."
            )
        case apsw.ConnectionClosedError() | apsw.CursorClosedError():
            return Misuse(f"The store {path} has been closed.")
    match ground(error):
        case "full":
            return StoreFull(f"There is no room for {path}. Nothing was written. Free some space; work then continues.")
        case "failed" if isinstance(error, apsw.IOError):
            return StoreFailed(
                f"Reading or writing {path} failed ({error}). What was written just now is unknown, so this process "
                "stops writing. Check the disk, then start again: every run is verified before it continues."
            )
        case "failed":
            kind = StoreFailed if writing else StoreUnusable
            return kind(f"{path} is damaged ({error}). Restore a backup, or see `everstep repair`.")
        case "read-only":
            return StoreReadOnly(f"{path} cannot be written ({error}). Check the owner and mode of file and folder.")
        case "unusable":
            return StoreUnusable(f"{path} or a file beside it cannot be opened, or is no store any more ({error}).")
        case "moved":
            return moved(path)
        case "value":
            return error
    return StoreBusy(f"{path} did not do what was asked of it ({error}). Nothing was written; it is tried again.")


def moved(path: str) -> StoreMoved:
    """Return the error for a file that is no longer where it was opened."""
    return StoreMoved(
        f"{path} was moved, removed or replaced while it was open, so what this process writes would not be found "
        "there. Nothing is acknowledged any more. Stop all processes of this store, put the file back, with its -wal "
        "beside it if that is there, and start again."
    )


class Identity:
    """Which files a store has open, by device and inode: as long as they are open, their paths must lead to them.

    SQLite keeps its files open. If they are moved, removed or replaced, it continues to write what no process will
    find.
    """

    def __init__(self, path: str | None) -> None:
        self.has_files = path is not None  # in memory there are none
        names = (path, f"{path}-wal", f"{path}-shm") if path is not None else ()
        found = {name: _identity(name) for name in names}
        self._files = {name: there for name, there in found.items() if there}  # a VFS may have others
        self.look_at = time.monotonic() + LOOK_SECONDS if self.has_files else float("inf")
        """The monotonic time of the next look."""
        self.is_left = False
        """Whether a thread was asked to look, and has not: perhaps there is none."""

    def is_left_to_a_thread(self) -> bool:
        """Return True if a thread that may wait should look: only once, because there may be no thread."""
        was_left, self.is_left = self.is_left, True
        return not was_left

    def look(self) -> StoreMoved | None:
        """Return what is wrong, if it is."""
        self.look_at = time.monotonic() + LOOK_SECONDS if self.has_files else float("inf")
        self.is_left = False
        for name, there in self._files.items():
            found = _identity(name)
            if found is not None and found != there:
                return moved(name)
        return None


def _identity(path: str) -> tuple[int, ...] | None:
    """Return which file a path leads to; empty if to none, None if that is unknown."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_no_room(error: Exception, connection: apsw.Connection) -> bool:
    """Return True if a write failed only for lack of room, including quotas and limits, which SQLite calls
    I/O errors.
    """
    if isinstance(error, apsw.IOError):
        is_sync = getattr(error, "extendedresult", 0) in (apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC)
        return not is_sync and connection.system_errno in NO_ROOM
    return isinstance(error, apsw.FullError)
