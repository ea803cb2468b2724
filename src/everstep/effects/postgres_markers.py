"""A transaction in PostgreSQL that a step's body and its marker share, whatever the driver.

    begin  →  take the turn: a row under the key, with a guard that lets no COMMIT pass
           →  the body
           →  complete the row: now it is the marker, and without a guard  →  COMMIT

Another attempt at the same time waits for the row: for as long as the transaction may still be committed, even by a
session whose client is gone. So a COMMIT whose answer was lost is decided when another attempt gets the turn.
"""

import abc
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from everstep.effects.databases import Meaning
from everstep.errors import Misuse
from everstep.model.markers import Marker
from everstep.stores.sql.nul import escaped, unescaped
from everstep.stores.sql.sqlstates import passes

DEFAULT_SCHEMA: Final = "everstep"
WAIT: Final = "2s"
"""How long the server waits for others at a time. Then the attempt checks whether it is still wanted."""

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_SCHEMA: Final = re.compile(r"\beverstep(?=\.)|(?<=CREATE SCHEMA )everstep\b")
SCHEMA_NAME: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")

GUARD: Final = "everstep_only_the_step_commits"
WENT_ON: Final = "an error rolled its transaction back, and its body went on: let that error pass"
ENDED: Final = (
    "its body ended the transaction, but the step itself begins and commits it, with its marker in it (nothing undoes "
    "what a body commits in a transaction of its own)"
)
COMMITTED: Final = (
    "its body said COMMIT, or SET CONSTRAINTS ALL IMMEDIATE, but the step itself begins and commits the transaction, "
    "with its marker in it"
)
WROTE: Final = "its body wrote to everstep_markers, which belongs to Everstep"

SERIALIZATION, DEADLOCK, LOCKED = "40001", "40P01", "55P03"
MADE_AT_ONCE: Final = frozenset({"23505", "42P06", "42P07"})
FORBIDDEN, ABORTED, ONLY_READS, IN_USE, CANCELLED = "42501", "25P02", "25006", "55006", "57014"
NO_SAVEPOINT, NO_TRANSACTION = "3B001", "25P01"
LIMITS: Final = {
    "25P03": "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
    CANCELLED: "statement_timeout",
}
"""The settings of a role by which the server ends a session in the middle of a transaction, or cancels a statement."""


