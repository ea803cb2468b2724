"""Opening a file as a store: what it must be, how it becomes one, and migrations.

Nothing is changed before the file is known to be a store, or empty. A descriptor of our own is dangerous: closing it
frees all locks that SQLite holds on the file in this process. So an existing file is only ever opened by SQLite, and a
new one is created while no other thread is opening.
"""

import os
import stat
import threading
import time
from functools import cache
from typing import Final

import apsw

from everstep.errors import Misuse, StoreError, StoreReadOnly, StoreUnusable
from everstep.model.crash_points import crash_point
from everstep.model.own_files import behind_links, planted
from everstep.stores.sql.migrations import works_with
from everstep.stores.sql.rows import Row
from everstep.stores.sqlite.connections import PATIENCE_SECONDS, Durability, Patience, connect, translated
from everstep.stores.sqlite.queries import HERE, query, sql_text

OURS: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOMUTEX
"""Flags for a store's own connections: a lock protects all their use, so SQLite need not lock each call."""
APPLICATION_ID: Final = 0x45765374
"""`EvSt`: the `PRAGMA application_id` of a store."""

SIZE_MIN: Final = 512
"""The size of the smallest SQLite file. SQLite would take a smaller one for empty, and overwrite it."""

JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
JOURNAL_HEADER_BYTES: Final = 28

_creating: Final = threading.Lock()

BESIDE: Final = ("", "-journal", "-wal", "-shm", "-live")
"""The suffixes of a store's files."""


@cache
def migrations() -> list[str]:
    """Return the text of each migration; the n-th one leads to version n."""
    files = os.listdir(os.path.join(HERE, "migrations"))
    found = sorted(name for name in files if name[:4].isdecimal() and name.endswith(".sql"))
    assert [int(name[:4]) for name in found] == list(range(1, len(found) + 1)), "migrations are numbered densely"
    return [sql_text("migrations", name) for name in found]


def real_path(path: str) -> str:
    """Return the real path of a store. A link to it is followed, unless a stranger may have put it there."""
    try:
        return os.path.realpath(behind_links(path))
    except Misuse as error:
        raise StoreUnusable(str(error)) from error


def prepare_file(path: str, *, create: bool) -> None:
    """Make sure that the file exists and this process may write it; create an empty one if it does not exist."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreUnusable(f"There is no folder {folder} for the store {os.path.basename(path)}. Create it first.")
    refuse_planted_files(path)
    with _creating:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            if not create:
                what = "The first run makes one; --url or EVERSTEP_URL name another place."
                raise StoreUnusable(f"There is no store {path}. {what}") from None
            crash_point("store.create.before")
            _create(path, folder)
            crash_point("store.create.after")
            return
        except OSError as error:
            raise StoreUnusable(f"{path} cannot be looked at: {error.strerror}.") from error
    if stat.S_ISDIR(mode):
        raise StoreUnusable(f"{path} is a folder, not a store. Name a file in it.")
    if not stat.S_ISREG(mode):
        raise StoreUnusable(f"{path} is not an ordinary file, so it cannot be a store.")
    if not os.access(path, os.R_OK | os.W_OK):
        raise StoreReadOnly(f"{path} cannot be read and written by this user. Check its owner and mode.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreReadOnly(f"{folder} cannot be written by this user, and a store needs files beside its own.")


def refuse_planted_files(path: str) -> None:
    """Raise `StoreUnusable` if a stranger may have put one of a store's files into a folder where all users
    can write.
    """
    for ending in BESIDE:
        if why := planted(path + ending):
            raise StoreUnusable(why)


def _create(path: str, folder: str) -> None:
    """Create an empty file that only its owner may read, durably."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return  # Another process was quicker.
    except OSError as error:
        raise StoreReadOnly(f"{path} cannot be created: {error.strerror}.") from error
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_is_store(path: str, *, create: bool, vfs: str | None) -> None:
    """Raise `StoreUnusable` unless the file is a store or empty. The file is opened for reading only."""
    size = os.stat(path).st_size
    if 0 < size < SIZE_MIN:
        raise StoreUnusable(f"{path} is not a store: it is no SQLite file.")
    if size and not is_half_made(path):
        connection = None
        try:
            flags = apsw.SQLITE_OPEN_READONLY
            connection = connect(path, durability="power", patience=Patience(), flags=flags, vfs=vfs)
            version = version_of(connection, path)
        except apsw.NotADBError as error:
            raise StoreUnusable(f"{path} is not a store: it is no SQLite file, or its header is damaged.") from error
        except apsw.Error as error:
            raise translated(error, path, writing=False) from error
        finally:
            if connection is not None:
                connection.close()
        if version:
            return
    if not create:
        raise StoreUnusable(f"{path} is empty: there is no store in it.")


