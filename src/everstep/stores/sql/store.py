"""What every store on a SQL database tells in the same way: it asks its reader."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from everstep.model.events import EventRow
from everstep.stores.protocol import LAST, CheckpointRow, Delivery, HoldRow, RunFilter, RunRow, WorkerRow
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import EffectFilter, EffectRow
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.rows.queues import QueueCount, QueueRoom, QueueRow, SlotRow
from everstep.stores.rows.runs import LostTail
from everstep.stores.rows.saved import SavedReads
from everstep.stores.rows.schedules import ScheduleRow
from everstep.stores.rows.transfer import Arrival, RunDump
from everstep.stores.rows.workers import GoneKind, GoneRow
from everstep.stores.sql.reading import Reading


class SqlStore(ABC):
    """The reading methods of `Store`, which says what each of them promises."""

    _reader: Reading

    @abstractmethod
    def now(self) -> int:
        """Return the store's clock."""

    # -- reading ------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None:
        """Return a run's row."""
        return self._reader.run(id)

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the runs with these ids that there are, in any order."""
        return self._reader.rows(ids)

    def runs(self, filter: RunFilter) -> list[RunRow]:
        """Return the runs that a filter asks for, newest first."""
        return self._reader.runs(filter)

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status that any run has."""
        return self._reader.counts()

    def runs_without_status(self, limit: int) -> list[str]:
        """Return ids of runs whose status is none that a run can have: their rows are damaged."""
        return self._reader.runs_without_status(limit)

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

    def asking(self) -> list[str]:
        """Return the unfinished runs whose newest histories ask for an approval, answered or not, by their ids."""
        return self._reader.asking()

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended, with the last generation that it is about."""
        return self._reader.deletions()

    def is_being_deleted(self, run: str) -> bool:
        """Tell whether the deletion of a run has begun."""
        return self._reader.is_being_deleted(run)

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Tell whether a run that is not among these may still need one of them."""
        return self._reader.is_needed(runs)

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        return self._reader.restores()

    def life(self) -> str:
        """Return the store's present life: another one after each restored backup, and no other store's."""
        return self._reader.life()

    def arrival(self, run: str) -> Arrival | None:
        """Return whether, and with which events, a run was imported."""
        return self._reader.arrival(run)

    def lost_tails(self) -> list[LostTail]:
        """Return nothing: a file is not replaced under a running process."""
        return []

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

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, whatever their status."""
        return self._reader.pending(worker)

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`."""
        return self._reader.diverged(workflows, limit)

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        return self._reader.next_wake(worker=worker, everyone=everyone)

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        """Return the pending notifications for a target that are free at a time."""
        return self._reader.due_notifications(target=target, at=at, limit=limit)

    def next_notification(self, *, target: str) -> int | None:
        """Return the earliest `next_at` among the pending notifications for a target."""
        return self._reader.next_notification(target)

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        return self._reader.workers()

    def gone(self, kind: GoneKind | None = None, name: str | None = None) -> list[GoneRow]:
        """Return what was declared gone, the newest first."""
        return self._reader.gone(kind, name)

    def owners(self) -> list[str]:
        """Return the workers that have runs, whether or not they are there."""
        return self._reader.owners()

    def neighbours(self, worker: str, limit: int) -> list[WorkerRow]:
        """Return the workers with a lease whose places come next after a worker's."""
        return self._reader.neighbours(worker, limit)

    # -- queues ---------------------------------------------------------------------------------------------------
    def queues(self) -> list[QueueRow]:
        """Return what was said about queues and limits."""
        return self._reader.of_queues.rows()

    def queue_room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each this worker may begin now."""
        return self._reader.of_queues.room(at, worker, queues)

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of the runs of a queue that may begin first, in their order."""
        return self._reader.of_queues.queued(queue, at, workflows, limit)

    def queue_counts(self) -> list[QueueCount]:
        """Return how many runs of each queue wait, and have begun."""
        return self._reader.of_queues.counts()

    def slots(self) -> list[SlotRow]:
        """Return who has slots of named limits."""
        return self._reader.of_queues.slots()

    # -- threads and items ----------------------------------------------------------------------------------------
    @property
    def saved(self) -> "SavedReads":
        """What frameworks have saved."""
        return self._reader.of_saved

    # -- schedules ------------------------------------------------------------------------------------------------
    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        """Return schedules, by their names."""
        return self._reader.schedules(name)

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        """Return the schedules that are due at a time, and then those that wait for a run."""
        return self._reader.due_schedules(at=at, workflows=workflows, limit=limit)

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        """Return the earliest `next_at` among the schedules of these workflows."""
        return self._reader.next_schedule(workflows)