@cache
def statements(schema: str) -> dict[str, str]:
    """Return all statements by their names, for a schema."""
    with open(os.path.join(os.path.dirname(__file__), "markers.sql"), encoding="utf-8") as stream:
        parts = _NAME.split(_SCHEMA.sub(f'"{schema}"', stream.read()))[1:]
    return {name: _without_comments(part) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def _without_comments(part: str) -> str:
    return "\n".join(line for line in part.splitlines() if line.strip() and not line.startswith("--")).removesuffix(";")


def script(schema: str) -> str:
    """Return what makes the table of markers, for a person with the right to do it."""
    known = statements(schema)
    names = ("create_schema", "create_markers", "index_runs", "index_guards")
    return "\n".join(f"{known[name]};" for name in names if (schema, name) != ("public", "create_schema"))


class Place(NamedTuple):
    """Where markers are: which database, as people and the history call it, and the schema."""

    name: str
    schema: str
    owner: str = ""
    """The role that the table belongs to, if it is one that could not be trusted otherwise."""


def shown_name(hosts: str, database: str, schema: str) -> str:
    """Return the name of a database. One and the same has one name, by whatever driver and as whatever role."""
    more = f"?schema={schema}" if schema != DEFAULT_SCHEMA else ""
    if hosts.startswith("/"):  # the folder of a socket
        return f"postgresql:///{database}?host={hosts}{more.replace('?', '&')}"
    return f"postgresql://{hosts}/{database}{more}"


def state_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error of any driver, or an empty text."""
    for one in (error, getattr(error, "orig", None)):
        for attribute in ("sqlstate", "pgcode"):
            if found := getattr(one, attribute, None):
                return str(found)
        match getattr(one, "args", ()):
            case ({"C": str(found)}, *_):  # pg8000 has all that the server said
                return found
    return ""


def meaning(error: BaseException) -> Meaning:
    """Tell what an error of PostgreSQL means. After any of them the marker tells what is committed and durable."""
    return "again" if state_of(error) in (SERIALIZATION, DEADLOCK, LOCKED) else "failed"


class _InTheWay(Exception):
    """Another session has just made the table, or has the turn for longer than the role lets a statement wait."""

    sqlstate = SERIALIZATION


@contextlib.contextmanager
def own_statement() -> Iterator[None]:
    """Around a statement that is not the body's: if it is cancelled, that says nothing about the step.

    Everything is rolled back and done again. If it was the COMMIT, the marker tells first whether that has happened.
    """
    try:
        yield
    except Exception as error:
        if passes(state_of(error)):
            raise _InTheWay from error
        raise


class PostgresTransaction(abc.ABC):
    """An open transaction. Its methods are coroutines; with a driver that blocks they wait for nothing."""

    has_savepoint = True
    """Whether it begins with a savepoint. Not by SQLAlchemy: some of its drivers send one statement at a time."""

    def __init__(self, place: Place, *, durable: bool = True) -> None:
        self._place = place
        self._durable = durable
        self._texts = statements(place.schema)
        self._patience = "0"
        self._limits: dict[str, str] = {}
        """What may end the session or cancel a statement, and after how long."""
        self._written = 0
        """How many rows of the markers the session had written when the body began."""
        self.server = ""
        """Which server process it is with: another one has been started since."""

    async def begin(self, *, makes_table: bool) -> None:
        """Begin the transaction. With `makes_table`, make the table of markers if it does not exist."""
        await self._may_write()
        if makes_table:
            await self._make_table()
        ((self._patience, *limits, triggers, self.server, _),) = await self.ask("wait_at_most", WAIT)
        self._limits = {
            name: limit for name, limit in zip(LIMITS.values(), limits, strict=True) if limit not in ("0", None)
        }
        if triggers == "replica":
            raise Misuse(
                f"The role of {self._place.name} has session_replication_role=replica. Then the server does not check "
                "the rule that keeps a body from committing by itself. Atomic steps need another role."
            )

    async def _may_write(self) -> None:
        try:
            await self.ask("may_write_from_here" if self.has_savepoint else "may_write")
        except Exception as error:
            if state_of(error) == NO_TRANSACTION:
                raise self._commits_each() from error
            raise

    def _commits_each(self) -> Misuse:
        return Misuse(f"A connection to {self._place.name} commits each statement by itself.")

    async def _make_table(self) -> None:
        """Make the table of markers, if it is not there, in a transaction of its own."""
        schema = self._place.schema
        strangers = [owner for (owner,) in await self.ask("owned_by_strangers", schema) if owner != self._place.owner]
        if strangers:
            raise Misuse(
                f"The schema {schema} or the table of markers of {self._place.name} is of the role {strangers[0]}, "
                "and not to this role, one that it is a member of, or the owner of the database. Who owns a table can "
                "have anything done in the name of those who write to it. If it is meant to be theirs, say so: "
                f"…?owner={strangers[0]} in a URL, everstep_owner among the execution options of an engine."
            )
        if await self.ask("has_markers", schema):
            return
        try:
            await self.ask("lock_schema", schema)
            if not await self.ask("has_markers", schema):
                if not await self.ask("has_schema", schema):
                    await self.ask("create_schema")
                for name in ("create_markers", "index_runs", "index_guards"):
                    await self.ask(name)
            await self.commit()
            await self._may_write()
        except Exception as error:
            if state_of(error) in MADE_AT_ONCE:
                raise _InTheWay from error
            if state_of(error) != FORBIDDEN:
                raise
            raise Misuse(
                f"This role may not make the table of markers in {self._place.name} ({_said(error)}). Let one that may "
                f"do this, and grant this role USAGE on the schema and SELECT, INSERT, UPDATE, DELETE on the table:\n"
                f"{script(schema)}"
            ) from error

    # -- the marker -----------------------------------------------------------------------------------------------
    async def read_marker(self, key: str) -> Marker | None:
        """Wait for one's turn, and return the marker under a key."""
        try:
            rows = await self.ask("take_turn", key, self._patience)
            if not rows:
                rows = await self.ask("read_marker", key)
        except Exception as error:
            if state_of(error) == FORBIDDEN:
                raise Misuse(
                    f"This role may not use the table of markers in {self._place.name} ({_said(error)}). Grant it "
                    f"USAGE on the schema {self._place.schema}, and SELECT, INSERT, UPDATE, DELETE on its table."
                ) from error
            if GUARD in str(error):
                raise self._commits_each() from error
            raise
        ((_, run, step, attempt, outcome, at, self._written, _),) = rows
        if not attempt:
            return None
        return Marker(key, unescaped(run), unescaped(step), attempt, None if outcome is None else bytes(outcome), at)

    async def write_marker(self, marker: Marker) -> None:
        """Complete the row that `read_marker` has left. Raises `Misuse` if the body has ended the transaction."""
        key, run, step, attempt, outcome, at = marker
        try:
            durable = "durable" if self._durable else ""
            rows = await self.ask("write_marker", key, escaped(run), escaped(step), attempt, outcome, at, durable)
        except Exception as error:
            if why := {ABORTED: WENT_ON, ONLY_READS: ENDED}.get(state_of(error)):
                raise Misuse(why) from error
            raise
        if not rows:
            raise Misuse(f"{ENDED}, or {WROTE}")
        if rows[0][1] > self._written + 1:
            raise Misuse(WROTE)

    def forbidden_by(self, error: BaseException) -> str:
        """Return what to say of an error by which the server kept a body from what is the step's own affair."""
        if not self.is_own(error):
            return ""
        if GUARD in str(error):
            return COMMITTED
        is_ours = state_of(error) == IN_USE and "everstep_markers" in str(error)
        return WROTE if is_ours else ENDED if state_of(error) == ONLY_READS else ""

    async def rolled_back(self) -> str:
        """Roll back after an error. Returns what to say if the transaction is not the step's own, or an empty text.

        Nobody can tell if the connection is lost, or if a statement still runs.
        """
        try:
            await self.ask("roll_back_to_here")
        except Exception as error:  # noqa: BLE001 - the body's error counts, whatever this one is
            return ENDED if state_of(error) in (NO_SAVEPOINT, NO_TRANSACTION) else ""
        return ""

    # -- what cut it off --------------------------------------------------------------------------------------------
    def limit_passed(self, error: BaseException) -> str:
        """Return what to say of an error by which the server kept a limit of the role, or an empty text."""
        error = _said_by_server(error)
        state = state_of(error)
        name = LIMITS.get(state, "")
        if not name or not self.is_own(error):
            return ""
        if state == CANCELLED and (name not in self._limits or "user request" in str(error)):
            return ""
        return f"because {name} of its role ({self._limits.get(name, 'said by the body')}) is too short for it"

    def why_lost(self, error: BaseException) -> str:
        """Return what is known of how the connection was lost, or an empty text if it was not."""
        if passed := self.limit_passed(error):
            return passed
        if not self.is_own(_said_by_server(error)) or not self.is_lost():
            return ""
        limits = [f"{name} of its role is {limit}" for name, limit in self._limits.items() if name != LIMITS[CANCELLED]]
        return " and ".join(limits) or "for a reason that is not known"

    # -- housekeeping -----------------------------------------------------------------------------------------------
    async def marked_runs(self, before: int) -> list[str]:
        """Return the runs all of whose markers are from before a time."""
        return [unescaped(run) for (run,) in await self.ask("marked_runs", before)]

    async def forget_markers(self, run: str, before: int) -> int:
        """Delete the markers of a run from before a time, and return how many there were."""
        return len(await self.ask("forget_markers", escaped(run), before))

    # -- what a driver does ---------------------------------------------------------------------------------------
    @abc.abstractmethod
    async def ask(self, name: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """Do a statement, as an `own_statement`, and return its rows."""

    @abc.abstractmethod
    def lend(self) -> Any:
        """Return the connection for the body."""

    @abc.abstractmethod
    async def take_back(self, *, returned: bool) -> str:
        """Take the connection back. Returns what the body did to the transaction that it must not, or an empty text."""

    @abc.abstractmethod
    def is_own(self, error: BaseException) -> bool:
        """Tell whether an error is one of this connection, as far as that can be known."""

    @abc.abstractmethod
    def is_lost(self) -> bool:
        """Tell whether the connection turned out to be lost."""

    @abc.abstractmethod
    async def commit(self) -> None:
        """Make everything durable, by an `own_statement`. An error does not say whether that has happened."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the connection; what is not committed is rolled back. Never raises."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Stop the statement that runs, if one does. May be called from any thread."""


def _said_by_server(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, _InTheWay) and error.__cause__ is not None else error


def _said(error: BaseException) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split()).rstrip(".")
