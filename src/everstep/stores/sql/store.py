"""The reading methods of every store on a SQL database, by named statements of its reader."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from everstep.errors import Damaged, StoreUnusable
from everstep.model.events import EventRow
from everstep.model.forked import TAG
from everstep.stores.protocol import LAST, CheckpointRow, Delivery, HoldRow, RunFilter, RunRow, WorkerRow
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import EffectFilter, EffectRow
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.rows.queues import QueueCount, QueueRoom, QueueRow, SlotRow
from everstep.stores.rows.runs import SMALL, LostTail
from everstep.stores.rows.saved import SavedReads
from everstep.stores.rows.schedules import ScheduleRow
from everstep.stores.rows.transfer import Arrival, RunDump
from everstep.stores.rows.workers import GoneKind, GoneRow
from everstep.stores.sql.queues import QueueReads
from everstep.stores.sql.rows import (
    Row,
    effect_row,
    entry_row,
    event_row,
    hold_row,
    notification_row,
    run_row,
    text,
    worker_row,
)
from everstep.stores.sql.saved import SavedReading
from everstep.stores.sql.schedules import schedule_row

T = TypeVar("T")


class Reading(Protocol):
    """The connections of a store that only read, and the reads that each database does in its own way."""

    where: str
    """The store, for messages."""

    def all(self, name: str, *parameters: Any) -> list[Row]:
        """Do a statement and return its rows."""
        ...

    def array(self, name: str, *parameters: Any) -> list[Any]:
        """Do a statement and return a list: of values, or of sequences of values."""
        ...

    def texts(self, values: Sequence[str]) -> Any:
        """Return a list of texts as one parameter."""
        ...

    def tags(self, tags: dict[str, str]) -> Any:
        """Return the tags that runs should have, as one parameter."""
        ...

    def events(self, run: str, generation: int, first: int, last: int) -> list[EventRow]:
        """Return a history or a part of it, as it is stored. The caller verifies it."""
        ...

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, read in one transaction."""
        ...

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
        """Return ids of runs that want a driver now: by priority, then age."""
        ...

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        ...

    @property
    def of_queues(self) -> QueueReads:
        """Reads about queues and limits."""
        ...


