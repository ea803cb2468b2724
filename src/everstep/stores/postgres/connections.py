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
    "-c statement_timeout=0 -c lock_timeout=0"
)
"""What a role or a database may have set otherwise, and must not be otherwise here."""
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
    try:
        connection: Connection = psycopg.connect(
            address.server, autocommit=True, cursor_factory=psycopg.RawCursor, **settings
        )
    except psycopg.OperationalError as error:
        raise Outage(_one_line(error)) from error
    connection.prepared_max = 400
    if address.pooler:
        connection.prepare_threshold = None
    adapt(connection)
    _open_connections.add(connection)
    return connection


def is_outage(error: BaseException, connection: Connection | None) -> bool:
    """Tell whether an error means that the connection is lost, or that it leads to a server that does not write."""
    if isinstance(error, Outage):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    lost = (
        errors.AdminShutdown,
        errors.CrashShutdown,
        errors.CannotConnectNow,
        errors.IdleSessionTimeout,
        errors.ConnectionException,
        errors.ReadOnlySqlTransaction,
    )
    return isinstance(error, lost) or connection is None or connection.closed


def translated(error: Exception, where: str) -> Exception:
    """Return the error that a user should see instead of one of PostgreSQL, or the error itself if about a value."""
    text = _one_line(error)
    match error:
        case errors.DiskFull():
            return StoreFull(f"There is no room for {where}. Nothing was written. Free some space; work then goes on.")
        case errors.InsufficientPrivilege():
            return StoreReadOnly(f"This role may not write {where} ({text}). Grant it what it needs.")
        case errors.UndefinedTable() | errors.InvalidSchemaName() | errors.UndefinedColumn():
            return StoreUnusable(f"{where} is not, or no longer, a store of this release ({text}).")
        case errors.DataCorrupted() | errors.IndexCorrupted() | errors.IoError():
            return StoreFailed(f"{where} is damaged ({text}). Restore a backup, or see `everstep repair`.")
        case errors.IntegrityError():
            return Damaged(
                f"{where} has rows that should not be there, so nothing was written ({text}). "
                "`everstep verify --all` finds them."
            )
        case errors.InsufficientResources() | errors.OperatorIntervention() | errors.TransactionRollback():
            return StoreError(f"{where} could not do what was asked of it ({text}). Nothing was written.")
        case Outage():
            return StoreError(f"{where} cannot be reached ({text}). It is tried again.")
        case psycopg.InterfaceError() if "closed" in text:
            return Misuse(f"The store {where} has been closed.")
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".?") or type(error).__name__


class Patience:
    """Waiting out an outage: short pauses that grow, a word in the log when it begins, now and then, and at its end."""

    def __init__(self, where: str) -> None:
        self.is_over = False
        """Whether the store was closed: then nobody waits."""
        self.is_watched = False
        """Whether a thread is trying to reach the server all the time, and says when it does."""
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
            log.warning("The connection to %s was lost (%s). It is made again; work goes on then.", self._where, why)
        elif now - self._mentioned > REMINDER_SECONDS:
            self._mentioned = now
            log.error("%s has not been reached for %.0f seconds (%s).", self._where, now - self._since, why)

    def end(self) -> None:
        """The server was reached."""
        if self._since:
            log.warning("%s is reached again, after %.1f seconds.", self._where, time.monotonic() - self._since)
            self._since = 0.0
        self._pause = PAUSE_SECONDS_MIN


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
