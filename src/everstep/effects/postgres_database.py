"""PostgreSQL by psycopg 3: any database by its URL, and the store itself where that is on PostgreSQL.

A `def` body gets a `psycopg.Connection`, an `async def` body a `psycopg.AsyncConnection` on its own loop. What is done
with the two is written once: a method of the one returns a value, and of the other a coroutine.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import psycopg
from psycopg.rows import tuple_row

from everstep.effects.databases import Database, Meaning, now
from everstep.effects.postgres_markers import (
    CANCELLED,
    ENDED,
    LIMITS,
    WENT_ON,
    Place,
    PostgresTransaction,
    meaning,
    own_statement,
    shown_name,
    state_of,
)
from everstep.errors import Misuse
from everstep.stores.postgres.addresses import Address, address_of
from everstep.stores.postgres.connections import CONNECT_SECONDS, KEEPALIVE
from everstep.stores.postgres.store import PostgresStore
from everstep.stores.protocol import Store

CANCEL_SECONDS: Final = 5.0

SETTINGS: Final = "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=3 -c tcp_keepalives_count=3"
"""So that the server ends the transaction of a machine that is gone, and with it the wait of others, within seconds."""
ONLY_READ: Final = "-c default_transaction_read_only=on"
"""The step's own transaction is made to write by its first statement. One that a body begins after that only reads."""


class LentConnection(psycopg.Connection[Any]):
    """What a `def` body gets."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server, and note if it went away."""
        try:
            return super().wait(*args, **kwargs)
        except psycopg.Error as error:
            _note_own(error, is_outage=self.closed)
            raise


class LentAsyncConnection(psycopg.AsyncConnection[Any]):
    """What an `async def` body gets."""

    async def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the server, and note if it went away."""
        try:
            return await super().wait(*args, **kwargs)
        except psycopg.Error as error:
            _note_own(error, is_outage=self.closed)
            raise


def _note_own(error: psycopg.Error, *, is_outage: bool) -> None:
    """Note in an error that it is of our own connection, and whether that was lost. Others are the body's affair."""
    error.is_own = True  # type: ignore[attr-defined]
    error.was_outage = is_outage  # type: ignore[attr-defined]


