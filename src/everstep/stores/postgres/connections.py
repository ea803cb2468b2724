"""Connections to one server: settings, what an error means, and an outage, which is waited out.

A lost connection is not a failure: the server was restarted, or a cable was pulled. Whoever writes waits for as long as
it lasts, and then asks what of its last transaction was done. Whoever reads waits for a moment and is then told.
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
"""How long it is tried to find out why a connection could not be made."""
PAUSE_SECONDS_MIN: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5
REMINDER_SECONDS: Final = 30.0
"""So often an outage that lasts is mentioned in the log."""

VERSION_MIN: Final = 140000

BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE NOT DEFERRABLE"
BEGIN_TO_READ: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY NOT DEFERRABLE"


def as_options(settings: Mapping[str, str]) -> str:
    """Return settings as libpq's `options` have them."""
    return " ".join(f"-c {name}=" + value.replace("\\", "\\\\").replace(" ", "\\ ") for name, value in settings.items())


_PLANS: Final = {"jit": "off", "enable_seqscan": "off", "plan_cache_mode": "force_generic_plan"}
_PLANS_OF_WRITER: Final = {**_PLANS, "enable_mergejoin": "off"}
PLANS: Final = as_options(_PLANS)
"""Everything is found by an index. A plan that was made while a table was small stays right when it has grown, and is
made once: however large a store is, what a worker asks all the time takes the same."""
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
"""What a role or a database may have set otherwise, and must not be otherwise here.

With this `search_path` an operator, a type or a function is the server's own, whatever others have put into schemas
that the role would look into. `row_security` is off so that a policy which hides rows from this role is an error: a row
that is not seen must not be taken for one that is not there. How values are shown (DateStyle, TimeZone, bytea_output …)
is left to the role: no statement of a store depends on it. `session_replication_role` only a superuser may set.
"""
VERSION_17: Final = 170000
SINCE_17: Final = "transaction_timeout"
_since_17: set[str] = set()
"""The servers that know this one as well. Others refuse a session that names it, and none says its version before."""
KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
"""So that a server which is gone is noticed in a quarter of a minute, whatever the network says."""
LOOKS_AT_POOLER: Final = 3
UNSAID_POOLER: Final = "unsupported startup parameter"
"""What PgBouncer says to the settings of a session, unless it was told to pass over them."""

_has_poll: Final = hasattr(select, "poll")
_open_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


class Outage(Exception):
    """The server cannot be reached just now, or the connection was lost."""


class Slow(Outage):
    """The server has not answered for as long as the loop of an application waits. It may answer yet."""


def wait_for_socket(fileno: int, *, reading: bool = True, writing: bool = False) -> tuple[bool, bool]:
    """Wait until a socket can be read or written, and tell which. Raises `Slow` when a loop has waited long enough."""
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
    """A connection of a store, whose answers the loop of an application waits for only briefly."""

    said: dict[str, str] | None = None
    """The settings that each transaction says for itself: behind a pooler a session is anybody's. None if the session
    has them."""
    unanswered: "PQGen[Any] | None" = None
    """What a loop has asked, and did not wait for."""

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
        """Wait for what was asked and not waited for, so that the connection is of use again."""
        gen, self.unanswered = self.unanswered, None
        if gen is not None:
            try:
                super().wait(gen)
            except psycopg.Error:
                pass  # whoever asked it asks again, and is told


class Setback(Outage):
    """The server was reached and did not do what was asked, for a reason that says nothing about the data.

    A cancelled statement, a lack of memory, and all that is not known. It is handled as an outage is: what was written
    is unknown, so it is rolled back, read back and tried again. The session may be of use still: to make a new one for
    each cancelled statement would take longer than to be cancelled again.
    """


def connect(
    address: Address, name: str, *, durability: Durability, writing: bool = False, own_path: bool = True
) -> Connection:
    """Open a connection with the settings of every connection. Raises `Outage`.

    Without `own_path` names are looked for as the role has it: for statements of a user's.
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
    """Return the settings that a transaction says after its BEGIN, which says the rest."""
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
        wishes["target_session_attrs"] = "primary"  # be a session read-only: its transactions say that they write
    parameters = {key: value for key, value in wishes.items() if key not in given}
    return {**parameters, "application_name": name, "client_encoding": "UTF8"}


def _make_sure(connection: Connection, address: Address, settings: dict[str, str]) -> None:
    """Make sure that the settings are in force: a pooler may have dropped what the connection began with.

    Then each transaction says them. A session that a pooler may give to others is never changed.
    """
    both = (list(settings), list(settings.values()))
    try:
        if connection.execute(statements(address.schema)["settings_missing"], both).fetchall():
            connection.said = _of_transaction(settings)
            # A statement would be prepared before its transaction, where the role's timeouts are in force.
            connection.prepare_threshold = None
    except psycopg.Error as error:
        outage = outage_of(error, connection)
        close_quietly(connection)
        raise outage or Outage(_one_line(error)) from error
    except BaseException:
        close_quietly(connection)
        raise


def said_by(connection: Any) -> tuple[list[str], list[str]] | None:
    """Return the names and values that each transaction on a connection says; None if its session has them."""
    said: dict[str, str] | None = getattr(connection, "said", None)
    return None if said is None else (list(said), list(said.values()))


def begin(connection: Connection, how: str = BEGIN) -> None:
    """Begin a transaction that says for itself what it depends on."""
    connection.execute(how)
    if said := said_by(connection):
        connection.execute(statements(DEFAULT_SCHEMA)["say_for_transaction"], said)  # it names no table


@contextlib.contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Within the block there is such a transaction; an error rolls it back."""
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

    A pooler tells its clients process numbers of its own, so most addresses cost one question. Behind one in session
    mode each connection keeps its session; in transaction mode another's transaction takes it away, unless others have
    just come between, so that is tried a few times.
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
    """Return what to say about such a pooler."""
    return (
        f"Between here and {address.shown} is a pooler that gives each transaction another session. "
        "Say so in the URL, and Everstep keeps nothing in a session: …?pooler=on. Nothing was changed."
    )


