"""The tables `queues` and `slots`, and the runs that wait in queues. The rules are in `everstep.stores.rows.queues`."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from everstep.stores.protocol import Accepted, Claim, Verdict
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
    room_of,
)
from everstep.stores.sql.rows import Row, text
from everstep.stores.sql.statements import Statements

ACCEPTED: Final = Accepted()
Token = tuple[()] | tuple[str, str, int]
"""The kind and name of a rate's bucket, and when it is full after this token; empty without a rate."""
NO_TOKEN: Final[Token] = ()


def _queue_row(values: Row) -> QueueRow:
    kind, name, concurrency, per_worker, per_key, rate, seconds, paused, full_at, changed_at = values
    return QueueRow(
        kind=kind,
        name=name,
        concurrency=concurrency,
        per_worker=per_worker,
        per_key=per_key,
        rate=rate,
        seconds=seconds,
        paused=bool(paused),
        full_at=full_at,
        changed_at=changed_at,
    )


class _Asking:
    """Reads about queues, in a transaction and outside."""

    def __init__(self, ask: Callable[..., list[Row]]) -> None:
        self._all = ask

    def row(self, kind: str, name: str) -> QueueRow | None:
        rows = self._all("queue", kind, name)
        return _queue_row(rows[0]) if rows else None

    def used(self, row: QueueRow | None, queue: str, worker: str) -> tuple[int, int]:
        """Return how many slots of a queue are taken, and how many of them by a worker, as far as its settings need
        that.
        """
        begun: int = 0
        own: int = 0
        if row is not None and row.concurrency is not None:
            begun = self._all("begun", queue)[0][0]
        if row is not None and row.per_worker is not None:
            own = self._all("begun_by", queue, worker)[0][0]
        return begun, own

    def keys_in_use(self, queue: str, key: str | None = None) -> Counter[str]:
        """Return how many slots each key has."""
        return Counter({text(one): count for one, count in self._all("begun_with_key", queue, key)})


class QueueTable(_Asking):
    """Changes within a transaction, which the caller begins and ends."""

    def __init__(self, statements: Statements) -> None:
        super().__init__(statements.all)
        self._run = statements.run
        self.counted: dict[tuple[str, str], tuple[int, int]] | None = None
        """The results of `used` in a transaction that only claims, by queue and worker. None: each claim counts again.
        """
        self._claiming: tuple[tuple[str, str], int, int] | None = None

    def used(self, row: QueueRow | None, queue: str, worker: str) -> tuple[int, int]:
        """Return how many slots of a queue are taken, counted once in a transaction that only claims."""
        if self.counted is None:
            return super().used(row, queue, worker)
        if (queue, worker) not in self.counted:
            self.counted[queue, worker] = super().used(row, queue, worker)
        return self.counted[queue, worker]

    def change(self, change: ChangeQueue) -> Verdict:
        """Set what a change names."""
        row = changed(self.row(change.kind, change.name), change)
        limits = (row.concurrency, row.per_worker, row.per_key, row.rate)
        facts = (row.seconds, row.paused, row.full_at, row.changed_at)
        self._run("keep_queue", row.kind, row.name, *limits, *facts)
        return ACCEPTED

    def may_claim(self, claim: Claim) -> Token | None:
        """Return the token to take if the run's queue allows the claim, else None."""
        self._claiming = None
        rows = self._all("place_of_run", claim.run)
        if not rows:
            return NO_TOKEN
        status, queue, wake_at, key, has_slot, owner = rows[0]
        queue = text(queue)
        if queue == DEFAULT_QUEUE:
            return NO_TOKEN
        if claim.queues is not None and queue not in claim.queues:
            return None
        if text(status) != "queued":
            return NO_TOKEN
        if wake_at is not None and wake_at > claim.at:
            return None
        row = self.row("queue", queue)
        if row is None:
            return NO_TOKEN
        begun, own = self.used(row, queue, claim.worker)
        is_own = has_slot and text(owner) == claim.worker
        self._claiming = (queue, claim.worker), 1 - has_slot, 1 - is_own
        if room_of(row, claim.at, begun - has_slot, own - is_own)[0] < 1:
            return None
        counts = row.per_key is not None and key is not None
        if counts and self.keys_in_use(queue, text(key))[text(key)] - has_slot >= (row.per_key or 0):
            return None
        return ("queue", queue, full_at_after_one(row, claim.at)) if row.rate is not None else NO_TOKEN

    def note_claimed(self, token: Token) -> None:
        """Record the claim of the run that `may_claim` was asked about: take its token, if there is a rate; count its
        slot.
        """
        if token:
            self._run("take_token", *token)
        if self.counted is not None and self._claiming is not None:
            place, more, more_own = self._claiming
            begun, own = self.counted[place]
            self.counted = {place: (begun + more, own + more_own)}  # other counts stay as they were read

    def take(self, take: TakeSlot) -> Verdict:
        """Take a slot of a named limit."""
        row = self.row("limit", take.name)
        self._run("forget_slots", take.name)
        begun, is_there = self._all("count_slots", take.name, take.run, take.call, take.worker)[0]
        if is_there:
            return ACCEPTED
        room, next_at = room_of(row, take.at, begun)
        if room < 1:
            return NoSlot(next_at)
        if row is not None and row.rate is not None:
            self._run("take_token", "limit", take.name, full_at_after_one(row, take.at))
        self._run("take_slot", take.name, take.run, take.call, take.worker, take.at)
        return ACCEPTED

    def free(self, free: FreeSlot) -> Verdict:
        """Give a slot back."""
        self._run("free_slot", free.name, free.run, free.call, free.worker)
        return ACCEPTED


