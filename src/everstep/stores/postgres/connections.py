"""Connections to one server: settings, the meaning of an error, and outages, which are waited out.

A lost connection is not a failure: the server was restarted, or a cable was pulled. A writer waits as long as the
outage lasts, and then reads back what its last transaction did. A reader waits for a moment and then gets an error.
"""

import contextlib
import math
import os
import select
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

import psycopg
from psycopg import errors, pq
from psycopg.abc import PQGen
from psycopg.waiting import Ready, Wait

from everstep.errors import Damaged, Misuse, StoreError, StoreFailed, StoreFull, StoreReadOnly, StoreUnusable
from everstep.model.untrusted import logger
from everstep.stores.brief import waits_until
from everstep.stores.postgres.adapters import adapt
from everstep.stores.postgres.addresses import DEFAULT_SCHEMA, Address, without_password
from everstep.stores.postgres.queries import statements
from everstep.stores.sql.sqlstates import Ground, ground_of

log = logger("everstep.store")

Durability = Literal["power", "process"]
R = TypeVar("R")

CONNECT_SECONDS: Final = 10
PING_SECONDS: Final = 3
"""How long to look for the reason why a connection could not be made, in seconds."""
PAUSE_SECONDS_MIN: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5
REMINDER_SECONDS: Final = 30.0
"""The interval between log lines during an outage, in seconds."""

VERSION_MIN: Final = 140000

BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE NOT DEFERRABLE"
BEGIN_TO_READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY NOT DEFERRABLE"


def as_options(settings: Mapping[str, str]) -> str:
    """Return settings in the form of libpq's `options`."""
    return " ".join(f"-c {name}=" + value.replace("\\", "\\\\").replace(" ", "\\ ") for name, value in settings.items())


_PLANS: Final = {"jit": "off", "enable_seqscan": "off", "plan_cache_mode": "force_generic_plan"}
_PLANS_OF_WRITER: Final = {**_PLANS, "enable_mergejoin": "off"}
PLANS: Final = as_options(_PLANS)
"""Every query uses an index. A plan that was made while a table was small stays right when it has grown, and is made
once: a worker's frequent queries take the same time however large the store is.
"""
PLANS_OF_WRITER: Final = as_options(_PLANS_OF_WRITER)
RULES: Final = {
    "search_path": "pg_catalog, pg_temp",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "array_nulls": "on",
    "row_security": "off",
}
"""Settings that a role or a database may have changed, and that must not differ here.

With this `search_path` an operator, a type or a function is the server's own, whatever others have put into schemas
that the role would search. `row_security` is off so that a policy which hides rows from this role is an error: a hidden
row must not be taken for a missing one. How values are shown (DateStyle, TimeZone, bytea_output …) is left to the role:
no statement of a store depends on it. Only a superuser may set `session_replication_role`.
"""
VERSION_17: Final = 170000
SINCE_17: Final = "transaction_timeout"
_since_17: set[str] = set()
"""The servers that know this setting as well. Others refuse a session that names it, and none reveals its version
before.
"""
KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""With these a dead connection is noticed within a quarter of a minute, whatever the network does."""
LOOKS_AT_POOLER: Final = 3
UNSAID_POOLER: Final = "unsupported startup parameter"
"""PgBouncer's answer to the settings of a session, unless it is configured to ignore them."""

_has_poll: Final = hasattr(select, "poll")
_open_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


class Outage(Exception):
    """The server cannot be reached now, or the connection was lost."""


class Slow(Outage):
    """The server has not answered within the time that a loop waits. It may still answer."""


