"""The SQLite store: one file, any number of processes on one machine."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakSet

import apsw

from everstep.model.chains import ChainKeys
from everstep.model.crash_points import crash_point
from everstep.stores.protocol import (
    Operation,
    Verdict,
    WorkerRow,
)
from everstep.stores.rows.workers import GoneRow
from everstep.stores.sql.store import SqlStore
from everstep.stores.sqlite.commits import Writer, WritingStore
from everstep.stores.sqlite.connections import Durability, Identity, Patience, connect
from everstep.stores.sqlite.liveness import LiveLocks
from everstep.stores.sqlite.opening import open_file, real_path
from everstep.stores.sqlite.outbox import write_in
from everstep.stores.sqlite.reads import Reader
from everstep.stores.sqlite.workers import Workers

_open_here: Final["WeakSet[SqliteStore]"] = WeakSet()


def is_open_here(path: str) -> bool:
    """Return True if a file, by its real path, is open as a store in this process."""
    return any(store.path == path for store in list(_open_here))


class SqliteStore(WritingStore, SqlStore):
    """A store in a SQLite file. See `Store` for what each method promises.

    `durability="power"` survives the loss of power; `"process"` survives only a killed process, and is faster.
    """

    look_seconds = 0.0
    _reader: Reader

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "power",
        clock: Callable[[], int] | None = None,
        create: bool = True,
        migrate: bool = True,
        vfs: str | None = None,
    ) -> None:
        # The real path: two names of one file must lead to one file of liveness locks.
        self.path = real_path(os.fspath(path))
        self.url = f"sqlite:///{self.path}"
        self._durability: Durability = durability
        self._vfs = vfs
        patience = Patience()
        writing, reading, self.is_new = open_file(
            self.path, durability=durability, patience=patience, create=create, may_migrate=migrate, vfs=vfs
        )
        self._reader = Reader(reading, self.path, threading.Lock())
        try:
            self._begin(clock)
        except BaseException:
            reading.close()
            writing.close()
            raise
        # Now all its files are there.
        self._writer = Writer(writing, patience, self.path, Identity(self.path), threading.Lock())
        self._workers = Workers(self._writer, LiveLocks(self.path + "-live"), self._reader.places)
        _open_here.add(self)

    def _begin(self, clock: Callable[[], int] | None) -> None:
        """Read what the store says of itself."""
        self.chain = ChainKeys()
        self._clock = clock or (lambda: time.time_ns() // 1000)
        self._read_with(self._reader)
        self.entropy = self._read_entropy()
        self._latest = self.noted = self._read_latest()

    def close(self) -> None:
        """Close the store. Workers that did not leave count as dead from now on."""
        self._workers.close()
        self._reader.close()
        crash_point("store.close.before")
        self._writer.close()
        crash_point("store.close.after")
        _open_here.discard(self)

    def now(self) -> int:
        """Return the time by the store's clock: the machine's, unless that was set back."""
        return max(self._clock(), self._latest)

    def ahead(self) -> int:
        """Return by how many microseconds the store's clock is ahead of the machine's."""
        return self.now() - self._clock()

    def connect(self) -> apsw.Connection:
        """Return a new connection to the file, for an atomic step."""
        self._writer.refuse_if_moved(now=True)  # otherwise it might lead to another store
        patience = Patience()
        patience.is_patient = False
        flags = apsw.SQLITE_OPEN_READWRITE
        return connect(self.path, durability=self._durability, patience=patience, flags=flags, vfs=self._vfs)

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Do operations in the open transaction of a caller's own connection to this file."""
        return write_in(self.path, connection, operations)

    def changed(self) -> bool:
        """Return True if another process (or another store object) has written since the last call."""
        return self._writer.changed()

    # -- workers ------------------------------------------------------------------------------------------------
    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = (), about: bytes = b"{}"
    ) -> WorkerRow:
        """Register a worker and take its liveness lock, which the kernel frees when the process dies."""
        return self._workers.register(worker, pid, host, self.now(), lease_until, targets, about)

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Renew the worker's lease, and record that it is `at` now; False if it was removed."""
        self._latest = max(self._latest, at)
        return self._workers.renew(worker, lease_until, self._latest, about)

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a worker's lease as lapsed, unless it was renewed since it was read."""
        return self._workers.lapse(worker, lease_until)

    def is_in_use(self) -> bool:
        """Return True if any process holds a liveness lock of this store, also for an earlier file at this path."""
        return self._workers.are_any_alive()

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose process is gone, and return their ids."""
        return self._workers.bury(at)

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker, remove it, and record that it has ended."""
        self._workers.leave(worker, self.now())

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Record that a worker or host is gone, and fence these workers."""
        self._workers.declare_gone(gone, workers)

    def has_ended(self, worker: str) -> bool:
        """Return True if a worker provably cannot act any more."""
        return self._is_ended_worker(worker) or self._workers.has_ended(worker)

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Keep a worker's liveness lock after `close`. Returns a function that frees it."""
        return self._workers.hand_over_lock(worker)
