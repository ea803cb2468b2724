"""Workers: entering with a liveness lock, prolonging the lease, leaving, and burying those whose process is gone."""

from collections.abc import Sequence

from everstep.errors import Misuse
from everstep.stores.protocol import WorkerRow
from everstep.stores.sql.rows import Row, as_json, worker_row
from everstep.stores.sqlite.commits import Writer
from everstep.stores.sqlite.liveness import LiveLock, LiveLocks
from everstep.stores.sqlite.queries import query

PLACES_LOOKED_AT = 256
"""Workers take the lowest free place, so a place beyond this is not taken by fewer of them."""


class Workers:
    """The table `workers` and the locks that tell who of it lives."""

    def __init__(self, writer: Writer, locks: LiveLocks) -> None:
        self._writer = writer
        self._locks = locks
        self._held: dict[str, LiveLock] = {}

    def register(
        self, worker: str, pid: int, host: str, at: int, lease_until: int, targets: Sequence[str], about: bytes
    ) -> WorkerRow:
        """Enter a worker. Its lock is taken before its row can be seen, so nobody buries it in between."""
        lock: LiveLock | None = None
        try:
            with self._writer.transaction("register_worker") as cursor:
                taken = {row.place for row in self._rows_but(worker)}
                place = 1
                # A place without a row may still be locked, by a worker that is just leaving.
                while place in taken or (lock := self._locks.take(place)) is None:
                    place += 1
                row = WorkerRow(worker, place, pid, host, at, lease_until, list(targets), about)
                facts = (worker, place, pid, host, at, lease_until, as_json(row.targets), about)
                cursor.execute(query("enter_worker"), facts)
                cursor.execute(query("note_time"), (at,))
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        self._held[worker] = lock
        return row

    def _rows_but(self, worker: str) -> list[WorkerRow]:
        """Return the rows of all others. A dead worker of the same name gives way; a living one must not."""
        others: list[WorkerRow] = []
        cursor = self._writer.connection.cursor()
        rows: list[Row] = cursor.execute(query("workers")).fetchall()
        for row in map(worker_row, rows):
            if row.id != worker:
                others.append(row)
            elif self._locks.is_held(row.place):
                raise Misuse(f"There is a live worker {worker} already.")
            else:
                cursor.execute(query("forget_worker"), (worker,))
        return others

    def renew(self, worker: str, lease_until: int, at: int, about: bytes | None) -> bool:
        """Prolong a worker's lease; False if it had been buried."""
        with self._writer.transaction("renew") as cursor:
            cursor.execute(query("note_time"), (at,))
            cursor.execute(query("renew"), (lease_until, worker, about))
            return self._writer.connection.changes() > 0

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a lease as lapsed, unless it was prolonged since it was read."""
        with self._writer.transaction("renew") as cursor:
            cursor.execute(query("lapse"), (worker, lease_until))
            return self._writer.connection.changes() > 0

    def bury(self, candidates: list[WorkerRow]) -> list[str]:
        """Remove those of the candidates whose lock is free, and return their ids."""
        if all(self._locks.is_held(row.place) for row in candidates):
            return []
        buried: list[str] = []
        with self._writer.transaction("bury") as cursor:
            for row in candidates:
                # Asked again, now that nobody can enter: another worker may have got the place of one that left.
                if not self._locks.is_held(row.place):
                    cursor.execute(query("remove_worker"), (row.id, row.place))
                    buried += [row.id] * self._writer.connection.changes()
        return buried

    def are_any_alive(self) -> bool:
        """Tell whether anybody holds a lock on any place, whether or not there is a row for it."""
        return any(self._locks.is_held(place) for place in range(1, PLACES_LOOKED_AT + 1))

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker, remove it, and only then free its lock."""
        with self._writer.transaction("leave") as cursor:
            cursor.execute(query("give_back"), (worker,))
            cursor.execute(query("forget_worker"), (worker,))
        lock = self._held.pop(worker, None)
        if lock is not None:
            lock.release()

    def close(self) -> None:
        """Free all locks. Workers that did not leave are dead from now on."""
        while self._held:
            self._held.popitem()[1].release()
        self._locks.close()