def wait_for_socket(fileno: int, *, reading: bool = True, writing: bool = False) -> tuple[bool, bool]:
    """Wait until a socket can be read or written, and return which. Raises `Slow` when a loop has waited long
    enough.
    """
    until = waits_until()
    left = None if until is None else max(0.0, until - time.monotonic())
    if _has_poll:
        poll = select.poll()
        poll.register(fileno, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
        found = poll.poll(None if left is None else math.ceil(left * 1000))
        if found:
            event = found[0][1]
            return bool(event & ~select.POLLOUT), bool(event & select.POLLOUT)
    else:
        readable, writable, _ = select.select([fileno] if reading else [], [fileno] if writing else [], [], left)
        if readable or writable:
            return bool(readable), bool(writable)
    raise Slow("it has not answered yet")


class Connection(psycopg.Connection[Any]):
    """A connection of a store. On the thread of an application's loop it waits only briefly for an answer."""

    said: dict[str, str] | None = None
    """The settings that each transaction sets itself, because behind a pooler other clients use the same session. None
    if the session has them.
    """
    unanswered: "PQGen[Any] | None" = None
    """A query of a loop that was left before its answer came."""

    def wait(self, gen: "PQGen[R]", *args: Any, **named: Any) -> R:
        """Wait for an answer; on a thread that waits only briefly, raise `Slow` in time."""
        if waits_until() is None:
            return super().wait(gen, *args, **named)
        try:
            wanted = next(gen)
            while True:
                can_read, can_write = wait_for_socket(
                    self.pgconn.socket, reading=bool(wanted & Wait.R), writing=bool(wanted & Wait.W)
                )
                wanted = gen.send(Ready((Ready.R if can_read else 0) | (Ready.W if can_write else 0)))
        except StopIteration as done:
            answer: R = done.value
            return answer
        except Slow:
            self.unanswered = gen
            raise

    def take_answer(self) -> None:
        """Wait for the answer to a query that was left, so that the connection can be used again."""
        gen, self.unanswered = self.unanswered, None
        if gen is not None:
            try:
                super().wait(gen)
            except psycopg.Error:
                pass  # the caller asks again, and gets the error then


class Setback(Outage):
    """The server was reached and did not do what was asked, for a reason that says nothing about the data.

    A cancelled statement, a lack of memory, or an unknown error. It is handled as an outage: the result of the write is
    unknown, so it is rolled back, read back and tried again. The session may still be usable: a new one for each
    cancelled statement would take longer than the next cancellation.
    """


def connect(
    address: Address, name: str, *, durability: Durability, writing: bool = False, own_path: bool = True
) -> Connection:
    """Open a connection with the common settings. Raises `Outage`.

    Without `own_path` the role's own `search_path` applies: for statements of a user's.
    """
    settings = {**RULES, **(_PLANS_OF_WRITER if writing else _PLANS)}
    settings["synchronous_commit"] = "on" if durability == "power" else "off"
    if not own_path:
        del settings["search_path"]
    given = _understood(address)
    parameters = _parameters(given, name, writing)
    if not address.pooler:
        parameters["options"] = f"{given.get('options', '')} {as_options(settings)}".strip()
    connection = _connected(address, parameters)
    adapt(connection)
    connection.prepared_max = 400
    settings |= {"client_encoding": "UTF8", SINCE_17: "0"}
    if address.pooler:
        connection.prepare_threshold = None
        connection.said = _of_transaction(settings)
    else:
        _make_sure(connection, address, settings)
    _open_connections.add(connection)
    return connection


def _of_transaction(settings: dict[str, str]) -> dict[str, str]:
    """Return the settings that a transaction sets after its BEGIN, which sets the rest."""
    return {name: value for name, value in settings.items() if not name.startswith("default_")}


def _understood(address: Address) -> Mapping[str, Any]:
    """Return what libpq reads in a URL."""
    try:
        return psycopg.conninfo.conninfo_to_dict(address.server)
    except psycopg.ProgrammingError as error:
        why = without_password(_one_line(error), address.server)
    raise StoreUnusable(
        f"{address.shown} is not the URL of a database: {why}. In a password, write a space as %20, % as %25, @ as %40."
    )


def _parameters(given: Mapping[str, Any], name: str, writing: bool) -> dict[str, Any]:
    wishes: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **KEEPALIVE}
    if writing or "," in str(given.get("host", "")):  # of several hosts one may be a standby that lags behind
        wishes["target_session_attrs"] = "primary"  # a session may be read-only: its transactions say that they write
    parameters = {key: value for key, value in wishes.items() if key not in given}
    return {**parameters, "application_name": name, "client_encoding": "UTF8"}


def _make_sure(connection: Connection, address: Address, settings: dict[str, str]) -> None:
    """Make sure that the settings are in force: a pooler may have dropped those of the session.

    Then each transaction sets them. A session that a pooler may give to other clients is never changed.
    """
    both = (list(settings), list(settings.values()))
    try:
        if connection.execute(statements(address.schema)["settings_missing"], both).fetchall():
            connection.said = _of_transaction(settings)
            # A prepared statement would be prepared before its transaction, where the role's timeouts are in force.
            connection.prepare_threshold = None
    except psycopg.Error as error:
        outage = outage_of(error, connection)
        close_quietly(connection)
        raise outage or Outage(_one_line(error)) from error
    except BaseException:
        close_quietly(connection)
        raise


def said_by(connection: Any) -> tuple[list[str], list[str]] | None:
    """Return the names and values that each transaction on a connection sets; None if its session has them."""
    said: dict[str, str] | None = getattr(connection, "said", None)
    return None if said is None else (list(said), list(said.values()))


def begin(connection: Connection, how: str = BEGIN) -> None:
    """Begin a transaction that sets for itself what it depends on."""
    connection.execute(how)
    if said := said_by(connection):
        connection.execute(statements(DEFAULT_SCHEMA)["say_for_transaction"], said)  # it names no table


