"""PostgreSQL by SQLAlchemy, with whatever driver the engine has. Imported only when a program passes such an object.

What the body gets is what the program uses elsewhere: a connection, or a session of a session maker. Connections come
from the engine's own pool, and go back to it. Those for asyncio cannot: they belong to the loop that made them, and
each attempt has its own, so they are made anew.
"""

import contextlib
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, event, exc, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from everstep.effects.databases import Database, Meaning, now
from everstep.effects.postgres_markers import (
    DEFAULT_SCHEMA,
    ENDED,
    SCHEMA_NAME,
    WENT_ON,
    Place,
    PostgresTransaction,
    meaning,
    own_statement,
    shown_name,
    statements,
)
from everstep.errors import Misuse
from everstep.model.markers import Marker
from everstep.stores.protocol import Store

SCHEMA_OPTION: Final = "everstep_schema"
OWNER_OPTION: Final = "everstep_owner"
CANCEL_SECONDS: Final = 5.0

_END: Final = re.compile(
    r"\s*(commit|end|abort|prepare\s+transaction|rollback(?!(?:\s+work|\s+transaction)?\s+to\b))\b", re.IGNORECASE
)
"""What ends a transaction, at the beginning of a statement. Rolling back to a savepoint does not."""


def database_by_sqlalchemy(given: Any) -> "SqlalchemyDatabase":
    """Return the database that an engine or a session maker means."""
    if isinstance(given, (Engine, AsyncEngine)):
        return SqlalchemyDatabase(given)
    if isinstance(given, (sessionmaker, async_sessionmaker)):
        engine = given.kw.get("bind")
        if isinstance(engine, (Engine, AsyncEngine)):
            return SqlalchemyDatabase(engine, given)
        raise Misuse("A session maker for @transaction is bound to an engine: sessionmaker(engine).")
    raise Misuse(f"{type(given).__name__} is not a database: pass an engine of SQLAlchemy, or a session maker.")


class SqlalchemyDatabase:
    """A PostgreSQL database that an engine of SQLAlchemy leads to."""

    def __init__(self, engine: Engine | AsyncEngine, maker: Any = None) -> None:
        self.is_async = self.needs_async_body = isinstance(engine, AsyncEngine)
        sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if sync_engine.dialect.name == "sqlite":
            raise Misuse("For a SQLite file, name the file itself: @transaction('sqlite:///shop.db').")
        if sync_engine.dialect.name != "postgresql":
            raise Misuse(f"@transaction knows engines for PostgreSQL, and this one is for {sync_engine.dialect.name}.")
        schema = sync_engine.get_execution_options().get(SCHEMA_OPTION, DEFAULT_SCHEMA)
        if not isinstance(schema, str) or not SCHEMA_NAME.fullmatch(schema):
            raise Misuse(
                f"{SCHEMA_OPTION}: small letters, digits and _ make the name of a schema; pg_… is the server's."
            )
        self.name = _name_of(sync_engine, schema)
        self._place = Place(self.name, schema, str(sync_engine.get_execution_options().get(OWNER_OPTION, "")))
        self._engine = _without_pool(engine) if isinstance(engine, AsyncEngine) else engine
        self._maker = maker
        self._has_table = False
        self._has_connected = not self.is_async
        self._first = threading.Lock()

    async def begin(self, store: "Store") -> "SqlalchemyTransaction":
        """Begin a transaction in it."""
        is_first = True
        while True:
            connection = await self._connected()
            transaction = SqlalchemyTransaction(self._place, connection, self._maker, self.is_async)
            try:
                await transaction.begin(makes_table=not self._has_table)
            except BaseException as error:
                was_stale = is_first and isinstance(error, Exception) and transaction.is_lost()
                await transaction.close()
                if not was_stale:
                    raise
                is_first = False  # the pool kept what the server has closed long ago; by now it knows
                continue
            self._has_table = True
            return transaction

    async def _connected(self) -> Any:
        """Connect. The first time one after the other: an engine for asyncio sets itself up with a lock of one loop."""
        if self._has_connected:
            return await now(self._engine.connect())
        with self._first:  # the loop of each attempt is on a thread of its own, and has nothing else to do
            connection = await now(self._engine.connect())
            self._has_connected = True
            return connection

    def meaning(self, error: BaseException) -> Meaning:
        """Tell what an error means. A pool that has no connection to spare is others in the way."""
        return "again" if isinstance(error, exc.TimeoutError) else meaning(error)

    def __repr__(self) -> str:
        return self.name


