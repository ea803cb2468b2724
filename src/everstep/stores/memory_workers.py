"""The workers of the in-memory store."""

import threading
from collections.abc import Sequence
from copy import deepcopy

from everstep.errors import Misuse
from everstep.stores.protocol import RunRow, WorkerRow


class MemoryWorkers:
    """Workers in a plain dict, under the lock of the store that they belong to."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._runs: dict[str, RunRow] = {}
        self._workers: dict[str, WorkerRow] = {}
        self._dead: set[str] = set()

    def now(self) -> int:
        """Return microseconds since 1970."""
        raise AssertionError("a store has a clock")

    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = ()
    ) -> WorkerRow:
        """Enter a worker. It lives until `leave` or `kill_worker`."""
        with self._lock:
            if worker in self._workers and worker not in self._dead:
                raise Misuse(f"There is a live worker {worker} already.")
            self._workers.pop(worker, None)
            self._dead.discard(worker)
            taken = {row.place for row in self._workers.values()}
            place = next(place for place in range(1, len(taken) + 2) if place not in taken)
            row = WorkerRow(worker, place, pid, host, self.now(), lease_until, list(targets))
            self._workers[worker] = row
            return deepcopy(row)

    def kill_worker(self, worker: str) -> None:
        """For tests: let a worker's process be gone, so that `bury_dead` finds it."""
        self._dead.add(worker)

    def renew(self, worker: str, lease_until: int) -> bool:
        """Prolong a worker's lease; False if it had been buried."""
        with self._lock:
            if worker not in self._workers:
                return False
            self._workers[worker].lease_until = lease_until
            return True

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        with self._lock:
            return deepcopy(sorted(self._workers.values(), key=lambda row: row.place))

    def bury_dead(self, at: int) -> list[str]:
        """Remove killed workers."""
        with self._lock:
            buried = [row.id for row in self.workers() if row.id in self._dead]
            for worker in buried:
                del self._workers[worker]
            self._dead.clear()
            return buried

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker and remove it."""
        with self._lock:
            for row in self._runs.values():
                if row.owner == worker:
                    row.owner = None
                    row.status = "queued" if row.status == "running" else row.status
            self._workers.pop(worker, None)
