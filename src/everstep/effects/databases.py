"""The seam between atomic steps and a database: open a transaction, read the marker, write the marker, commit.

A database is anything with the few methods below. They are called on one thread, the one that runs the step; each may
be a plain method or a coroutine, so that drivers for asyncio fit as well (`is_async` says that any of them waits).
"""

import inspect
import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from everstep.errors import Misuse
from everstep.model.markers import Marker
from everstep.model.options import checked_text
from everstep.stores.protocol import Store
from everstep.stores.sqlite.marked import MarkedTransaction
from everstep.stores.sqlite.opening import APPLICATION_ID
from everstep.stores.sqlite.store import is_open_here

if TYPE_CHECKING:
    import sqlite3


C_co = TypeVar("C_co", covariant=True)
T = TypeVar("T")

Meaning = Literal["again", "unknown", "failed"]
"""What an error of a database means.

again: others were writing; nothing was done, and the same may be done again.
unknown: after this error even what can be read back may not be on the disk, so nothing may be assumed.
failed: anything else. If a COMMIT raised it, reading the marker tells whether that has happened.
"""


class Transaction(Protocol[C_co]):
    """An open transaction that writes."""

    def lend(self) -> C_co:
        """Return the connection for the body. The body can neither commit nor roll back by itself."""
        ...

    def take_back(self, *, returned: bool) -> str | Awaitable[str]:
        """The body has ended. Returns what it did to the transaction that it must not, or an empty text.

        If it `returned`, the transaction must still be open; an error may have ended it. What is raised here counts as
        raised by the body, and then it is asked once more.
        """
        ...

    def read_marker(self, key: str) -> Marker | Awaitable[Marker | None] | None:
        """Return the marker under a key."""
        ...

    def write_marker(self, marker: Marker) -> Awaitable[None] | None:
        """Write a marker in the place of none, or of a void one."""
        ...

    def marked_runs(self, before: int) -> list[str] | Awaitable[list[str]]:
        """Return the runs all of whose markers are from before a time."""
        ...

    def forget_markers(self, run: str, before: int) -> int | Awaitable[int]:
        """Delete the markers of a run from before a time, and return how many there were."""
        ...

    def commit(self) -> Awaitable[None] | None:
        """Make everything durable. An error does not say whether that has happened."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Let go of the connection; what is not committed is rolled back. Never raises."""
        ...

    def interrupt(self) -> None:
        """Stop what the connection does just now. May be called from any thread. Never raises."""
        ...


class Database(Protocol[C_co]):
    """Where an atomic step writes."""

    @property
    def name(self) -> str:
        """What the history calls it: which database it is, without any secret."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether any of its methods, or of its transactions', is a coroutine that waits, and so needs a loop."""
        ...

    def begin(self, store: "Store") -> Transaction[C_co] | Awaitable[Transaction[C_co]]:
        """Open a connection and begin a transaction that waits for no other writer. `store` is that of the run."""
        ...

    def meaning(self, error: BaseException) -> Meaning:
        """Tell what an error means."""
        ...


class StoreDatabase:
    """The store itself."""

    name: Final = "store"

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async

    def for_async_bodies(self) -> "StoreDatabase":
        """Return the same database, for an `async def` body."""
        return StoreDatabase(is_async=True)

    def begin(self, store: "Store") -> Any:
        """Begin a transaction in the store's own file, or in its database."""
        if store.url.startswith("postgres"):
            from everstep.effects.postgres_database import begin_in_store  # psycopg is an optional dependency

            return begin_in_store(store, is_async=self.is_async)  # type: ignore[arg-type]

        return _begun(MarkedTransaction(store.connect(), is_store=True))

    def meaning(self, error: BaseException) -> Meaning:
        """Tell what an error of APSW or psycopg means."""
        import apsw

        if isinstance(error, (apsw.BusyError, apsw.LockedError)):
            return "again"
        if isinstance(error, (apsw.IOError, apsw.CorruptError, apsw.NotADBError)):
            return _meaning_of_code(getattr(error, "extendedresult", 0) or IO_ERROR)
        if hasattr(error, "sqlstate"):  # of psycopg, or of a statement of ours that was in the way of others
            from everstep.effects.postgres_database import meaning_in_store  # psycopg is an optional dependency

            return meaning_in_store(error)
        return "failed"

    def __repr__(self) -> str:
        return "everstep.STORE"