class SqlStore(ABC):
    """The reading methods of `Store`, which documents them."""

    _reader: Reading

    def _read_with(self, reader: Reading) -> None:
        """Use this reader from now on."""
        self._all, self._texts = reader.all, reader.texts
        self._saved = SavedReading(reader.all, reader.texts)

    @abstractmethod
    def now(self) -> int:
        """Return the time by the store's clock."""

    # -- rows -------------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None:
        """Return a run's row."""
        rows = self._all("run", id)
        return run_row(rows[0]) if rows else None

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the runs with these ids that exist, in any order."""
        return [row for row in map(self.run, ids) if row is not None]

    def runs(self, filter: RunFilter) -> list[RunRow]:
        """Return the runs that a filter asks for, newest first."""
        tags = self._reader.tags(filter.tags)
        wanted = (filter.workflow, filter.parent, tags, filter.offset + filter.limit)
        searched = (*(filter.before or (None, "")), filter.text.translate(SMALL))
        if filter.tags:
            first = sorted(filter.tags.items())[0]
            statuses: set[str | None] = set(filter.status) or {None}
            asked = [(*wanted, status, *searched, *first) for status in statuses]
            rows = [row for one in asked for row in self._all("runs_tagged", *one)]
        elif filter.status:
            each = [(*wanted, status, *searched) for status in set(filter.status)]
            rows = [row for one in each for row in self._all("runs_of_status", *one)]
        else:
            rows = self._all("runs", *wanted, None, *searched)
        found = sorted(map(run_row, rows), key=lambda row: (row.created_at, row.id), reverse=True)
        return found[filter.offset : filter.offset + filter.limit]

    def children(self, run: str) -> list[RunRow]:
        """Return the runs whose parent is this one, oldest first."""
        return [run_row(row) for row in self._all("children", run)]

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status that any run has."""
        return {text(status): count for status, count in self._all("counts")}

    def runs_without_status(self, limit: int) -> list[str]:
        """Return ids of runs whose status is not a valid one: their rows are damaged."""
        return [text(id) for (id,) in self._all("runs_without_status", limit)]

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history or a part of it, as it is stored. The caller verifies it."""
        if only:
            wanted = [*[number for number in only if first <= number <= last], *[None] * 3][:3]
            return [event_row(row) for row in self._all("events_only", run, generation, *wanted)]
        return self._reader.events(run, generation, first, last)

    def generations(self, run: str) -> list[int]:
        """Return the generations that have events."""
        return [generation for (generation,) in self._all("generations", run)]

    def strays(self) -> list[tuple[str, int]]:
        """Return histories without a row of their run, as run and generation."""
        return [(text(run), generation) for run, generation in self._all("strays")]

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint before an event."""
        rows = self._all("checkpoint", run, generation, before)
        return CheckpointRow(*rows[0]) if rows else None

    def payload(self, run: str, digest: str) -> bytes | None:
        """Return a payload that was stored beside the history."""
        rows = self._all("payload", run, digest)
        return rows[0][0] if rows else None

    def answer(self, run: str, number: int) -> AnswerRow | None:
        """Return which event holds the answer to a request."""
        rows = self._all("answer", run, number)
        return AnswerRow(*rows[0]) if rows else None

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        """Return entries of a stream after a position, in order."""
        return [entry_row(row) for row in self._all("stream", run, generation, name, after, limit)]

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        """Return the newest entry of a stream."""
        rows = self._all("stream_head", run, generation, name)
        return entry_row(rows[0]) if rows else None

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        """Return the names of a run's streams, and the position of the newest entry of each."""
        return [(text(name), position) for name, position in self._all("streams", run, generation)]

    def archived(self, run: str) -> list[ArchiveRow]:
        """Return what was archived of a run, the oldest first."""
        return [ArchiveRow(*row) for row in self._all("archived", run)]

    def ties(self, run: str) -> list[str]:
        """Return the runs that an unfinished run is tied to."""
        return [one for (one,) in self._all("ties", run)]

    def asking(self) -> list[str]:
        """Return unfinished runs that have asked for an approval."""
        return [one for (one,) in self._all("asking")]

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended."""
        return [(run, generation) for run, generation in self._all("deletions")]

    def is_being_deleted(self, run: str) -> bool:
        """Return True if the deletion of a run has begun."""
        return bool(self._all("is_being_deleted", run))

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Return True if a run that is not among these may still need one of them."""
        return bool(self._all("is_needed", self._texts(runs), TAG)[0][0])

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        return self._said("restores", int)

    def life(self) -> str:
        """Return the store's present life."""
        return self._said("life", str)

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, as of one moment."""
        return self._reader.dump(run)

    def lost_tails(self) -> list[LostTail]:
        """Return nothing: a file is not replaced under a running process."""
        return []

    def arrival(self, run: str) -> Arrival | None:
        """Return whether, and with which events, a run was imported."""
        rows = self._all("arrival", run)
        return Arrival(*rows[0]) if rows else None

    def _read_latest(self) -> int:
        """Return the latest time that a worker of this store has recorded."""
        return self._said("latest_time", int)

    def inbox(self, run: str) -> list[Delivery]:
        """Return the pending deliveries, in the order of their numbers."""
        return [Delivery(*row) for row in self._all("inbox", run)]

    def signals(self, run: str) -> list[Delivery]:
        """Return all deliveries of the run, in order, with their states."""
        return [Delivery(*row) for row in self._all("signals", run)]

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        """Return holds, oldest first."""
        if run is not None:
            rows = self._all("holds_of_run", run, open_only)
        else:
            rows = self._all("holds_open" if open_only else "holds_all")
        return [self._hold(row) for row in rows]

    def _hold(self, row: Row) -> HoldRow:
        try:
            return hold_row(row)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(f"In {self._reader.where}, the row of hold {row[0]} of run {row[1]} is damaged.") from error

    def _read_entropy(self) -> str:
        return self._said("store_entropy", str)

    def _said(self, name: str, wanted: type[T]) -> T:
        """Return a value of the table `meta`. Raises `Damaged` if it has another type."""
        rows = self._all(name)
        found = rows[0][0] if rows else None
        if not isinstance(found, wanted):
            raise StoreUnusable(
                f"{self._reader.where} is damaged: what its table `meta` says ({name.replace('_', ' ')}) is of another "
                f"type ({type(found).__name__}). Restore a backup of the store. Nothing was changed."
            )
        return found

    def effect(self, key: str) -> EffectRow | None:
        """Return a key's owner and outcome."""
        rows = self._all("effect", key)
        return effect_row(rows[0]) if rows else None

    def effects(self, filter: EffectFilter) -> list[EffectRow]:
        """Return keys, the most recently changed first."""
        wanted = (filter.prefix, filter.run, filter.step, filter.state, filter.limit, filter.offset)
        return [effect_row(row) for row in self._all("effects", *wanted)]

    def old_keys(self, before: int) -> int:
        """Return how many keys are done or free and have not changed since."""
        return len(self._all("old_effects", before, LAST))

    def waiters(self, key: str) -> list[tuple[str, int]]:
        """Return the runs and calls that wait for a key."""
        return [(run, call) for run, call in self._all("waiters", key)]

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        return [worker_row(row) for row in self._all("workers")]

    def _is_ended_worker(self, worker: str) -> bool:
        """Return True if it is recorded that a worker has provably ended."""
        return bool(self._all("is_ended_worker", worker))

    def gone(self, kind: GoneKind | None = None, name: str | None = None) -> list[GoneRow]:
        """Return what was declared gone, the newest first."""
        return [GoneRow(*row) for row in self._all("gone", kind, name)]

    def owners(self) -> list[str]:
        """Return the workers that own runs."""
        return [text(owner) for (owner,) in self._all("owners")]

    def neighbours(self, worker: str, limit: int) -> list[WorkerRow]:
        """Return the workers with a lease whose places come next after a worker's."""
        return [worker_row(row) for row in self._all("neighbours", worker, limit)]

    # -- notifications ------------------------------------------------------------------------------------------------
    def notifications(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        """Return notifications, oldest first."""
        if run is not None:
            rows = self._all("notifications_of_run", run, undelivered_only)
        else:
            rows = self._all("notifications_undelivered" if undelivered_only else "notifications_all")
        return [notification_row(row) for row in rows]

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        """Return the pending notifications for a target that are free at a time, the longest due first."""
        rows = self._all("due_notifications", target, at, limit)
        rows += self._all("abandoned_notifications", target, at, limit)
        return [notification_row(row) for row in rows[:limit]]

    def next_notification(self, *, target: str) -> int | None:
        """Return the earliest `next_at` among the pending notifications for a target."""
        next_at: int | None = self._all("next_notification", target)[0][0]
        return next_at

    # -- finding work -------------------------------------------------------------------------------------------------
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

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        return self._reader.next_wake(worker=worker, everyone=everyone)

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, by its arrival."""
        return self._reader.array("pending_of_owner", worker)

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`, the oldest hold first."""
        return [run for (run,) in self._all("diverged", self._texts(workflows), limit)]

    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        """Return schedules, by their names."""
        rows = self._all("schedules") if name is None else self._all("schedule", name)
        return [schedule_row(row) for row in rows]

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        """Return the schedules that are due at a time, and then those that wait for a run."""
        asked = (at, self._texts(workflows), limit)
        rows = [*self._all("due_schedules", *asked), *self._all("waiting_schedules", *asked)]
        return [schedule_row(row) for row in rows]

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        """Return the earliest `next_at` among the schedules of these workflows."""
        rows = self._all("next_schedule", self._texts(workflows))
        return rows[0][0] if rows else None

    # -- queues ---------------------------------------------------------------------------------------------------
    def queues(self) -> list[QueueRow]:
        """Return the settings of queues and limits."""
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
        """Return the slots of named limits."""
        return self._reader.of_queues.slots()

    # -- threads and items ----------------------------------------------------------------------------------------
    @property
    def saved(self) -> "SavedReads":
        """What frameworks have saved."""
        return self._saved