def is_half_made(path: str) -> bool:
    """Return True if a crash cut off the first write to an empty file: SQLite's journal says that it had no pages.

    A connection for reading cannot undo such a write, so it could not check the file; the one that writes can.
    """
    try:
        with open(path + "-journal", "rb") as journal:
            header = journal.read(JOURNAL_HEADER_BYTES)
    except FileNotFoundError:
        return False
    return len(header) == JOURNAL_HEADER_BYTES and header[:8] == JOURNAL_MAGIC and header[16:20] == bytes(4)


def version_of(connection: apsw.Connection, path: str) -> int:
    """Return the version of the schema, 0 for an empty file. Raises `StoreUnusable` if the file is something else."""
    application, is_empty = connection.execute(query("what_it_is")).fetchall()[0]
    if application == 0 and is_empty:
        return 0
    if application != APPLICATION_ID:
        raise StoreUnusable(f"{path} is not a store: it is a SQLite database of something else. Nothing was changed.")
    versions: list[Row] = connection.execute(query("schema_version")).fetchall()
    version = _whole(versions, path, "the version of its schema")
    known = len(migrations())
    if version > known and (version > known + 1 or _works_with(connection, version, path) > known):
        raise StoreUnusable(
            f"{path} has version {version} of the schema, made by a newer release of Everstep; this one knows "
            f"version {known}, and cannot use it. Install the newer release. Nothing was changed."
        )
    return version


def _works_with(connection: apsw.Connection, version: int, path: str) -> int:
    rows: list[Row] = connection.execute(query("works_with")).fetchall()
    return _whole(rows, path, "the version that works with it") if rows else version


def _whole(rows: list[Row], path: str, what: str) -> int:
    """Return a version from the table `meta`. A damaged one is refused, because migrations would run again."""
    number = rows[0][0] if rows else None
    if type(number) is not int or number < 1:
        raise StoreUnusable(
            f"{path} is damaged: {what}, in its table `meta`, is none ({type(number).__name__}). Restore a backup of "
            "the file. Nothing was changed."
        )
    return number


def open_writing(path: str, *, durability: Durability, patience: Patience, vfs: str | None) -> apsw.Connection:
    """Open the connection that writes, in WAL mode."""
    connection = connect(path, durability=durability, patience=patience, flags=OURS, vfs=vfs)
    try:
        if connection.readonly("main"):
            raise StoreReadOnly(f"{path} cannot be written. Check the owner and mode of file and folder.")
        crash_point("store.switch.before")
        mode = _switch_to_wal(connection)
        crash_point("store.switch.after")
        if mode != "wal":
            raise StoreUnusable(f"{path} lies on a file system where SQLite cannot share memory, so it is not safe.")
        refuse_planted_files(path)  # now all of them exist, and no other file can take their place
    except BaseException:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # the content of a stranger's -wal stays there
        connection.close()
        raise
    return connection


def _switch_to_wal(connection: apsw.Connection) -> str:
    """Switch a new file to WAL. SQLite does not call the busy handler here, so this function waits itself."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return str(connection.pragma("journal_mode", "WAL"))
        except apsw.BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def migrate(connection: apsw.Connection, path: str, *, may_migrate: bool) -> bool:
    """Bring the schema to this release's version, and return whether the store was made just now.

    Each migration is one transaction, and all processes that open the file take turns: the second one finds the work
    done. A new store may always be made; an old one is only migrated if the caller allows it.
    """
    is_new = False
    while (version := version_of(connection, path)) < len(migrations()):
        if version and not may_migrate:
            raise StoreUnusable(
                f"{path} has version {version} of the schema and this release needs {len(migrations())}. "
                "Open it with migrate=True when no older release uses it any more."
            )
        crash_point("store.migrate.before")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if version_of(connection, path) == version:
                connection.execute(migrations()[version])
                connection.execute(query("set_schema_version"), (version + 1,))
                connection.execute(query("forget_works_with"))
                if (needed := works_with(migrations(), version + 1)) <= version:
                    connection.execute(query("set_works_with"), (needed,))
                connection.pragma("application_id", APPLICATION_ID)
                is_new = is_new or version == 0
            crash_point("store.migrate.written")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        crash_point("store.migrate.after")
    return is_new


def open_file(
    path: str, *, durability: Durability, patience: Patience, create: bool, may_migrate: bool, vfs: str | None
) -> tuple[apsw.Connection, apsw.Connection, bool]:
    """Return a connection for writing, one for reading, and whether the store was made just now."""
    prepare_file(path, create=create)
    check_is_store(path, create=create, vfs=vfs)
    writing = None
    try:
        writing = open_writing(path, durability=durability, patience=patience, vfs=vfs)
        is_new = migrate(writing, path, may_migrate=may_migrate)
        # Reading a WAL needs writing to the shared memory beside it.
        reading = connect(path, durability=durability, patience=Patience(), flags=OURS, vfs=vfs)
        reading.pragma("query_only", 1)
    except BaseException as error:
        if writing is not None:
            writing.close()
        if isinstance(error, apsw.Error) and not isinstance(error, StoreError):
            raise translated(error, path, writing=False) from error
        raise
    return writing, reading, is_new