class SqlalchemyTransaction(PostgresTransaction):
    """A transaction on a connection of an engine."""

    def __init__(self, place: Place, connection: Any, maker: Any, is_async: bool) -> None:
        super().__init__(place)
        self._texts = _texts(place.schema)
        self.has_savepoint = False
        self._connection = connection
        self._is_async = is_async
        self._maker = maker
        self._session: Any = None
        self._cancelling: threading.Thread | None = None
        self._is_lent = False
        self._broke = ""
        """What the body said that it must not, first of all: also a body that swallows the error is refused."""
        self._watch(connection.sync_connection if is_async else connection)

    def _watch(self, connection: Any) -> None:
        """Refuse what would end the transaction, before it is sent.

        The server refuses a COMMIT as well, but asyncpg and psycopg2 do not see that a statement has ended their
        transaction: each one after it would be committed by itself.
        """

        def read(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
            if end := _END.match(statement):
                self._refuse(end[1].upper())

        event.listen(connection, "before_cursor_execute", read)
        event.listen(connection, "commit", lambda _connection: self._refuse("commit()"))
        event.listen(connection, "rollback", lambda _connection: self._refuse("rollback()"))

    def _refuse(self, said: str) -> None:
        if self._is_lent:
            why = f"its body said {said}, but the step itself begins and commits the transaction, with its marker in it"
            self._broke = self._broke or why
            raise Misuse(why)

    async def ask(self, name: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """Do a statement and return its rows. An error is the driver's own: SQLAlchemy's would show the values."""
        values = {f"p{number}": value for number, value in enumerate(parameters, 1)}
        try:
            with own_statement():
                result = await now(self._connection.execute(self._texts[name], values))
                return result.fetchall() if result.returns_rows else ()
        except exc.DBAPIError as error:
            raise (error.orig or error) from None

    def lend(self) -> Any:
        """Return the connection for the body, or a session on it, which works in a savepoint.

        So a session may roll back, as it does by itself after an error, and go on. It may not commit.
        """
        if self._maker is not None:
            self._session = session = self._maker(bind=self._connection, join_transaction_mode="create_savepoint")
            event.listen(session.sync_session if self._is_async else session, "before_commit", self._before_commit)
        self._is_lent = True
        return self._connection if self._session is None else self._session

    def _before_commit(self, session: Any) -> None:
        if session.get_nested_transaction() is None:
            self._refuse("commit()")

    async def take_back(self, *, returned: bool) -> str:
        """Take the connection back. What a session has not sent yet is sent first."""
        try:
            if returned and not self._broke and self._session is not None:
                await now(self._session.flush())
        finally:
            self._is_lent = False
        if not self._broke and self._is_idle():
            self._broke = ENDED
        if not self._broke and returned and (not self._connection.in_transaction() or self.is_lost()):
            self._broke = WENT_ON
        return self._broke

    def _is_idle(self) -> bool:
        """Tell whether there is no transaction any more, as far as the driver knows."""
        try:
            driver = self._driver()
            if hasattr(driver, "is_in_transaction"):  # asyncpg
                return not driver.is_in_transaction() and not driver.is_closed()
            was_closed = driver.closed and not getattr(driver, "broken", True)  # by the body
            return bool(was_closed or driver.info.transaction_status == 0)
        except Exception:  # noqa: BLE001 - it is lost, or the driver does not tell
            return False

    async def write_marker(self, marker: Marker) -> None:
        """Complete the marker. What the body has left otherwise than it was may not go back to the pool."""
        try:
            await super().write_marker(marker)
        except Misuse as broke:
            self._broke = str(broke)
            raise

    def _driver(self) -> Any:
        connection = self._connection.sync_connection if self._is_async else self._connection
        return connection.connection.driver_connection

    def is_own(self, error: BaseException) -> bool:
        """Tell whether an error is one of this connection. Those of others that a body has cannot be told apart."""
        return isinstance(error, (exc.DBAPIError, self._connection.dialect.loaded_dbapi.Error))

    def is_lost(self) -> bool:
        """Tell whether the connection turned out to be lost."""
        return bool(self._connection.invalidated)

    async def commit(self) -> None:
        """Commit."""
        with own_statement():
            await now(self._connection.commit())

    async def close(self) -> None:
        """Roll back what is not committed, and give the connection back to its pool."""
        self._is_lent = False
        if self._cancelling is not None:
            self._cancelling.join(CANCEL_SECONDS)
        with contextlib.suppress(Exception):  # it is lost, and the pool knows
            if self._cancelling is not None or self._broke:
                await now(self._connection.invalidate())  # what was to stop may yet stop what somebody else does on it
        with contextlib.suppress(Exception):
            if self._session is not None:
                await now(self._session.close())
        with contextlib.suppress(Exception):
            await now(self._connection.close())

    def interrupt(self) -> None:
        """Let the server stop the statement, if the driver can. (That of an `async` body is stopped with its task.)"""
        if not self._is_async and self._cancelling is None:
            cancelling = threading.Thread(target=self._cancel, name="everstep cancel", daemon=True)
            with contextlib.suppress(RuntimeError, MemoryError):  # without a thread, the statement ends by itself
                cancelling.start()
                self._cancelling = cancelling

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # it is lost, or has ended, or the driver cannot
            driver = self._driver()
            if hasattr(driver, "cancel_safe"):
                driver.cancel_safe(timeout=CANCEL_SECONDS)
            elif hasattr(driver, "cancel"):
                driver.cancel()


_prepared: dict[str, dict[str, Any]] = {}


def _texts(schema: str) -> dict[str, Any]:
    """Return the statements as SQLAlchemy wants them: with names instead of numbers."""
    if schema not in _prepared:
        known = statements(schema)
        _prepared[schema] = {name: text(sql.replace("$", ":p")) for name, sql in known.items()}
    return _prepared[schema]


def _name_of(engine: Engine, schema: str) -> str:
    url = engine.url
    host = url.host or url.query.get("host", "")
    hosts = host if isinstance(host, str) else ",".join(host)
    return shown_name(f"{hosts}:{url.port}" if url.port else hosts, url.database or "", schema)


def _without_pool(engine: AsyncEngine) -> AsyncEngine:
    """Return an engine that connects in the same way, and keeps no connection."""
    old = engine.sync_engine
    if isinstance(old.pool, NullPool):
        return engine
    pool = NullPool(
        old.pool._creator,  # a pool of another kind with the same connections is made in no other way
        reset_on_return=old.pool._reset_on_return,
        dialect=old.dialect,
        _dispatch=old.pool.dispatch,
    )
    made = Engine(pool, old.dialect, old.url, echo=old.echo, execution_options=old.get_execution_options())
    made.dispatch._update(old.dispatch)
    return AsyncEngine(made)


if TYPE_CHECKING:

    def _fits(engine: Engine) -> Database[Any]:
        return SqlalchemyDatabase(engine)
