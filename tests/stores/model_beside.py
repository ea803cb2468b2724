"""What a store does with queues, limits, notifications and schedules, as a model: see model.py."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from everstep.stores.protocol import Accepted, Claim, HoldRow, Refused, RunRow, Verdict, WorkerRow
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
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
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow


class Queues:
    """Settings of queues and limits, and slots of limits. Slots of queues follow from the runs."""

    def __init__(self, runs: Callable[[], list[RunRow]], workers: Mapping[str, WorkerRow]) -> None:
        self._runs = runs
        self._workers = workers
        self._settings: dict[tuple[str, str], QueueRow] = {}
        self._slots: dict[tuple[str, str, int], SlotRow] = {}

    def change(self, change: ChangeQueue) -> Verdict:
        place = (change.kind, change.name)
        self._settings[place] = changed(self._settings.get(place), change)
        return Accepted()

    def take_slot(self, take: TakeSlot) -> Verdict:
        settings, place = self._settings.get(("limit", take.name)), (take.name, take.run, take.call)
        alike = {one: slot for one, slot in self._slots.items() if one[0] == take.name}
        self._slots = {
            one: slot for one, slot in self._slots.items() if one not in alike or slot.worker in self._workers
        }
        if place in self._slots and self._slots[place].worker == take.worker:
            return Accepted()
        room, next_at = room_of(settings, take.at, sum(one in self._slots for one in alike))
        if room < 1:
            return NoSlot(next_at)
        if settings is not None:
            settings.full_at = full_at_after_one(settings, take.at)
        self._slots[place] = SlotRow(*place, take.worker, take.at)
        return Accepted()

    def free_slot(self, free: FreeSlot) -> Verdict:
        place = (free.name, free.run, free.call)
        if place in self._slots and self._slots[place].worker == free.worker:
            del self._slots[place]
        return Accepted()

    def slots(self) -> list[SlotRow]:
        living = [one for one in self._slots.values() if one.worker in self._workers]
        return sorted(living, key=lambda one: (one.name, one.since, one.run, one.call))

    def lets_begin(self, claim: Claim, row: RunRow) -> bool:
        """Tell whether a run may be claimed as far as its queue is concerned, and if so, take a token."""
        if row.queue == DEFAULT_QUEUE:
            return True
        if claim.queues is not None and row.queue not in claim.queues:
            return False
        if row.status != "queued":
            return True
        if row.wake_at is not None and row.wake_at > claim.at:
            return False
        settings = self._settings.get(("queue", row.queue))
        if settings is None:
            return True
        others, key = [one for one in self._begun(row.queue) if one.id != row.id], key_of(row.tags)
        own = [one for one in others if one.owner == claim.worker in self._workers]
        if room_of(settings, claim.at, len(others), len(own))[0] < 1:
            return False
        of_key = sum(key_of(one.tags) == key for one in others) if key is not None else -1
        if settings.per_key is not None and of_key >= settings.per_key:
            return False
        settings.full_at = full_at_after_one(settings, claim.at)
        return True

    def _of(self, queue: str) -> list[RunRow]:
        return [row for row in self._runs() if row.queue == queue != DEFAULT_QUEUE]

    def _begun(self, queue: str) -> list[RunRow]:
        """Return the runs that have a slot."""
        claimed = [row for row in self._of(queue) if row.status == "queued" and row.owner in self._workers]
        return claimed + [row for row in self._of(queue) if row.status in ("running", "waiting")]

    def _in_line(self, queue: str) -> list[RunRow]:
        return [row for row in self._of(queue) if is_in_line(row)]

    def rows(self) -> list[QueueRow]:
        return [row for _, row in sorted(self._settings.items())]

    def counts(self) -> list[QueueCount]:
        found: list[QueueCount] = []
        for name in sorted({row.queue for row in self._runs()}):
            rows, begun = self._in_line(name), self._begun(name)
            ready = [row.created_at for row in rows if row.wake_at is None]
            if rows or begun:
                found.append(QueueCount(name, len(ready), len(rows) - len(ready), len(begun), min(ready, default=None)))
        return found

    def room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        found: list[QueueRoom] = []
        for name in sorted({row.queue for row in self._runs() if queues is None or row.queue in queues}):
            rows, begun = self._in_line(name), self._begun(name)
            due_at = earliest(row.wake_at for row in rows)
            if rows and all(row.wake_at is not None for row in rows) and not is_due(due_at, at):
                found.append(QueueRoom(name, 0, due_at))
            elif rows:
                own = [row for row in begun if row.owner == worker in self._workers]
                room, next_at = room_of(self._settings.get(("queue", name)), at, len(begun), len(own))
                is_later = next_at is None and due_at is not None and due_at > at
                found.append(QueueRoom(name, room, due_at if is_later else next_at))
        return found

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        settings = self._settings.get(("queue", queue))
        per_key = settings.per_key if settings is not None else None
        used = Counter(key_of(row.tags) for row in self._begun(queue))

        def has_room(row: RunRow, more: int) -> bool:
            key = key_of(row.tags)
            return per_key is None or key is None or used[key] + more <= per_key

        known = [row for row in self._in_line(queue) if row.workflow in workflows and has_room(row, 1)]
        ready = sorted((row for row in known if row.wake_at is None), key=by_urgency)[:limit]
        late = sorted((row for row in known if is_due(row.wake_at, at)), key=by_wake)[:limit]
        chosen: list[str] = []
        for row in sorted([*ready, *late], key=by_urgency):
            used[key_of(row.tags)] += 1
            chosen += [row.id] if has_room(row, 0) else []
        return chosen[:limit]


class Notifications:
    """Rows by their ids."""

    def __init__(self, open_holds: Callable[[], list[HoldRow]], workers: Mapping[str, WorkerRow]) -> None:
        self.rows: dict[str, NotificationRow] = {}
        self._open_holds = open_holds
        self._workers = workers

    def drop(self, hold: str) -> None:
        """The hold is resolved."""
        for row in self.rows.values():
            if (row.hold, row.state) == (hold, "pending"):
                row.state, row.claimed_by = "dropped", None

    def take(self, take: TakeNotification) -> Verdict:
        row = self.rows.get(take.id)
        if row is None or row.state != "pending" or row.attempts != take.attempt - 1:
            return Refused("taken")
        if row.next_at > take.at and not self._is_abandoned(row):
            return Refused("taken")
        row.attempts, row.claimed_by, row.next_at = take.attempt, take.worker, take.until
        return Accepted()

    def settle(self, settle: SettleNotification) -> Verdict:
        row = self.rows.get(settle.id)
        if row is None:
            return Refused("taken")
        if settle.state == "sent":
            was_sent = row.state == "sent"
            row.state, row.claimed_by, row.last_error = "sent", None, ""
            return Refused("taken") if was_sent else Accepted()
        if row.state != "pending" or row.attempts != settle.attempt:
            return Refused("taken")
        row.state, row.next_at, row.last_error, row.claimed_by = settle.state, settle.next_at, settle.error, None
        return Accepted()

    def _is_abandoned(self, row: NotificationRow) -> bool:
        return row.claimed_by is not None and row.claimed_by not in self._workers

    def _pending(self, target: str) -> list[NotificationRow]:
        return [row for row in self.rows.values() if (row.state, row.target) == ("pending", target)]

    def listed(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        rows = [row for row in self.rows.values() if run in (None, row.run)]
        if undelivered_only:
            open_holds = {one.id for one in self._open_holds()}
            rows = [row for row in rows if row.state in ("pending", "given up") and row.hold in open_holds]
        return sorted(rows, key=lambda row: (row.created_at, row.id))

    def due(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        meant = [row for row in self._pending(target) if row.next_at <= at or self._is_abandoned(row)]
        return sorted(meant, key=lambda row: (row.next_at > at, row.next_at, row.id))[:limit]

    def next(self, *, target: str) -> int | None:
        return min((row.next_at for row in self._pending(target)), default=None)


class Schedules:
    """Rows by their names."""

    def __init__(self) -> None:
        self._rows: dict[str, ScheduleRow] = {}

    def change(self, change: ChangeSchedule) -> bool:
        """Replace a row, or delete it, if it is as expected."""
        there = self._rows.get(change.name)
        if (there.revision if there is not None else 0) != change.expected or there is change.row is None:
            return False
        self._rows.pop(change.name, None)
        if change.row is not None:
            self._rows[change.name] = change.row
        return True

    def listed(self, *, name: str | None = None) -> list[ScheduleRow]:
        return [row for one, row in sorted(self._rows.items()) if name in (None, one)]

    def due(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        known = [row for row in self.listed() if row.workflow in workflows]
        due = sorted((row for row in known if is_due(row.next_at, at)), key=lambda row: (row.next_at or 0, row.name))
        waiting = [row for row in known if row.waits and not is_due(row.next_at, at)]
        return due[:limit] + waiting[:limit]

    def next(self, *, workflows: Sequence[str]) -> int | None:
        return earliest(row.next_at for row in self._rows.values() if row.workflow in workflows)


def is_in_line(row: RunRow) -> bool:
    """Tell whether a run waits for a slot of its queue."""
    return row.status == "queued" and row.owner is None and row.queue != DEFAULT_QUEUE


def by_urgency(row: RunRow) -> tuple[int, int, str]:
    return -row.priority, row.created_at, row.id


def by_wake(row: RunRow) -> tuple[int, str]:
    return row.wake_at or 0, row.id


def is_due(time: int | None, at: int) -> bool:
    return time is not None and time <= at


def earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)
