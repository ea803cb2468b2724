"""Workers: registering with a liveness lock, renewing the lease, leaving, and removing those whose process is gone."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import apsw

from everstep.errors import Misuse
from everstep.stores.processes import worker_has_ended
from everstep.stores.protocol import WorkerRow
from everstep.stores.rows.workers import ENDED_KEPT_MICROSECONDS, GoneRow
from everstep.stores.sql.rows import Row, as_json
from everstep.stores.sqlite.commits import Writer
from everstep.stores.sqlite.liveness import LiveLock, LiveLocks
from everstep.stores.sqlite.queries import query

log = logging.getLogger("everstep.store")

PLACES_LOOKED_AT = 256
"""The number of places that are checked for locks. Workers take the lowest free place, so only more workers than this
use later places.
"""


class Place(NamedTuple):
    """The place of a worker's liveness lock."""

    worker: str
    place: int
    lease_until: int
    lock_file: str


class Workers:
    """The table `workers` and the locks that tell which of them live."""

    def __init__(self, writer: Writer, locks: LiveLocks, read_places: Callable[[], list[Row]]) -> None:
        self._writer = writer
        self._rows = read_places
        self._locks = locks
        self._held: dict[str, LiveLock] = {}
        self._replaced: list[LiveLock] = []
        """Locks of this process's workers on files that are no longer at the path."""

    def register(
        self, worker: str, pid: int, host: str, at: int, lease_until: int, targets: Sequence[str], about: bytes
    ) -> WorkerRow:
        """Register a worker. It takes its lock before its row is visible, so that no other process removes it in
        between.
        """
        lock: LiveLock | None = None
        try:
            with self._writer.transaction("register_worker") as cursor:
                taken = {row.place for row in self._places_but(worker)}
                place = 1
                # A place without a row may still be locked, by a worker that is just leaving.
                while place in taken or (lock := self._locks.take(place)) is None:
                    place += 1
                row = WorkerRow(worker, place, pid, host, at, lease_until, list(targets), about)
                facts = (worker, place, pid, host, at, lease_until, as_json(row.targets), about, lock.identity)
                cursor.execute(query("enter_worker"), facts)
                cursor.execute(query("note_time"), (at,))
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        self._held[worker] = lock
        return row

    def _places(self) -> list[Place]:
        """Return the places of all workers, as the connection that writes sees them."""
        return [Place(*row) for row in self._writer.connection.execute(query("places"))]

    def _read_places(self) -> list[Place]:
        return [Place(*row) for row in self._rows()]

    def _places_but(self, worker: str) -> list[Place]:
        """Return the places of all other workers. A dead worker of the same name is replaced; a living one is
        an error.
        """
        others: list[Place] = []
        for row in self._places():
            if row.worker != worker:
                others.append(row)
            elif self._may_live(row):
                raise Misuse(f"There is a live worker {worker} already.")
            else:
                self._writer.connection.execute(query("forget_worker"), (worker,))
        return others

    def renew(self, worker: str, lease_until: int, at: int, about: bytes | None) -> bool:
        """Renew a worker's lease; False if it was removed."""
        lock = self._lock_at_path(worker)
        with self._writer.transaction("renew") as cursor:
            cursor.execute(query("note_time"), (at,))
            cursor.execute(query("renew"), (lease_until, worker, about, lock.identity if lock is not None else None))
            return self._writer.connection.changes() > 0

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a lease as lapsed, unless it was renewed since it was read."""
        with self._writer.transaction("renew") as cursor:
            cursor.execute(query("lapse"), (worker, lease_until))
            return self._writer.connection.changes() > 0

    def _lock_at_path(self, worker: str) -> LiveLock | None:
        """Return a worker's lock. If the file was deleted or replaced, the lock is taken again on the new file.

        The old one is kept as well: it is open in this process, so no other file can get its inode.
        """
        lock = self._held.get(worker)
        if lock is None or lock.identity == self._locks.identity():
            return lock
        again = self._locks.take(lock.place)
        if again is None:
            return lock
        log.warning(
            "%s was deleted or replaced while it is in use. The liveness lock was taken again.", self._locks.path
        )
        self._replaced.append(lock)
        self._held[worker] = again
        return again

    def bury(self, at: int) -> list[str]:
        """Remove workers that are gone, and return their ids.

        A proven end is recorded. A worker whose lock cannot be checked is removed when its lease has lapsed, and no end
        is recorded: it may still act.
        """
        if all(self._may_live(row, at) for row in self._read_places()):
            return []
        buried: list[str] = []
        with self._writer.transaction("bury") as cursor:
            for row in self._places():  # inside the transaction: another worker may have got a place meanwhile
                if not self._may_live(row, at):
                    cursor.execute(query("remove_worker"), (row.worker, row.place))
                    buried.append(row.worker)
                    if self._is_gone(row):
                        self._note_end(cursor, row.worker, at)
        return buried

    def _may_live(self, row: Place, at: int = 0) -> bool:
        if row.lock_file == self._locks.identity():
            return self._locks.is_held(row.place)
        return row.lease_until > at and not worker_has_ended(row.worker)

    def _is_gone(self, row: Place) -> bool:
        """Return True if the kernel says that a worker's process has ended."""
        if row.lock_file == self._locks.identity() and not self._locks.is_held(row.place):
            return True
        return worker_has_ended(row.worker)

    def has_ended(self, worker: str) -> bool:
        """Return True if a worker that has a row has provably ended, and is only not removed yet."""
        return any(row.worker == worker and self._is_gone(row) for row in self._read_places())

    def _note_end(self, cursor: apsw.Cursor, worker: str, at: int) -> None:
        cursor.execute(query("forget_ended_workers"), (at - ENDED_KEPT_MICROSECONDS,))
        cursor.execute(query("note_ended_worker"), (worker, at))

    def are_any_alive(self) -> bool:
        """Return True if any process holds a lock on any place, with or without a row for it."""
        return any(self._locks.is_held(place) for place in range(1, PLACES_LOOKED_AT + 1))

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Record that a worker or host is gone, and fence these workers."""
        with self._writer.transaction("bury") as cursor:
            for worker in workers:
                cursor.execute(query("fence_runs"), (worker,))
                cursor.execute(query("forget_worker"), (worker,))
            cursor.execute(query("declare_gone"), gone)

    def leave(self, worker: str, at: int) -> None:
        """Give back all runs of a worker, remove it, record that it has ended, and only then free its lock."""
        with self._writer.transaction("leave") as cursor:
            cursor.execute(query("give_back"), (worker,))
            cursor.execute(query("forget_worker"), (worker,))
            self._note_end(cursor, worker, at)
        lock = self._held.pop(worker, None)
        if lock is not None:
            lock.release()

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Keep a worker's lock after this store is closed. Returns a function that frees it."""
        locks = [lock for lock in (self._held.pop(worker, None), *self._replaced) if lock is not None]
        self._replaced = []

        def release() -> None:
            for lock in locks:
                lock.release()

        return release

    def close(self) -> None:
        """Free all locks. Workers that did not leave are dead from now on."""
        for lock in (*self._held.values(), *self._replaced):
            lock.release()
        self._held.clear()
        self._replaced.clear()
        self._locks.close()
