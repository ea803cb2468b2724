"""Connections to one server: settings, what an error means, and an outage, which is waited out.

A lost connection is not a failure: the server was restarted, or a cable was pulled. Whoever writes waits for as long as
it lasts, and then asks what of its last transaction was done. Whoever reads waits for a moment and is then told.
"""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal

import psycopg
from psycopg import errors

from everstep.errors import Damaged, Misuse, StoreError, StoreFailed, StoreFull, StoreReadOnly, StoreUnusable
from everstep.model.untrusted import logger
from everstep.stores.postgres.adapters import adapt
from everstep.stores.postgres.addresses import Address
from everstep.stores.sql.sqlstates import Ground, ground_of

log = logger("everstep.store")

Durability = Literal["power", "process"]
Connection = psycopg.Connection[Any]

CONNECT_SECONDS: Final = 10
PAUSE_SECONDS_MIN: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5
REMINDER_SECONDS: Final = 30.0
"""So often an outage that lasts is mentioned in the log."""

VERSION_MIN: Final = 140000

PLANS: Final = "-c jit=off -c enable_seqscan=off -c plan_cache_mode=force_generic_plan"
"""Everything is found by an index. A plan that was made while a table was small stays right when it has grown, and is
made once: however large a store is, what a worker asks all the time takes the same."""
PLANS_OF_WRITER: Final = f"{PLANS} -c enable_mergejoin=off"
RULES: Final = (
    "-c default_transaction_isolation=read\\ committed -c default_transaction_read_only=off "
    "-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0 -c idle_session_timeout=0 "
    "-c array_nulls=on"
)
"""What a role or a database may have set otherwise, and must not be otherwise here.

How values are shown (DateStyle, TimeZone, bytea_output …) and what a literal means are left to the role: no statement
of a store depends on them, and those of atomic steps may. `session_replication_role` only a superuser may set.
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

_open_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()


class Outage(Exception):
    """The server cannot be reached just now, or the connection was lost."""


class Setback(Outage):
    """The server was reached and did not do what was asked, for a reason that says nothing about the data.

    A cancelled statement, a lack of memory, and all that is not known. It is handled as an outage is: what was written
    is unknown, so it is rolled back, read back and tried again. The session may be of use still: to make a new one for
    each cancelled statement would take longer than to be cancelled again.
    """


def connect(address: Address, name: str, *, durability: Durability, writing: bool = False) -> Connection:
    """Open a connection with the settings of every connection. Raises `Outage`."""
    given = psycopg.conninfo.conninfo_to_dict(address.server)
    wishes: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, **KEEPALIVE}
    if writing or "," in str(given.get("host", "")):  # of several hosts one may be a standby that lags behind
        wishes["target_session_attrs"] = "read-write"
    settings = {key: value for key, value in wishes.items() if key not in given}
    settings |= {"application_name": name, "client_encoding": "UTF8"}
    if not address.pooler:
        commit = "on" if durability == "power" else "off"
        plans = PLANS_OF_WRITER if writing else PLANS
        settings["options"] = f"{given.get('options', '')} {plans} {RULES} -c synchronous_commit={commit}".strip()
    connection = _connected(address, settings)
    connection.prepared_max = 400
    if address.pooler:
        connection.prepare_threshold = None
    adapt(connection)
    _open_connections.add(connection)
    return connection


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
        return psycopg.connect(address.server, autocommit=True, cursor_factory=psycopg.RawCursor, **settings)
    except psycopg.OperationalError as error:
        raise Outage(_one_line(error)) from error


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