class PsycopgTransaction(PostgresTransaction):
    """A transaction on a new connection, which nothing else uses."""

    cursors: ClassVar[Any] = {False: psycopg.RawCursor, True: psycopg.AsyncRawCursor}

    def __init__(self, place: Place, connection: Any, *, is_async: bool, durable: bool) -> None:
        super().__init__(place, durable=durable)
        self.connection = connection
        self._is_async = is_async
        self._cancelling: threading.Thread | None = None

    async def ask(self, name: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """Do a statement and return its rows. Nothing that a body sets on the connection changes how it is done."""
        cursor = self.cursors[self._is_async](self.connection, row_factory=tuple_row)
        with own_statement():
            await now(cursor.execute(self._texts[name], parameters, prepare=False))
            return await now(cursor.fetchall()) if cursor.description else ()

    def lend(self) -> Any:
        """Return the connection for the body."""
        return self.connection

    async def take_back(self, *, returned: bool) -> str:
        """Take the connection back."""
        status = self.connection.info.transaction_status
        was_closed = self.connection.closed and not self.connection.broken
        if was_closed or status == psycopg.pq.TransactionStatus.IDLE:
            return ENDED
        if status == psycopg.pq.TransactionStatus.ACTIVE:
            return "a statement of its body still runs: wait for it" if returned else ""
        if returned and status == psycopg.pq.TransactionStatus.INTRANS:
            return ""
        if self.connection.closed:
            return WENT_ON if returned else ""
        return await self.rolled_back() or (WENT_ON if returned else "")

    def is_own(self, error: BaseException) -> bool:
        """Tell whether an error is one of this connection."""
        return getattr(error, "is_own", False)

    def is_lost(self) -> bool:
        """Tell whether the connection turned out to be lost."""
        return bool(self.connection.closed)

    async def commit(self) -> None:
        """Commit. The server answers a COMMIT of what has failed with ROLLBACK, and calls that no error."""
        cursor = self.cursors[self._is_async](self.connection)
        with own_statement():
            await now(cursor.execute("COMMIT", prepare=False))
        if cursor.statusmessage != "COMMIT":
            raise psycopg.errors.InFailedSqlTransaction(f"COMMIT was answered by {cursor.statusmessage}")

    async def close(self) -> None:
        """Close the connection; then the server rolls back."""
        if self._cancelling is not None:
            self._cancelling.join(CANCEL_SECONDS)
        with contextlib.suppress(Exception):  # it is lost already
            await now(self.connection.close())

    def interrupt(self) -> None:
        """Let the server stop the statement. (That of an `async` body is stopped with its task.)"""
        if not self._is_async and self._cancelling is None:
            # On a thread, because it opens a connection, for which the caller need not wait.
            cancelling = threading.Thread(target=self._cancel, name="everstep cancel", daemon=True)
            with contextlib.suppress(RuntimeError, MemoryError):  # without a thread, the statement ends by itself
                cancelling.start()
                self._cancelling = cancelling

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # it is lost, or has ended
            self.connection.cancel_safe(timeout=CANCEL_SECONDS)


# -- databases ---------------------------------------------------------------------------------------------------------
class PostgresDatabase:
    """A PostgreSQL database, by its URL."""

    def __init__(self, url: str, *, is_async: bool = False) -> None:
        _check_readable(url)
        self._url = url
        self._address = address_of(url)
        self.name = name_of(self._address.server, self._address.schema)
        self.is_async = is_async
        self._has_table = False

    def for_async_bodies(self) -> "PostgresDatabase":
        """Return the same database, for an `async def` body."""
        return PostgresDatabase(self._url, is_async=True)

    async def begin(self, store: "Store") -> PsycopgTransaction:
        """Begin a transaction in it."""
        place = Place(self.name, self._address.schema, self._address.owner)
        begun = await begin_on(self._address, place, is_async=self.is_async, makes_table=not self._has_table)
        self._has_table = True
        return begun

    def meaning(self, error: BaseException) -> Meaning:
        """Tell what an error of psycopg means."""
        return meaning(error)

    def __repr__(self) -> str:
        return self.name


async def begin_in_store(store: "PostgresStore", *, is_async: bool) -> PsycopgTransaction:
    """Begin a transaction in the database of a store. The search path is the role's; the markers are the store's."""
    address = store.address
    durable = store.durability == "power"
    place = Place(store.url, address.schema)
    try:
        return await begin_on(address, place, is_async=is_async, durable=durable)
    except psycopg.OperationalError as error:
        _note_own(error, is_outage=not state_of(error))
        raise


def meaning_in_store(error: BaseException) -> Meaning:
    """Tell what an error means in the store's own database: as everywhere, and what befalls the store is waited out.

    That is an outage, and a statement of the body which an operator has cancelled. (One that the body has given a
    `statement_timeout` has failed.) A session that the server has ended because of a limit is no outage.
    """
    state = state_of(error)
    is_cancelled = state == CANCELLED and "user request" in str(error)
    is_outage = getattr(error, "was_outage", False) and state not in LIMITS
    return "again" if is_cancelled or is_outage else meaning(error)


async def begin_on(
    address: Address, place: Place, *, is_async: bool, makes_table: bool = False, durable: bool = True
) -> PsycopgTransaction:
    """Open a connection and begin a transaction."""
    kind: Any = LentAsyncConnection if is_async else LentConnection
    settings = _settings(address)
    if settings is None:
        raise Misuse(f"The URL of {place.name} is not one that libpq understands.")
    connection = await now(kind.connect(address.server, **settings))
    connection.prepare_threshold = None if address.pooler else connection.prepare_threshold
    transaction = PsycopgTransaction(place, connection, is_async=is_async, durable=durable)
    try:
        # As ONLY_READ, also behind a pooler: psycopg says it with each BEGIN.
        await now(connection.set_read_only(True))
        await transaction.begin(makes_table=makes_table)
    except BaseException:
        await transaction.close()
        raise
    return transaction


def _settings(address: Address) -> dict[str, Any] | None:
    """Return what is set for a connection, or None if the URL cannot be read: what libpq says may show a password."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(address.server)
    except psycopg.ProgrammingError:
        return None
    wishes: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": f"everstep {os.getpid()} step",
        **KEEPALIVE,
    }
    if "," in str(given.get("host", "")):
        wishes["target_session_attrs"] = "primary"
    settings = {key: value for key, value in wishes.items() if key not in given}
    if not address.pooler:
        # libpq would refuse a session that only reads by default where the URL asks for one that writes.
        reads = ONLY_READ if given.get("target_session_attrs") != "read-write" else ""
        settings["options"] = f"{given.get('options', '')} {SETTINGS} {reads}".strip()
    return settings


def name_of(url: str, schema: str) -> str:
    """Return which database a URL means: without a user, a password, or settings of the connection."""
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query))
    hosts = parts.netloc.rpartition("@")[2] or asked.get("host", "")
    if "port" in asked and ":" not in hosts:
        hosts = f"{hosts}:{asked['port']}"
    database = unquote(parts.path.removeprefix("/")) or asked.get("dbname", "")
    return shown_name(hosts, database, schema)


def _check_readable(url: str) -> None:
    """Refuse a URL of which libpq might take a part of the password for a host, and show it."""
    user, at, rest = url.partition("?")[0].partition("://")[2].partition("@")
    if at and ("/" in user or "@" in rest):
        raise Misuse("In the URL of a database, @ and / in a user's name or password are written %40 and %2F.")
    for host in (rest if at else user).partition("/")[0].split(","):
        port = host.rpartition("]")[2].partition(":")[2]
        if port and not port.isdecimal():
            raise Misuse("In the URL of a database, a number follows the : of a host. A password needs an @ after it.")


if TYPE_CHECKING:
    _by_url: Database[Any] = PostgresDatabase("")
