"""The PostgreSQL store: one schema of a database, any number of processes on any number of machines."""

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from everstep.errors import StoreError, StoreUnreachable, StoreUnusable
from everstep.model.chains import ChainKeys
from everstep.model.crash_points import crash_point
from everstep.stores.postgres.addresses import address_of
from everstep.stores.postgres.commits import Writer
from everstep.stores.postgres.connections import (
    UNSAID_POOLER,
    Connection,
    Durability,
    Outage,
    Patience,
    connect,
    is_away,
    outage_of,
    refuse_unsaid_pooler,
    refused,
    translated,
    unsaid_pooler,
)
from everstep.stores.postgres.fronts import WHOLE_SECONDS
from everstep.stores.postgres.opening import check_server, migrate, places_of
from everstep.stores.postgres.outbox import write_in
from everstep.stores.postgres.reads import Reader
from everstep.stores.postgres.watching import Watcher
from everstep.stores.postgres.workers import Workers
from everstep.stores.processes import worker_has_ended
from everstep.stores.protocol import Operation, RunRow, Verdict, WorkerRow
from everstep.stores.rows.runs import LostTail
from everstep.stores.rows.workers import GoneRow
from everstep.stores.sql.rows import run_row
from everstep.stores.sql.store import SqlStore
from everstep.stores.ticks import ticks

SETTLE_SECONDS: Final = 1.0
"""How long workers have, after a restart of the server, to take their locks again, in seconds."""
GRACE_SECONDS: Final = 0.25
"""How long a lock must be missing before its worker counts as dead, in seconds: it may be reconnecting."""
OPEN_ATTEMPTS: Final = 6
"""The maximum number of attempts at opening. A server that is missing at the first one is reported at once."""
OPEN_PAUSE_SECONDS: Final = 0.01


PIN_TRANSACTIONS: Final = 100_000
"""The number of transactions that must have begun since, where the server does not know how long something has existed.
"""


class Pin(NamedTuple):
    """Something that keeps the past of the database visible, see docs/operating/pinned-horizon.md."""

    kind: str
    """`session`, `prepared`, `slot` or `standby`."""
    name: str
    """A process number, or the name of the transaction or slot."""
    role: str
    application: str
    state: str
    seconds: int | None
    transactions: int