@contextlib.contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Run the block in such a transaction; an error rolls it back."""
    begin(connection)
    try:
        yield
    except BaseException:
        if not connection.closed:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextlib.contextmanager
def pipelined(connection: Connection) -> Iterator[None]:
    """What is executed in the block is sent in one go.

    psycopg ends a pipeline after an error as well, and logs a warning if that fails: for a lost connection, the same
    error once more on stderr. So it is ended here without knowing of the error, and that is raised.
    """
    block = contextlib.ExitStack()
    block.enter_context(connection.pipeline())
    try:
        yield
    except BaseException:
        with contextlib.suppress(psycopg.Error, Outage):
            block.close()
        raise
    block.close()


def refuse_unsaid_pooler(connection: Connection, address: Address) -> None:
    """Raise `StoreUnusable` if transactions go to changing sessions and the URL does not say so.

    A pooler reports process numbers of its own to its clients, so most addresses cost one query. Behind one in session
    mode each connection keeps its session; in transaction mode another client's transaction takes it away, unless
    others have just come between, so that is tried a few times.
    """
    if address.pooler or (before := _session_of(connection, address)) == connection.info.backend_pid:
        return
    for _ in range(LOOKS_AT_POOLER):
        with (
            _connect(address, _parameters(_understood(address), "everstep looks", False)) as other,
            other.transaction(),
        ):
            _session_of(other, address)
            if _session_of(connection, address) != before:
                raise StoreUnusable(unsaid_pooler(address))


def unsaid_pooler(address: Address) -> str:
    """Return the message about such a pooler."""
    return (
        f"Between here and {address.shown} is a pooler that gives each transaction another session. "
        "Say so in the URL, and Everstep keeps nothing in a session: …?pooler=on. Nothing was changed."
    )


def _session_of(connection: Connection, address: Address) -> int:
    row = connection.execute(statements(address.schema)["session"], prepare=False).fetchone()
    assert row is not None
    return int(row[0])


def _connected(address: Address, settings: dict[str, Any]) -> Connection:
    """Connect. To a server that turns out to know more rules, connect a second time with those."""
    if address.pooler:
        return _connect(address, settings)
    newer = {**settings, "options": f"{settings['options']} -c {SINCE_17}=0"}
    if address.server in _since_17:
        try:
            return _connect(address, newer)
        except Outage as outage:
            if SINCE_17 not in str(outage):
                raise
            _since_17.discard(address.server)  # another, older server is at this address now
    connection = _connect(address, settings)
    if connection.info.server_version < VERSION_17:
        return connection
    connection.close()
    connection = _connect(address, newer)
    _since_17.add(address.server)
    return connection


def _connect(address: Address, settings: dict[str, Any]) -> Connection:
    try:
        return Connection.connect(address.server, autocommit=True, cursor_factory=psycopg.RawCursor, **settings)
    except psycopg.OperationalError as error:
        outage = Outage(without_password(_one_line(error), address.server))
        if str(outage) == _one_line(error):
            raise outage from error
    raise outage  # without the cause, which contains the password


def is_away(address: Address) -> bool:
    """Return True if no server answers, or one that is starting or stopping: not one that refuses only this client.

    libpq decides that by the SQLSTATE of the refusal, which it does not pass on.
    """
    given = psycopg.conninfo.conninfo_to_dict(address.server)
    wishes: dict[str, Any] = {"connect_timeout": PING_SECONDS, **given}
    asked = psycopg.conninfo.make_conninfo(**wishes)
    return pq.PGconn.ping(asked.encode()) in (pq.Ping.REJECT, pq.Ping.NO_RESPONSE)


def ground(error: Exception, connection: Connection | None, schema: str = "") -> Ground:
    """Return the cause of an error. `schema` is that of the store: a rule of another table is not about its rows."""
    if isinstance(error, Setback):
        return "again"
    if isinstance(error, Outage) or connection is None or connection.closed:
        return "lost"
    if isinstance(error, (MemoryError, OSError)):
        return "again"  # of this process: it says nothing about what was to be written
    if not isinstance(error, psycopg.Error):
        return "value"  # it cannot be sent
    if error.sqlstate is None:  # libpq or psycopg says so, and not the server
        return "lost" if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) else "value"
    if isinstance(error, errors.IntegrityError) and (error.diag.schema_name or schema) != schema:
        return "again"
    return ground_of(error.sqlstate)


def outage_of(error: Exception, connection: Connection | None, schema: str = "") -> Outage | None:
    """Return an error as an outage to wait out, or None if it is the fault of the data, the role or the schema."""
    if isinstance(error, Outage):
        return error
    found = ground(error, connection, schema)
    if found == "lost":
        return Outage(_one_line(error))
    return Setback(_one_line(error)) if found == "again" else None


def translated(error: Exception, where: str) -> Exception:
    """Return the error that users see instead of PostgreSQL's, or the error itself if it is about a value."""
    text = _one_line(error)
    match error:
        case Setback():
            return StoreError(f"{where} did not do what was asked of it ({text}). It is tried again.")
        case Outage():
            return StoreError(f"{where} cannot be reached ({text}). It is tried again.")
        case psycopg.InterfaceError() if "closed" in text:
            return Misuse(f"The store {where} has been closed.")
        case psycopg.Error():
            return _meaning(error, text, where)
    return error