class SqliteFile:
    """A SQLite file, by the standard library."""

    is_async: Final = False

    def __init__(self, path: str, *, foreign_keys: bool = False) -> None:
        self.path = os.path.realpath(path)
        self.name = f"sqlite:///{self.path}"
        self._foreign_keys = foreign_keys

    def begin(self, store: "Store") -> "MarkedTransaction":
        """Begin a transaction in the file. One that is not there is made."""
        import sqlite3

        if is_open_here(self.path):  # two SQLite libraries on one file would free each other's locks
            raise Misuse(f"{self.path} is a store that is open here: write @transaction(everstep.STORE).")
        # Each statement is prepared anew, so that the guard is asked about each.
        connection = sqlite3.connect(self.path, timeout=0.0, isolation_level=None, cached_statements=0)
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        begun = _begun(MarkedTransaction(connection, is_store=False))
        connection.execute(f"PRAGMA busy_timeout = {WAIT_MILLISECONDS}")  # a COMMIT waits for those who read
        return begun

    def _set_up(self, connection: "sqlite3.Connection") -> None:

        if connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,):
            raise Misuse(
                f"{self.path} is a store of Everstep: write @transaction(everstep.STORE), in runs of that store."
            )
        # What the run remembers as done must be as durable here. EXTRA also syncs the folder of a deleted journal.
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("PRAGMA fullfsync = 1")  # on macOS; elsewhere it means nothing
        if self._foreign_keys:
            connection.execute("PRAGMA foreign_keys = 1")  # in a transaction it would do nothing, so not in the body

    def meaning(self, error: BaseException) -> Meaning:
        """Tell what an error of the standard library's sqlite3 means."""
        return _meaning_of_code(getattr(error, "sqlite_errorcode", 0) or 0)

    def __repr__(self) -> str:
        return self.name


WAIT_MILLISECONDS: Final = 10_000
BUSY, LOCKED, IO_ERROR, CORRUPT, PROTOCOL, NOT_A_DATABASE = 5, 6, 10, 11, 15, 26
IO_ERROR_WRITE: Final = 778
"""A write that failed before it could be a commit: the transaction is undone, and its marker tells so."""


def _meaning_of_code(code: int) -> Meaning:
    """Tell what SQLite's result code means; its lower byte is the code without details."""
    if code & 0xFF in (BUSY, LOCKED, PROTOCOL):
        return "again"
    if code & 0xFF in (IO_ERROR, CORRUPT, NOT_A_DATABASE) and code != IO_ERROR_WRITE:
        return "unknown"
    return "failed"


def _begun(transaction: "MarkedTransaction") -> "MarkedTransaction":
    try:
        transaction.begin()
    except BaseException:
        transaction.close()
        raise
    return transaction


STORE: Final = StoreDatabase()
"""The store itself, as the database of `@transaction(everstep.STORE)`. The body gets a connection for tables of its
own: on SQLite an APSW connection to the store's file, from which Everstep's tables are protected; on PostgreSQL a
psycopg connection to the store's database."""


async def now(value: Awaitable[T] | T) -> T:
    """Return a value, or what a coroutine gives."""
    return await value if inspect.isawaitable(value) else value


def database_of(given: Any) -> Database[Any]:
    """Return the database that a user means: `STORE`, a path or URL, an engine, or an object that is one."""
    if isinstance(given, (str, os.PathLike)):
        return _named(os.fspath(given))
    if type(given).__module__.startswith("sqlalchemy."):
        try:
            from everstep.effects.sqlalchemy_database import database_by_sqlalchemy  # an optional dependency
        except ImportError as error:
            raise Misuse("@transaction knows engines of SQLAlchemy 2. This is an older one.") from error
        return database_by_sqlalchemy(given)
    if not isinstance(given, type) and all(hasattr(given, name) for name in ("begin", "meaning", "name", "is_async")):
        database: Database[Any] = given
        return database
    if callable(given):
        raise Misuse("@transaction needs its database: @transaction(everstep.STORE), or @transaction('shop.db').")
    raise Misuse(f"{type(given).__name__} is no database: pass a path, a URL, an engine, or everstep.STORE.")


def database_for(database: Database[Any], step: str, *, is_async: bool) -> Database[Any]:
    """Return the database as the body of a step needs it, which is `async def` or not."""
    if is_async:
        other: Database[Any] = getattr(database, "for_async_bodies", lambda: database)()
        return other
    if getattr(database, "needs_async_body", False):
        raise Misuse(f"{step}: an engine for asyncio needs an `async def` body.")
    return database


def _named(url: str | bytes) -> Database[Any]:
    text = checked_text("database", os.fsdecode(url))
    scheme, separator, rest = text.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        try:
            from everstep.effects.postgres_database import PostgresDatabase  # psycopg is an optional dependency
        except ImportError as error:
            raise Misuse("Transactions in PostgreSQL need psycopg: pip install 'everstep[postgres]'") from error
        return PostgresDatabase(text)
    if separator and not (scheme == "sqlite" and rest.startswith("/")):
        raise Misuse(f"{scheme}://… is not the URL of a SQLite file: sqlite:///relative.db or sqlite:////absolute.db.")
    path, _, settings = rest[1:].partition("?") if separator else (text, "", "")
    if not path or path.startswith(":") or "\0" in path:
        raise Misuse("A transaction needs the path of a SQLite file, as in sqlite:///shop.db.")
    if settings not in ("", "foreign_keys=on", "foreign_keys=off"):
        raise Misuse(f"…?{settings}: what can be set is foreign_keys, as in sqlite:///shop.db?foreign_keys=on.")
    return SqliteFile(path, foreign_keys=settings == "foreign_keys=on")


if TYPE_CHECKING:
    _store: Database[Any] = STORE
    _file: Database["sqlite3.Connection"] = SqliteFile("")