class PostgresStore(SqlStore):
    """A store in a schema of a PostgreSQL database. See `Store` for what each method promises.

    `durability="power"` waits for the server's disk with each commit; `"process"` does not, so that a crash of the
    server may lose the last moment. The store's clock is the server's.
    """

    look_seconds = 10.0
    _reader: Reader

    def __init__(
        self,
        url: str,
        *,
        durability: Durability = "power",
        clock: Callable[[], int] | None = None,
        create: bool = True,
        migrate: bool = True,
        settle_seconds: float = SETTLE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        whole_seconds: float = WHOLE_SECONDS,
    ) -> None:
        self.address = address_of(url)
        self.url = self.address.shown
        self.schema = self.address.schema
        self.chain = ChainKeys()
        self.durability: Durability = durability
        self._clock = clock
        self.name = name = f"everstep {os.getpid()} {secrets.token_hex(4)}"
        """The application name of this store object's connections in `pg_stat_activity`."""
        connection = self._opened(f"{name} w", create, migrate)
        self._places = places = places_of(self.schema)
        patience = Patience(self.url)
        self._watcher = Watcher(
            self.address,
            name=f"{name} l",
            places=places,
            durability=durability,
            settle_seconds=settle_seconds,
            grace_seconds=grace_seconds,
            patience=patience,
        )
        self._writer = Writer(
            self.address,
            connection,
            name=f"{name} w",
            places=places,
            durability=durability,
            patience=patience,
            tell=self._watcher.tell,
        )
        self._reader = Reader(
            self.address, name=f"{name} r", durability=durability, patience=patience, whole_seconds=whole_seconds
        )
        self._read_with(self._reader)
        self._watcher.on_return = self._reader.begin_anew
        has_locks = not self.address.pooler
        self._workers = Workers(
            self._writer, self._reader, self._watcher, places=places, has_locks=has_locks, waits=grace_seconds > 0
        )
        self.entropy = self._read_entropy()
        self._latest = self.noted = self._read_latest()
        self._offset = 0 if clock is not None else self._measured_offset()
        """How far the server's clock is ahead of this machine's ticks."""

    def _opened(self, name: str, create: bool, may_migrate: bool) -> Connection:
        """Return the connection that writes, to a schema that is a store.

        A statement that was cancelled, or a session that was ended, says nothing about the store: opening is tried
        again, in a new session. Each migration is one transaction, and the next attempt reads how far the last one
        came.
        """
        for attempt in itertools.count(1):
            connection = self._connected(name, is_last=attempt in (1, OPEN_ATTEMPTS))
            if connection is None:
                time.sleep(OPEN_PAUSE_SECONDS * 2**attempt)
                continue
            try:
                check_server(connection, self.address)
                refuse_unsaid_pooler(connection, self.address)
                self.is_new = migrate(connection, self.address, create=create, may_migrate=may_migrate)
            except (psycopg.Error, Outage) as error:
                outage = outage_of(error, connection)
                connection.close()
                if outage is None:
                    raise refused(error, self.url) from error
                if attempt == OPEN_ATTEMPTS:
                    raise (StoreUnreachable if is_away(self.address) else StoreError)(
                        f"{self.url} could not be opened ({outage}). It was tried {attempt} times. Open it again when "
                        "that is repaired; what was committed stays."
                    ) from error
                time.sleep(OPEN_PAUSE_SECONDS * 2**attempt)
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise AssertionError("unreachable")

    def _connected(self, name: str, *, is_last: bool) -> Connection | None:
        """Return a connection that writes, or None. The last attempt raises the reason instead."""
        try:
            return connect(self.address, name, durability=self.durability, writing=True)
        except Outage as outage:
            if UNSAID_POOLER in str(outage):
                raise StoreUnusable(unsaid_pooler(self.address)) from outage
            if is_last:
                kind = StoreUnreachable if is_away(self.address) else StoreError
                raise kind(f"{self.url} cannot be reached: {outage}.") from outage
            return None
        except psycopg.ProgrammingError as error:
            raise StoreUnusable(f"{self.url} is not the URL of a database: {error}") from error

    def close(self) -> None:
        """Close the store. Workers that did not leave count as dead from now on."""
        crash_point("store.close.before")
        self._writer.patience.is_over = True
        self._watcher.close()
        self._reader.close()
        self._writer.close()
        crash_point("store.close.after")

    # -- time -------------------------------------------------------------------------------------------------------
    def now(self) -> int:
        """Return the time by the store's clock: the server's, unless that was set back."""
        passing = self._clock() if self._clock is not None else ticks()
        return max(passing + self._offset, self._latest)

    def ahead(self) -> int:
        """Return by how many microseconds the store's clock is ahead of the machine's."""
        return self.now() - (self._clock() if self._clock is not None else time.time_ns() // 1000)

    def _measured_offset(self) -> int:
        """Return how far the server's clock is ahead of the machine's ticks, as of the quickest of a few answers."""
        found: list[tuple[int, int]] = []
        for _ in range(3):
            before = ticks()
            server = self._reader.server_time()
            after = ticks()
            found.append((after - before, server - (before + after) // 2))
        return min(found)[1]

    def _correct(self, server: int, before: int, after: int) -> None:
        """Correct the offset after the server read its clock between these ticks, no further than that proves."""
        if self._clock is None:
            self._offset = min(max(self._offset, server - after), server - before)

    # -- what is read in another way --------------------------------------------------------------------------------
    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the runs with these ids that exist, in any order, in one query."""
        return list(map(run_row, self._all("rows_of_runs", list(ids)))) if ids else []

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, whatever their status."""
        return self._reader.pending(worker)

    # -- writing ----------------------------------------------------------------------------------------------------
    def connect(self) -> Connection:
        """Return a new connection to the database, for statements of a user's. The caller closes it."""
        name = f"everstep {os.getpid()} step"
        try:
            return connect(self.address, name, durability=self.durability, writing=True, own_path=False)
        except Outage as outage:
            raise translated(outage, self.url) from outage

    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations durably, each accepted or refused by itself. An outage of the server is waited out."""
        return self._writer.commit(operations, patient=patient)

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Do operations in the open transaction of a caller's own connection to this database."""
        return write_in(self.schema, self._places, self.entropy, connection, operations)

    def lost_tails(self) -> list[LostTail]:
        """Return the runs whose newest durable events, as this process saw them, the server has lost. Each is returned
        once.
        """
        return self._writer.heads.take()

    def changed(self) -> bool:
        """Return True if another process (or another store object) has written since the last call."""
        return self._watcher.changed()

    # -- workers ----------------------------------------------------------------------------------------------------
    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = (), about: bytes = b"{}"
    ) -> WorkerRow:
        """Register a worker and take its liveness lock, which the server frees when its connection is gone."""
        return self._workers.register(worker, pid, host, self.now(), lease_until, targets, about)

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Renew the worker's lease, record that it is `at` now, and read the server's clock; False if it was
        removed.
        """
        self._latest = max(self._latest, at)
        before = ticks()
        server = self._workers.renew(worker, lease_until, self._latest, about)
        if server is not None:
            self._correct(server, before, ticks())
        return server is not None

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a worker's lease as lapsed, unless it was renewed since it was read."""
        return self._workers.lapse(worker, lease_until)

    def check_watcher(self) -> None:
        """Raise the error with which the watcher's thread fails, unless it is an outage or has passed."""
        self._watcher.check()

    def is_in_use(self) -> bool:
        """Return True if any process holds a liveness lock of this store."""
        return self._workers.are_any_alive()

    def is_alive(self, worker: WorkerRow) -> bool:
        """Return True if a worker's session exists; for a worker without a lock, if its lease has not lapsed."""
        return self._workers.is_alive(worker)

    def facts(self) -> dict[str, str]:
        """Return the settings of the server that decide about durability, for people."""
        found: dict[str, str] = dict(self._reader.ask(lambda statements: statements.all("settings")))
        return found

    def pins(self, seconds: float) -> list[Pin]:
        """Return what has kept the past of the database visible for at least `seconds`, the oldest first."""
        rows = self._reader.ask(lambda statements: statements.all("pins", round(seconds), PIN_TRANSACTIONS))
        return [Pin(*row) for row in rows]

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose session is gone, and return their ids."""
        return self._workers.bury(at)

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker, remove it, and record that it has ended."""
        self._workers.leave(worker, self.now())

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Record that a worker or host is gone, and fence these workers."""
        self._workers.declare_gone(gone, workers)

    def has_ended(self, worker: str) -> bool:
        """Return True if a worker provably cannot act any more."""
        return self._is_ended_worker(worker) or worker_has_ended(worker)

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Return a function that does nothing: the lock ends with the session."""
        return lambda: None