def _session_of(connection: Connection, address: Address) -> int:
    row = connection.execute(statements(address.schema)["session"], prepare=False).fetchone()
    assert row is not None
    return int(row[0])


def _connected(address: Address, settings: dict[str, Any]) -> Connection:
    """Connect; to a server that turns out to know more rules a second time, with those."""
    if address.pooler:
        return _connect(address, settings)
    newer = {**settings, "options": f"{settings['options']} -c {SINCE_17}=0"}
    if address.server in _since_17:
        try:
            return _connect(address, newer)
        except Outage as outage:
            if SINCE_17 not in str(outage):
                raise
            _since_17.discard(address.server)  # another server is there now, and an older one
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
    raise outage  # not from what has the password in it


def is_away(address: Address) -> bool:
    """Tell whether no server answers, or one that is starting or stopping: not one that refuses just this client.

    libpq decides that by the SQLSTATE of the refusal, which it tells nobody else.
    """
    given = psycopg.conninfo.conninfo_to_dict(address.server)
    wishes: dict[str, Any] = {"connect_timeout": PING_SECONDS, **given}
    asked = psycopg.conninfo.make_conninfo(**wishes)
    return pq.PGconn.ping(asked.encode()) in (pq.Ping.REJECT, pq.Ping.NO_RESPONSE)


def ground(error: Exception, connection: Connection | None, schema: str = "") -> Ground:
    """Return whose fault an error is. `schema` is that of the store: a rule of another table is not about its rows."""
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
    """Return an error as what is waited out, or None if it is somebody's fault."""
    if isinstance(error, Outage):
        return error
    found = ground(error, connection, schema)
    if found == "lost":
        return Outage(_one_line(error))
    return Setback(_one_line(error)) if found == "again" else None


def translated(error: Exception, where: str) -> Exception:
    """Return the error that a user should see instead of one of PostgreSQL, or the error itself if about a value."""
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
            return StoreFull(f"There is no room for {where}. Nothing was written. Free some space; work then goes on.")
        case "forbidden":
            return StoreReadOnly(f"This role may not use {where} ({text}). Grant it what it needs; work then goes on.")
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
    """Return the error that a user should see of a question, in which there is no value to blame."""
    trouble = translated(error, where)
    if isinstance(trouble, psycopg.Error):
        return StoreError(f"{where} refused what was asked of it ({_one_line(error)}).")
    return trouble


def _one_line(error: BaseException) -> str:
    """Return what an error says, without details: those may show what was to be written."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return f"{error.diag.message_primary or type(error).__name__} [{error.sqlstate}]"
    return " ".join(str(error).split()).rstrip(".?") or type(error).__name__


class Patience:
    """Waiting out an outage: short pauses that grow, a word in the log when it begins, now and then, and at its end."""

    begins = "The connection to %s was lost (%s). It is made again; work goes on then."
    lasts = "%s has not been reached for %.0f seconds (%s)."
    ends = "%s is reached again, after %.1f seconds."

    def __init__(self, where: str) -> None:
        self.is_over = False
        """Whether the store was closed: then nobody waits."""
        self.is_slow = False
        """Whether the last answer took longer than a loop waits: then none is waited for on a loop."""
        self.is_watched = False
        """Whether a thread is trying to reach the server all the time, and says when it does."""
        self.ask_watcher: Callable[[], None] = lambda: None
        """Have that thread look at once. Its own session may be sound while those that read were lost."""
        self._where = where
        self._since = 0.0
        self._mentioned = 0.0
        self._pause = PAUSE_SECONDS_MIN

    def seconds(self) -> float:
        """Return for how long the server has not been reached; 0 if it is."""
        return time.monotonic() - self._since if self._since else 0.0

    def wait(self, why: Exception, sleep: Callable[[float], None] = time.sleep) -> None:
        """Note that the server was not reached, and wait a little."""
        self.note(why)
        sleep(self._pause)
        self._pause = min(self._pause * 1.5, PAUSE_SECONDS_MAX)

    def note(self, why: Exception) -> None:
        """Note that the server was not reached."""
        now = time.monotonic()
        if not self._since:
            self._since = self._mentioned = now
            log.warning(self.begins, self._where, why)
        elif now - self._mentioned > REMINDER_SECONDS:
            self._mentioned = now
            log.error(self.lasts, self._where, now - self._since, why)

    def end(self) -> None:
        """The server was reached."""
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
    """A child shares the sockets and would keep the locks of its parent alive: it lets go of them, unheard."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for connection in list(_open_connections):
        try:
            os.dup2(nothing, connection.fileno(), inheritable=False)
        except (psycopg.Error, OSError):
            pass  # it is closed already
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