def _meaning(error: psycopg.Error, text: str, where: str) -> Exception:
    match ground_of(error.sqlstate) if error.sqlstate is not None else "value":
        case "full":
            return StoreFull(
                f"There is no room for {where}. Nothing was written. Free some space; work then continues."
            )
        case "forbidden":
            return StoreReadOnly(
                f"This role may not use {where} ({text}). Grant it what it needs; work then continues."
            )
        case "unusable":
            return StoreUnusable(
                f"{where} is not, or no longer, a store of this release ({text}). Nothing was written. "
                "`everstep doctor` compares its tables with those of this release."
            )
        case "damaged":
            return StoreFailed(f"{where} is damaged ({text}). Restore a backup, or see `everstep repair`.")
        case "value" if isinstance(error, errors.IntegrityError):
            return Damaged(
                f"{where} has rows that should not be there, so nothing was written ({text}). "
                "`everstep verify --all` finds them."
            )
        case "value":
            return error
    return StoreError(f"{where} did not do what was asked of it ({text}). Nothing was written.")


def refused(error: Exception, where: str) -> Exception:
    """Return the error that users see for a query, which has no value to blame."""
    trouble = translated(error, where)
    if isinstance(trouble, psycopg.Error):
        return StoreError(f"{where} refused what was asked of it ({_one_line(error)}).")
    return trouble


def _one_line(error: BaseException) -> str:
    """Return an error's text without its details, which may show stored values."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return f"{error.diag.message_primary or type(error).__name__} [{error.sqlstate}]"
    return " ".join(str(error).split()).rstrip(".?") or type(error).__name__


class Patience:
    """Waits out an outage: short pauses that grow, and log lines at its beginning, now and then, and at its end."""

    begins = "The connection to %s was lost (%s). It is made again; work continues then."
    lasts = "%s has not been reached for %.0f seconds (%s)."
    ends = "%s is reached again, after %.1f seconds."

    def __init__(self, where: str) -> None:
        self.is_over = False
        """Whether the store was closed: then no thread waits."""
        self.is_slow = False
        """Whether the last answer took longer than a loop waits: then a loop does not wait at all."""
        self.is_watched = False
        """Whether a thread is trying to reach the server all the time, and reports when it succeeds."""
        self.ask_watcher: Callable[[], None] = lambda: None
        """Make that thread check at once. Its own session may be fine although those that read were lost."""
        self._where = where
        self._since = 0.0
        self._mentioned = 0.0
        self._pause = PAUSE_SECONDS_MIN

    def seconds(self) -> float:
        """Return the seconds since the server was last reached; 0 if it is reachable."""
        return time.monotonic() - self._since if self._since else 0.0

    def wait(self, why: Exception, sleep: Callable[[float], None] = time.sleep) -> None:
        """Record that the server was not reached, and wait a little."""
        self.note(why)
        sleep(self._pause)
        self._pause = min(self._pause * 1.5, PAUSE_SECONDS_MAX)

    def note(self, why: Exception) -> None:
        """Record that the server was not reached."""
        now = time.monotonic()
        if not self._since:
            self._since = self._mentioned = now
            log.warning(self.begins, self._where, why)
        elif now - self._mentioned > REMINDER_SECONDS:
            self._mentioned = now
            log.error(self.lasts, self._where, now - self._since, why)

    def end(self) -> None:
        """Record that the server was reached."""
        if self._since:
            log.warning(self.ends, self._where, time.monotonic() - self._since)
            self._since = 0.0
        self._pause = PAUSE_SECONDS_MIN


class PatienceWithSetbacks(Patience):
    """The same for a server that answers, and does not do what is asked."""

    begins = "%s did not do what was asked (%s). What it did is read back, and the rest is tried again."
    lasts = "%s has not done what is asked for %.0f seconds (%s). Runs wait; look at the server."
    ends = "%s does what is asked again, after %.1f seconds."


def close_quietly(connection: Connection | None) -> None:
    """Close a connection, whatever state it is in."""
    if connection is not None:
        try:
            connection.close()
        except psycopg.Error:
            pass  # it is lost anyway


def _after_fork_in_child() -> None:
    """In a forked child: release the sockets, which it shares with its parent and would keep the parent's
    locks alive.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for connection in list(_open_connections):
        try:
            os.dup2(nothing, connection.fileno(), inheritable=False)
        except (psycopg.Error, OSError):
            pass  # it is closed already
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
