"""What the in-memory store has in memory, who works on it, and which runs want a driver."""

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy

from everstep.errors import Misuse
from everstep.model.chains import ChainKeys
from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.memory.answers_and_streams import MemoryBeside
from everstep.stores.memory.notifications import MemoryNotifications
from everstep.stores.memory.queues import MemoryQueues
from everstep.stores.memory.saved import MemorySaved
from everstep.stores.memory.schedules import MemorySchedules
from everstep.stores.protocol import CheckpointRow, Delivery, HoldRow, RunRow, WorkerRow
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.rows.queues import DEFAULT_QUEUE, QueueCount, QueueRoom, QueueRow, SlotRow
from everstep.stores.rows.runs import LostTail
from everstep.stores.rows.workers import GoneKind, GoneRow


class MemoryWork(MemoryBeside, MemorySchedules):
    """The tables as plain dicts, under one lock."""

    def __init__(self, clock: Callable[[], int]) -> None:
        MemoryBeside.__init__(self)
        MemorySchedules.__init__(self)
        self.url = "memory:"
        self.is_new = True
        self.chain = ChainKeys()
        self._clock = clock
        self._latest = self.noted = 0
        self._lock = threading.RLock()
        self._runs: dict[str, RunRow] = {}
        self._events: dict[tuple[str, int], list[EventRow]] = {}
        self._payloads: dict[tuple[str, str], bytes] = {}
        self._checkpoints: dict[tuple[str, int], dict[int, CheckpointRow]] = {}
        self._signals: dict[int, Delivery] = {}
        self._followers: set[tuple[str, str, int]] = set()
        self._holds: dict[str, HoldRow] = {}
        self._notifications = MemoryNotifications()
        self._workers: dict[str, WorkerRow] = {}
        self._dead: set[str] = set()
        self._ended: set[str] = set()
        self._gone: list[GoneRow] = []
        self._queues = MemoryQueues(self._runs, self._workers)
        self._saved = MemorySaved(self._lock, self._workers)

    def now(self) -> int:
        """Return the store's clock."""
        return max(self._clock(), self._latest)

    def _pending(self, run: str) -> list[Delivery]:
        return [d for d in self._signals.values() if d.run == run and d.state == "pending"]

    def _is_free(self, row: RunRow) -> bool:
        if row.owner is None or row.owner not in self._workers:
            return True
        return not self._workers[row.owner].has_lease

    def asking(self) -> list[str]:
        """Return the unfinished runs whose newest histories ask for an approval, answered or not, by their ids."""
        with self._lock:
            open_runs = [row for row in self._runs.values() if row.status not in ENDED]
            asking = (row.id for row in open_runs if self._has_asked(row))
            return sorted(asking)

    def _has_asked(self, row: RunRow) -> bool:
        return any(event.kind == "approval_asked" for event in self._events.get((row.id, row.generation), ()))

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the runs with these ids that there are, in any order."""
        with self._lock:
            return deepcopy([self._runs[id] for id in ids if id in self._runs])

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        """Return holds, oldest first."""
        with self._lock:
            holds = [hold for hold in deepcopy(list(self._holds.values())) if run in (None, hold.run)]
            for hold in holds:
                hold.workflow = self._runs[hold.run].workflow
            meant = [hold for hold in holds if hold.resolved_at is None or not open_only]
            return sorted(meant, key=lambda hold: (hold.created_at, hold.id))

    # -- finding work --------------------------------------------------------------------------------------------
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
        with self._lock:
            known = [row for row in self._runs.values() if row.workflow in workflows]
            if queues is not None:
                known = [row for row in known if row.queue in queues or row.owner == worker]
            free = [row for row in known if everyone and row.owner != worker and self._is_free(row)]
            ready = [row for row in free if row.status in ("queued", "running") and not is_in_line(row)]
            waiting = [row for row in known if row.status == "waiting" and (row.owner == worker or row in free)]
            timers = [(row.wake_at, row.id) for row in waiting if row.wake_at is not None and row.wake_at <= at]
            arrived = [(box[0].number, row.id) for row in waiting if (box := self._pending(row.id))]
            chosen = {row.id for row in sorted(ready, key=urgency)[:limit]}
            chosen |= {id for _, id in sorted(timers)[:limit]} | {id for _, id in sorted(arrived)[:limit]}
            return [row.id for row in sorted((self._runs[id] for id in chosen), key=urgency)[:limit]]

    @property
    def saved(self) -> MemorySaved:
        """What frameworks have saved."""
        return self._saved

    def lost_tails(self) -> list[LostTail]:
        """Return nothing: nobody replaces this store."""
        return []

    def queues(self) -> list[QueueRow]:
        """Return what was said about queues and limits."""
        with self._lock:
            return deepcopy([row for _, row in sorted(self._queues.rows.items())])

    def queue_room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each this worker may begin now."""
        with self._lock:
            return self._queues.room(at, worker, queues)

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of the runs of a queue that may begin first, in their order."""
        with self._lock:
            return self._queues.queued(queue, at, workflows, limit, urgency)

    def queue_counts(self) -> list[QueueCount]:
        """Return how many runs of each queue wait, and have begun."""
        with self._lock:
            return self._queues.counts()

    def slots(self) -> list[SlotRow]:
        """Return who has slots of named limits."""
        with self._lock:
            return deepcopy(self._queues.slots())

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, by its arrival."""
        with self._lock:
            pending = (delivery.run for delivery in self._signals.values() if delivery.state == "pending")
            return [run for run in dict.fromkeys(pending) if self._runs[run].owner == worker]

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`, the oldest hold first."""
        with self._lock:
            holds = [hold for hold in self.holds() if hold.reason == "diverged" and hold.workflow in workflows]
            return list(dict.fromkeys(hold.run for hold in holds))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        with self._lock:
            waiting = [row for row in self._runs.values() if row.status == "waiting"]
            ours = [row for row in waiting if row.owner == worker or (everyone and self._is_free(row))]
            return min((row.wake_at for row in ours if row.wake_at is not None), default=None)

    def notifications(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        """Return notifications, oldest first."""
        with self._lock:
            is_open = {hold.id for hold in self._holds.values() if hold.resolved_at is None}.__contains__
            return deepcopy(self._notifications.listed(run, undelivered_only, is_open))

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        """Return the pending notifications for a target that are free at a time, the longest due first."""
        with self._lock:
            return deepcopy(self._notifications.due(target, at, limit, self._workers))

    def next_notification(self, *, target: str) -> int | None:
        """Return the earliest `next_at` among the pending notifications for a target."""
        with self._lock:
            return self._notifications.next(target)

    def changed(self) -> bool:
        """Return False: nobody else can write here."""
        return False

    # -- workers -------------------------------------------------------------------------------------------------
    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = (), about: bytes = b"{}"
    ) -> WorkerRow:
        """Enter a worker. It lives until `leave` or `kill_worker`."""
        with self._lock:
            if worker in self._workers and worker not in self._dead:
                raise Misuse(f"There is a live worker {worker} already.")
            self._workers.pop(worker, None)
            self._dead.discard(worker)
            taken = {row.place for row in self._workers.values()}
            place = next(place for place in range(1, len(taken) + 2) if place not in taken)
            row = WorkerRow(worker, place, pid, host, self.now(), lease_until, list(targets), about)
            self._workers[worker] = row
            return deepcopy(row)

    def kill_worker(self, worker: str) -> None:
        """For tests: let a worker's process be gone, so that `bury_dead` finds it."""
        self._dead.add(worker)

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Prolong a worker's lease; False if it had been buried."""
        with self._lock:
            if worker not in self._workers:
                return False
            row = self._workers[worker]
            row.lease_until = lease_until + (lease_until == abs(row.lease_until))  # it changes in any case
            row.about = about if about is not None else row.about
            self._latest = max(self._latest, at)
            return True

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Let a worker's lease have lapsed, unless it was prolonged since it was read."""
        with self._lock:
            row = self._workers.get(worker)
            if row is None or row.lease_until != lease_until or not row.has_lease:
                return False
            row.lease_until = -lease_until
            return True

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        with self._lock:
            return deepcopy(sorted(self._workers.values(), key=lambda row: row.place))

    def neighbours(self, worker: str, limit: int) -> list[WorkerRow]:
        """Return the workers with a lease whose places come next after a worker's."""
        with self._lock:
            mine = self._workers[worker].place if worker in self._workers else 0
            others = [row for row in self.workers() if row.has_lease and row.id != worker]
            return sorted(others, key=lambda row: (row.place < mine, row.place))[:limit]

    def is_in_use(self) -> bool:
        """Tell whether there is any worker."""
        return bool(self._workers)

    def bury_dead(self, at: int) -> list[str]:
        """Remove killed workers."""
        with self._lock:
            buried = [row.id for row in self.workers() if row.id in self._dead]
            for worker in buried:
                del self._workers[worker]
            self._ended.update(buried)
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
            self._ended.add(worker)

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Note that a worker or host is gone, and fence these workers."""
        with self._lock:
            for row in self._runs.values():
                if row.owner in workers:
                    row.epoch, row.owner = row.epoch + 1, None
                    row.status = "queued" if row.status == "running" else row.status
            for worker in workers:
                self._workers.pop(worker, None)
            self._gone.append(gone)

    def gone(self, kind: GoneKind | None = None, name: str | None = None) -> list[GoneRow]:
        """Return what was declared gone, the newest first."""
        found = [row for row in self._gone if kind in (None, row.kind) and name in (None, row.name)]
        return sorted(found, key=lambda row: (-row.at, row.kind, row.name))

    def owners(self) -> list[str]:
        """Return the workers that have runs, whether or not they are there."""
        return sorted({row.owner for row in self._runs.values() if row.owner is not None})

    def has_ended(self, worker: str) -> bool:
        """Tell whether a worker provably cannot act any more."""
        return worker in self._ended or worker in self._dead or bool(self.gone("worker", worker))

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Return a function that does nothing: this store ends with its process."""
        return lambda: None


def is_in_line(row: RunRow) -> bool:
    """Tell whether a run waits for a slot of its queue."""
    return row.status == "queued" and row.owner is None and row.queue != DEFAULT_QUEUE


def urgency(row: RunRow) -> tuple[int, int, str]:
    """Return a sort key: the highest priority first, then the oldest."""
    return (-row.priority, row.created_at, row.id)