class QueueReads(_Asking):
    """Reads outside a transaction."""

    def __init__(self, ask: Callable[..., list[Row]], texts: Callable[[Sequence[str]], Any]) -> None:
        super().__init__(ask)
        self._texts = texts

    def rows(self) -> list[QueueRow]:
        """Return the settings of queues and limits."""
        return [_queue_row(row) for row in self._all("queues")]

    def room(self, at: int, worker: str, only: Sequence[str] | None) -> list[QueueRoom]:
        """Return the queues in which runs wait, and how many of each a worker may begin now."""
        found: list[QueueRoom] = []
        for (named,) in self._all("names_waiting"):
            name = text(named)
            if only is not None and name not in only:
                continue
            is_any, due_at = self._all("front", name)[0]
            if not is_any and (due_at is None or due_at > at):
                found.append(QueueRoom(name, 0, due_at))
                continue
            row = self.row("queue", name)
            room, next_at = room_of(row, at, *self.used(row, name, worker))
            if next_at is None and due_at is not None and due_at > at:
                next_at = due_at
            found.append(QueueRoom(name, room, next_at))
        return found

    def queued(self, queue: str, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of the runs of a queue that may begin first: by priority, then age."""
        row = self.row("queue", queue)
        per_key = row.per_key if row is not None else None
        used = self.keys_in_use(queue) if per_key is not None else Counter()
        full = [key for key, count in used.items() if per_key is not None and count >= per_key]
        found = self._waiting(queue, at, self._texts(workflows), limit, self._texts(full))
        found.sort(key=lambda one: (-one[0], one[1], one[2]))
        chosen: list[str] = []
        for _, _, id, key in found:
            if per_key is not None and key is not None:
                used[text(key)] += 1
                if used[text(key)] > per_key:
                    continue
            chosen.append(text(id))
        return chosen[:limit]

    def _waiting(self, queue: str, at: int, *asked: Any) -> list[Row]:
        """Return the first runs that only wait for a slot, and the first whose delay is over."""
        return [*self._all("waiting", queue, *asked), *self._all("come_due", queue, *asked, at)]

    def counts(self) -> list[QueueCount]:
        """Return how many runs of each queue wait, and have begun."""
        names = {text(name) for query in ("names_waiting", "names_begun") for (name,) in self._all(query)}
        found: list[QueueCount] = []
        for name in sorted(names):
            waiting, delayed, oldest = self._all("count_waiting", name)[0]
            begun = self._all("begun", name)[0][0]
            if waiting or delayed or begun:  # not a queue whose runs all belong to workers that are gone
                found.append(QueueCount(name, waiting, delayed, begun, oldest))
        return found

    def slots(self) -> list[SlotRow]:
        """Return the slots of named limits."""
        return [SlotRow(*row) for row in self._all("slots")]
