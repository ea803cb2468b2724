"""The SQLite store: one file, any number of processes on one machine."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakSet

import apsw

from everstep.model.chains import ChainKeys
from everstep.model.crash_points import crash_point
from everstep.model.events import EventRow
from everstep.stores.archive import ArchiveRow
from everstep.stores.beside import AnswerRow, EntryRow
from everstep.stores.keys import EffectFilter, EffectRow
from everstep.stores.moving import RunDump
from everstep.stores.notifications import NotificationRow
from everstep.stores.protocol import (
    LAST,
    CheckpointRow,
    Delivery,
    HoldRow,
    Operation,
    RunFilter,
    RunRow,
    Verdict,
    WorkerRow,
)
from everstep.stores.queues import QueueCount, QueueRoom, QueueRow, SlotRow
from everstep.stores.sqlite.commits import Writer
from everstep.stores.sqlite.connections import Durability, Patience, connect
from everstep.stores.sqlite.liveness import LiveLocks
from everstep.stores.sqlite.opening import open_file
from everstep.stores.sqlite.queues import QueueReads
from everstep.stores.sqlite.reads import Reader
from everstep.stores.sqlite.workers import Workers

_open_here: Final["WeakSet[SqliteStore]"] = WeakSet()


def is_open_here(path: str) -> bool:
    """Tell whether a file, by its real path, is open as a store in this process."""
    return any(store.path == path for store in list(_open_here))


class SqliteStore:
    """A store in a SQLite file. See `Store` for what each method promises.

    `durability="power"` survives the loss of power; `"process"` only that of the process, and is quicker.
    """

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
        # The real path: two names of one file must agree on the file of liveness locks beside it.
        self.path = os.path.realpath(path)
        self.url = f"sqlite:///{self.path}"
        self.chain = ChainKeys()
        self._clock = clock or (lambda: time.time_ns() // 1000)
        patience = Patience()
        writing, reading, self.is_new = open_file(
            self.path, durability=durability, patience=patience, create=create, may_migrate=migrate, vfs=vfs
        )
        self._writer = Writer(writing, patience, self.path)
        self._reader = Reader(reading, self.path)
        self._queues = QueueReads(self._reader)
        self.entropy = self._reader.entropy()
        self._workers = Workers(self._writer, LiveLocks(self.path + "-live"))
        self._durability: Durability = durability
        self._vfs = vfs
        _open_here.add(self)
        self._latest = self._reader.latest()

    def close(self) -> None:
        """Close the store. Workers that did not leave count as dead from now on."""
        self._workers.close()
        self._reader.close()
        crash_point("store.close.before")
        self._writer.close()
        crash_point("store.close.after")
        _open_here.discard(self)

    def now(self) -> int:
        """Return the store's clock: the machine's, unless that was set back."""
        return max(self._clock(), self._latest)

    def ahead(self) -> int:
        """Return by how many microseconds the store's clock is ahead of the machine's."""
        return self.now() - self._clock()

    def connect(self) -> apsw.Connection:
        """Return a new connection to the file, for an atomic step."""
        patience = Patience()
        patience.is_patient = False
        flags = apsw.SQLITE_OPEN_READWRITE
        return connect(self.path, durability=self._durability, patience=patience, flags=flags, vfs=self._vfs)

    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, each accepted or refused by itself."""
        return self._writer.commit(operations, patient=patient)

    def changed(self) -> bool:
        """Tell whether another process (or another store object) has written since the last call."""
        return self._writer.changed()

    # -- reading ------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None:
        """Return a run's row."""
        return self._reader.run(id)

    def runs(self, filter: RunFilter) -> list[RunRow]:
        """Return the runs that a filter asks for, newest first."""
        return self._reader.runs(filter)

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status that any run has."""
        return self._reader.counts()

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history or a part of it, as it is stored: whoever reads it verifies it."""
        if only:
            wanted = [number for number in only if first <= number <= last]
            return self._reader.events_only(run, generation, wanted)
        return self._reader.events(run, generation, first, last)

    def generations(self, run: str) -> list[int]:
        """Return the generations of which there are events."""
        return self._reader.generations(run)

    def strays(self) -> list[tuple[str, int]]:
        """Return histories that no run's row knows, as run and generation."""
        return self._reader.strays()

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint whose event stands before this number, as it is stored."""
        return self._reader.checkpoint(run, generation, before)

    def payload(self, run: str, digest: str) -> bytes | None:
        """Return a payload that was stored beside the history."""
        return self._reader.payload(run, digest)

    def answer(self, run: str, number: int) -> AnswerRow | None:
        """Return where the answer to a request stands."""
        return self._reader.answer(run, number)

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        """Return entries of a stream after a position, in order."""
        return self._reader.stream(run, generation, name, after, limit)

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        """Return the newest entry of a stream."""
        return self._reader.stream_head(run, generation, name)

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        """Return the names of a run's streams, and the position of the newest entry of each."""
        return self._reader.streams(run, generation)

    def archived(self, run: str) -> list[ArchiveRow]:
        """Return what was archived of a run, the oldest first."""
        return self._reader.archived(run)

    def dump(self, run: str) -> RunDump | None:
        """Return everything that there is of a run, as of one moment."""
        return self._reader.dump(run)

    def ties(self, run: str) -> list[str]:
        """Return the runs that an unfinished run is tied to: by following, or by waiting for a key."""
        return self._reader.ties(run)

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended, with the last generation that it is about."""
        return self._reader.deletions()

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        return self._reader.restores()

    def inbox(self, run: str) -> list[Delivery]:
        """Return the pending deliveries, in the order of their numbers."""
        return self._reader.inbox(run)

    def signals(self, run: str) -> list[Delivery]:
        """Return all deliveries of the run, in order, with their states."""
        return self._reader.signals(run)

    def children(self, run: str) -> list[RunRow]:
        """Return the runs whose parent is this one, oldest first."""
        return self._reader.children(run)

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        """Return holds, oldest first."""
        return self._reader.holds(run=run, open_only=open_only)

    def notifications(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        """Return notifications, oldest first."""
        return self._reader.notifications(run=run, undelivered_only=undelivered_only)

    def effect(self, key: str) -> EffectRow | None:
        """Return who has a key, and its outcome."""
        return self._reader.effect(key)

    def effects(self, filter: EffectFilter) -> list[EffectRow]:
        """Return keys, those that changed last first."""
        return self._reader.effects(filter)

    def old_keys(self, before: int) -> int:
        """Return how many keys are done or free and have not changed since."""
        return self._reader.old_keys(before)

    def waiters(self, key: str) -> list[tuple[str, int]]:
        """Return who waits for a key: runs and their calls."""
        return self._reader.waiters(key)

    # -- finding work -------------------------------------------------------------------------------------------
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
        """Return ids of runs that want a driver now, the most urgent first."""
        return self._reader.due(
            at=at, workflows=workflows, worker=worker, everyone=everyone, limit=limit, queues=queues
        )

    def queues(self) -> list[QueueRow]:
        """Return what was said about queues and limits."""
        return self._queues.rows()

    def queue_room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each this worker may begin now."""
        return self._queues.room(at, worker, queues)

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of the runs of a queue that may begin first, in their order."""
        return self._queues.queued(queue, at, workflows, limit)

    def queue_counts(self) -> list[QueueCount]:
        """Return how many runs of each queue wait, and have begun."""
        return self._queues.counts()

    def slots(self) -> list[SlotRow]:
        """Return who has slots of named limits."""
        return self._queues.slots()

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, whatever their status."""
        return self._reader.pending(worker)

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`."""
        return self._reader.diverged(workflows, limit)

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        return self._reader.next_wake(worker=worker, everyone=everyone, at=self.now())

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        """Return the pending notifications for a target that are free at a time."""
        return self._reader.due_notifications(target=target, at=at, limit=limit)

    def next_notification(self, *, target: str) -> int | None:
        """Return the earliest `next_at` among the pending notifications for a target."""
        return self._reader.next_notification(target)

    # -- workers ------------------------------------------------------------------------------------------------
    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = (), about: bytes = b"{}"
    ) -> WorkerRow:
        """Enter a worker and take its liveness lock, which the kernel frees when the process dies."""
        return self._workers.register(worker, pid, host, self.now(), lease_until, targets, about)

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Prolong the worker's lease, and note that it is `at` now; False if it had been buried."""
        self._latest = max(self._latest, at)
        return self._workers.renew(worker, lease_until, self._latest, about)

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        return self._reader.workers()

    def is_in_use(self) -> bool:
        """Tell whether any process holds a liveness lock beside this store, also for a file that was here before."""
        return self._workers.are_any_alive()

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose process is gone, and return their ids."""
        return self._workers.bury(self._reader.workers())

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker and remove it."""
        self._workers.leave(worker)
