"""Queues and named limits of the in-memory store."""

from collections import Counter
from collections.abc import Callable, Sequence

from everstep.stores.protocol import Accepted, Claim, RunRow, Verdict, WorkerRow
from everstep.stores.rows.queues import (
    DEFAULT_QUEUE,
    ChangeQueue,
    FreeSlot,
    NoSlot,
    QueueCount,
    QueueRoom,
    QueueRow,
    SlotRow,
    TakeSlot,
    changed,
    full_at_after_one,
    key_of,
    room_of,
)


class MemoryQueues:
    """What was said about queues and limits, and who has slots of limits. Slots of queues follow from the runs."""

    def __init__(self, runs: dict[str, RunRow], workers: dict[str, WorkerRow]) -> None:
        self._runs = runs
        self._workers = workers
        self.rows: dict[tuple[str, str], QueueRow] = {}
        self._slots: dict[tuple[str, str, int], SlotRow] = {}

    def change(self, change: ChangeQueue) -> Verdict:
        """Set what a change names."""
        place = (change.kind, change.name)
        self.rows[place] = changed(self.rows.get(place), change)
        return Accepted()

    def _has_slot(self, row: RunRow) -> bool:
        if row.queue == DEFAULT_QUEUE:
            return False
        return row.status in ("running", "waiting") or (row.status == "queued" and row.owner in self._workers)

    def begun(self, queue: str, but: str = "") -> list[RunRow]:
        """Return the runs of a queue that have a slot."""
        return [row for row in self._runs.values() if row.queue == queue and row.id != but and self._has_slot(row)]

    def may_claim(self, claim: Claim, row: RunRow) -> bool:
        """Tell whether a run may be claimed as far as its queue is concerned, and if so, take a token."""
        if row.queue == DEFAULT_QUEUE:
            return True
        if claim.queues is not None and row.queue not in claim.queues:
            return False
        if row.status != "queued":
            return True
        if row.wake_at is not None and row.wake_at > claim.at:
            return False
        settings = self.rows.get(("queue", row.queue))
        if settings is None:
            return True
        begun, key = self.begun(row.queue, but=row.id), key_of(row.tags)
        own = [one for one in begun if one.owner == claim.worker and claim.worker in self._workers]
        if room_of(settings, claim.at, len(begun), len(own))[0] < 1:
            return False
        counts = settings.per_key is not None and key is not None
        if counts and sum(key_of(one.tags) == key for one in begun) >= (settings.per_key or 0):
            return False
        settings.full_at = full_at_after_one(settings, claim.at)
        return True

    def _waiting(self, queue: str | None = None) -> list[RunRow]:
        rows = (row for row in self._runs.values() if row.queue != DEFAULT_QUEUE and queue in (None, row.queue))
        return [row for row in rows if row.status == "queued" and row.owner is None]

    def room(self, at: int, worker: str, only: Sequence[str] | None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each a worker may begin now."""
        found: list[QueueRoom] = []
        for name in sorted({row.queue for row in self._waiting()}):
            if only is not None and name not in only:
                continue
            rows, settings = self._waiting(name), self.rows.get(("queue", name))
            due_at = min((row.wake_at for row in rows if row.wake_at is not None), default=None)
            if all(row.wake_at is not None for row in rows) and (due_at is None or due_at > at):
                found.append(QueueRoom(name, 0, due_at))
                continue
            begun = self.begun(name)
            own = [one for one in begun if one.owner == worker and worker in self._workers]
            room, next_at = room_of(settings, at, len(begun), len(own))
            if next_at is None and due_at is not None and due_at > at:
                next_at = due_at
            found.append(QueueRoom(name, room, next_at))
        return found

    def queued(
        self,
        queue: str,
        at: int,
        workflows: Sequence[str],
        limit: int,
        urgency: Callable[[RunRow], tuple[int, int, str]],
    ) -> list[str]:
        """Return ids of the runs of a queue that may begin first: by priority, then age."""
        settings = self.rows.get(("queue", queue))
        per_key = settings.per_key if settings is not None else None
        used = Counter(key_of(one.tags) for one in self.begun(queue))
        known = [row for row in self._waiting(queue) if row.workflow in workflows]
        if per_key is not None:
            known = [row for row in known if key_of(row.tags) is None or used[key_of(row.tags)] < per_key]
        ready = sorted((row for row in known if row.wake_at is None), key=urgency)[:limit]
        late = [row for row in known if row.wake_at is not None and row.wake_at <= at]
        late.sort(key=lambda row: (row.wake_at or 0, row.id))
        chosen: list[str] = []
        for row in sorted([*ready, *late[:limit]], key=urgency):
            key = key_of(row.tags)
            used[key] += 1
            if per_key is None or key is None or used[key] <= per_key:
                chosen.append(row.id)
        return chosen[:limit]

    def counts(self) -> list[QueueCount]:
        """Return how many runs of each queue wait, and have begun."""
        names = {row.queue for row in self._waiting()} | {
            row.queue for row in self._runs.values() if self._has_slot(row)
        }
        found: list[QueueCount] = []
        for name in sorted(names):
            rows = self._waiting(name)
            ready = [row.created_at for row in rows if row.wake_at is None]
            oldest = min(ready, default=None)
            found.append(QueueCount(name, len(ready), len(rows) - len(ready), len(self.begun(name)), oldest))
        return found

    def do(self, operation: ChangeQueue | TakeSlot | FreeSlot) -> Verdict:
        """Do an operation on queues or limits."""
        match operation:
            case ChangeQueue():
                return self.change(operation)
            case TakeSlot():
                return self.take(operation)
            case FreeSlot():
                return self.free(operation)

    # -- named limits of steps -----------------------------------------------------------------------------------
    def take(self, take: TakeSlot) -> Verdict:
        """Take a slot of a named limit."""
        settings, place = self.rows.get(("limit", take.name)), (take.name, take.run, take.call)
        self._slots = {
            one: slot for one, slot in self._slots.items() if one[0] != take.name or slot.worker in self._workers
        }
        there = self._slots.get(place)
        if there is not None and there.worker == take.worker:
            return Accepted()
        room, next_at = room_of(settings, take.at, sum(one[0] == take.name for one in self._slots))
        if room < 1:
            return NoSlot(next_at)
        if settings is not None:
            settings.full_at = full_at_after_one(settings, take.at)
        self._slots[place] = SlotRow(*place, take.worker, take.at)
        return Accepted()

    def free(self, free: FreeSlot) -> Verdict:
        """Give a slot back."""
        there = self._slots.get((free.name, free.run, free.call))
        if there is not None and there.worker == free.worker:
            del self._slots[free.name, free.run, free.call]
        return Accepted()

    def slots(self) -> list[SlotRow]:
        """Return who has slots of named limits."""
        living = [slot for slot in self._slots.values() if slot.worker in self._workers]
        return sorted(living, key=lambda slot: (slot.name, slot.since, slot.run, slot.call))
