"""Reading: over a few connections of their own, so that several threads may read at once."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import psycopg

from everstep.errors import Damaged
from everstep.model.events import EventRow
from everstep.stores.moving import RunDump
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import (
    PAUSE_SECONDS_MIN,
    Durability,
    Outage,
    Patience,
    Setback,
    close_quietly,
    connect,
    outage_of,
    refused,
    translated,
)
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.protocol import LAST, RunRow
from everstep.stores.sql.moving import Moving
from everstep.stores.sql.reading import Reading
from everstep.stores.sql.rows import Row, run_row

CONNECTIONS_MAX: Final = 4
PATIENT_SECONDS: Final = 1.0
"""So long a reader waits out an outage. It may be the application's own loop that waits."""

FOR_PEOPLE: Final = frozenset({"runs", "runs_of_status", "runs_tagged", "effects"})
"""Lists with any mixture of conditions."""

R = TypeVar("R")


class Reader(Reading):
    """The connections of a store that only read."""

    def __init__(self, address: Address, *, name: str, durability: Durability, patience: Patience) -> None:
        self.where = address.shown
        self._address = address
        self._name = name
        self._durability: Durability = durability
        self._patience = patience
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._idle: list[PostgresStatements] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed when they are given back."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            close_quietly(one.connection)

    # -- asking -----------------------------------------------------------------------------------------------------
    def ask(self, question: Callable[[PostgresStatements], R]) -> R:
        """Ask something on one of the connections. A connection that is lost is made again, for a moment."""
        until, pause = 0.0, PAUSE_SECONDS_MIN / 4
        with self._room:
            while True:
                try:
                    return self._ask_once(question)
                except Setback as setback:
                    until = until or time.monotonic() + PATIENT_SECONDS
                    if self._patience.is_over or time.monotonic() > until:
                        raise translated(setback, self.where) from setback
                    time.sleep(pause)
                    pause *= 2
                except Outage as outage:
                    if self._patience.is_over or self._patience.seconds() > PATIENT_SECONDS:
                        raise translated(outage, self.where) from outage
                    self._patience.wait(outage)

    def _ask_once(self, question: Callable[[PostgresStatements], R]) -> R:
        statements = self._take()
        try:
            answer = question(statements)
        except psycopg.Error as error:
            outage = outage_of(error, statements.connection)
            if isinstance(outage, Setback):
                self._give_back_idle(statements)
            else:
                close_quietly(statements.connection)  # it may be in the middle of a transaction
            if outage is not None and not isinstance(outage, Setback):
                self.close()  # the others are lost as well
            raise outage or refused(error, self.where) from error
        except BaseException:
            close_quietly(statements.connection)
            raise
        self._give_back(statements)
        return answer

    def _take(self) -> PostgresStatements:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._patience.is_over:
            raise translated(psycopg.InterfaceError("closed"), self.where)
        if self._patience.is_watched and self._patience.seconds() > PATIENT_SECONDS:
            self._patience.ask_watcher()
            raise Outage("it is being tried again")  # another thread does; a try may take long where no server answers
        connection = connect(self._address, self._name, durability=self._durability)
        self._patience.end()
        return PostgresStatements(self._address.schema, connection)

    def _give_back_idle(self, statements: PostgresStatements) -> None:
        """Give a connection back after a cancelled statement, without the transaction that this was in."""
        try:
            statements.connection.execute("ROLLBACK")
        except psycopg.Error:
            close_quietly(statements.connection)
        else:
            self._give_back(statements)

    def _give_back(self, statements: PostgresStatements) -> None:
        if self._patience.is_over:
            close_quietly(statements.connection)
            return
        with self._lock:
            self._idle.append(statements)

    def _all(self, name: str, *parameters: Any) -> list[Row]:
        if name in FOR_PEOPLE:
            return self.ask(lambda statements: statements.all_with_plan_of_its_own(name, *parameters))
        return self.ask(lambda statements: statements.all(name, *parameters))

    def _list(self, name: str, *parameters: Any) -> list[Any]:
        return [value for (value,) in self._all(name, *parameters)]

    def _texts(self, values: Sequence[str]) -> list[str]:
        return list(values)

    def _tags(self, tags: dict[str, str]) -> list[str]:
        return [part for tag in tags.items() for part in tag]

    # -- what is done otherwise here --------------------------------------------------------------------------------
    def events(self, run: str, generation: int, first: int = 1, last: int = LAST) -> list[EventRow]:
        """Return a history or a part of it, as it is stored: whoever reads it verifies it."""
        new_tuple = tuple.__new__  # what EventRow(…) comes down to, in a third of the time
        return [new_tuple(EventRow, row) for row in self._all("events", run, generation, first, last)]

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the runs with these ids that there are, in any order, by one question."""
        return list(map(run_row, self._all("rows_of_runs", list(ids)))) if ids else []

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, read in one transaction."""

        def whole(statements: PostgresStatements) -> RunDump | None:
            statements.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                return Moving(statements).dump(run)
            finally:
                if not statements.connection.closed:
                    statements.connection.execute("ROLLBACK")

        try:
            return self.ask(whole)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{self.where} has a row of run {run} that is damaged.") from error

    def due(
        self,
        *,
        at: int,
        workflows: Sequence[str],
        worker: str,
        everyone: bool,
        limit: int,
        queues: Sequence[str] | None = None,
    ) -> list[str]:
        """Return ids of runs that want a driver now: by priority, then age.

        When there are more than `limit`, the longest overdue timers and the oldest deliveries are considered first.
        """
        found = self._all("due", worker, at, list(workflows), limit, everyone, None if queues is None else list(queues))
        timers = sorted((row for row in found if row[0]), key=lambda row: (row[1], row[4]))[:limit]
        chosen = [row for row in found if not row[0]] + timers
        chosen.sort(key=lambda row: (-row[2], row[3], row[4]))
        return list(dict.fromkeys(row[4] for row in chosen))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        wake_at: int | None = self._all("next_wake", worker, everyone)[0][0]
        return wake_at

    def server_time(self) -> int:
        """Return the server's clock."""
        now: int = self._all("server_time")[0][0]
        return now
