"""Connections to one SQLite file: settings, patience with other processes, and what an error means."""

import errno
import random
import sys
import time
from typing import Final, Literal

import apsw

from everstep.errors import Misuse, StoreError, StoreFailed, StoreFull, StoreReadOnly, StoreUnusable

Durability = Literal["power", "process"]

PATIENCE_SECONDS: Final = 300.0
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Patience:
    """A busy handler: waits for another process's transaction, up to minutes, unless told not to.

    A commit takes a fraction of a millisecond, so the first waits are as short; they are random, for otherwise two
    processes could meet again and again; they grow, so that waiting for a stopped process costs nothing.
    """

    def __init__(self) -> None:
        self.is_patient = True
        self._since = 0.0

    def __call__(self, waits: int) -> bool:
        """Wait a little and return True, or return False to give up."""
        if not self.is_patient:
            return False
        now = time.monotonic()
        if waits == 0:
            self._since = now
        if now - self._since > PATIENCE_SECONDS:
            return False
        time.sleep(random.uniform(0.5, 1.5) * min(0.0002 * 1.15**waits, 0.025))
        return True


def connect(path: str, *, durability: Durability, patience: Patience, flags: int, vfs: str | None) -> apsw.Connection:
    """Open a connection with the settings of every connection. It never creates the file."""
    connection = apsw.Connection(path, flags=flags, vfs=vfs, statementcachesize=256)
    connection.set_busy_handler(patience)
    # A store comes from a disk that others may write, so its schema is not trusted with anything.
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


def translated(error: Exception, path: str, *, writing: bool) -> Exception:
    """Return the error that a user should see instead of one of SQLite, or the error itself if it is about a value."""
    match error:
        case apsw.NoMemError():
            return MemoryError(f"There is no memory for {path}. Nothing was written.")
        case apsw.FullError():
            return StoreFull(f"There is no room for {path}. Nothing was written. Free some space; work then goes on.")
        case apsw.IOError():
            return StoreFailed(
                f"Reading or writing {path} failed ({error}). What was written just now is unknown, so this process "
                "stops writing. Check the disk, then start again: every run is verified before it goes on."
            )
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            return StoreReadOnly(f"{path} cannot be written ({error}). Check the owner and mode of file and folder.")
        case apsw.CorruptError() | apsw.NotADBError():
            kind = StoreFailed if writing else StoreUnusable
            return kind(f"{path} is damaged ({error}). Restore a backup, or see `everstep repair`.")
        case apsw.BusyError() | apsw.LockedError():
            return StoreError(
                f"Another process has kept {path} locked for {PATIENCE_SECONDS:.0f} seconds. Nothing was written. "
                "It is probably stopped in the middle of a write: let it go on, or end it."
            )
        case apsw.CantOpenError():
            return StoreUnusable(f"{path} or a file beside it cannot be opened ({error}).")
        case apsw.ConnectionClosedError() | apsw.CursorClosedError():
            return Misuse(f"The store {path} has been closed.")
    return error


def is_no_room(error: Exception, connection: apsw.Connection) -> bool:
    """Tell whether a write failed only for lack of room: also quotas and limits, which SQLite calls I/O errors."""
    if isinstance(error, apsw.IOError):
        is_sync = getattr(error, "extendedresult", 0) in (apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC)
        return not is_sync and connection.system_errno in NO_ROOM
    return isinstance(error, apsw.FullError)
