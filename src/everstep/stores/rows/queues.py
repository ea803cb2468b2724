"""Queues of runs, and named limits of steps: how many may run at once, and how many may begin in a time.

A run of a queue has a slot from when a worker claims it until it ends, is held, or is given back. A waiting run keeps
its slot. Runs of the queue `default` have none: nothing limits them.

Rates are buckets of tokens: a bucket holds `rate` tokens and fills in `seconds`; each start takes one. The store keeps
only the time at which the bucket will be full (`full_at`), by the store's clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

DEFAULT_QUEUE: Final = "default"
KEY_TAG: Final = "key"
"""The name of the tag whose value `per_key` counts by."""
PLENTY: Final = 1_000_000
"""The room that is reported where nothing limits it."""
QueueKind = Literal["queue", "limit"]
CHANGEABLE: Final = ("concurrency", "per_worker", "per_key", "rate", "seconds", "paused")


class QueueRow(msgspec.Struct, kw_only=True):
    """The settings of a queue (kind `queue`), or of a named limit of steps (kind `limit`). None: no limit."""

    kind: QueueKind
    name: str
    concurrency: int | None = None
    per_worker: int | None = None
    per_key: int | None = None
    rate: int | None = None
    seconds: float = 1.0
    paused: bool = False
    full_at: int = 0
    """When the bucket of its rate will be full if no token is taken."""
    changed_at: int = 0


class QueueRoom(NamedTuple):
    """A queue in which runs wait, and how many of them one worker may begin now."""

    name: str
    room: int
    next_at: int | None = None
    """When there will be room, if it only lacks a token."""


class QueueCount(msgspec.Struct):
    """The number of runs of a queue that wait for a slot, that wait for their time, and that have begun."""

    name: str
    waiting: int = 0
    delayed: int = 0
    begun: int = 0
    oldest_at: int | None = None
    """When the longest waiting run was started."""


class SlotRow(msgspec.Struct):
    """An attempt at a step that has a slot of a named limit."""

    name: str
    run: str
    call: int
    worker: str
    since: int


class ChangeQueue(msgspec.Struct, gc=False):
    """Set the named `changes` of a queue or a limit, which is created if it does not exist.

    Verdict: `Accepted`. A changed rate begins with a full bucket.
    """

    kind: QueueKind
    name: str
    changes: dict[str, Any]
    at: int


class TakeSlot(msgspec.Struct, gc=False):
    """Take a slot of a named limit for an attempt at a step. Verdict: `Accepted`, or `NoSlot`.

    Slots of workers that are gone do not count. An attempt that has a slot keeps it. A limit that was never configured
    does not limit anything.
    """

    name: str
    run: str
    call: int
    worker: str
    at: int


class FreeSlot(msgspec.Struct, gc=False):
    """Give a slot back. Accepted also if it no longer exists."""

    name: str
    run: str
    call: int
    worker: str


class NoSlot(msgspec.Struct, frozen=True):
    """The limit has no room now."""

    next_at: int | None = None
    """When there will be a token, if it only lacks that."""


class QueueStore(Protocol):
    """What a store answers about queues and named limits."""

    def queue_room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        """Return the queues except `default` in which runs wait (`queued`, no owner), and the room of each, by name.

        Room is for this worker, and 0 while all of them have a `wake_at` in the future. The cost must not depend on how
        many runs wait.
        """
        ...

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of the runs that wait in a queue and may begin: the highest priority first, then the oldest.

        Runs whose key has no room (`per_key`) are left out, also if the runs before them in the answer take that room.
        """
        ...

    def queues(self) -> list[QueueRow]:
        """Return the settings of queues and named limits, by kind and name."""
        ...

    def queue_counts(self) -> list[QueueCount]:
        """Return how many runs of each queue except `default` wait and have begun, by name. Empty queues are
        left out.
        """
        ...

    def slots(self) -> list[SlotRow]:
        """Return the slots that living workers have of named limits: by name, the oldest first."""
        ...


def changed(row: QueueRow | None, change: ChangeQueue) -> QueueRow:
    """Return a row as it is after a change."""
    before = row or QueueRow(kind=change.kind, name=change.name)
    after = msgspec.structs.replace(before, **change.changes, changed_at=change.at)
    if (after.rate, after.seconds) != (before.rate, before.seconds):
        after.full_at = 0
    return after


def _interval(row: QueueRow) -> int:
    assert row.rate is not None
    return max(1, round(row.seconds * 1_000_000 / row.rate))


def tokens(row: QueueRow, at: int) -> int:
    """Return how many tokens the bucket has."""
    if row.rate is None:
        return PLENTY
    missing = max(0, row.full_at - at)
    return (_interval(row) * row.rate - missing) // _interval(row)


def full_at_after_one(row: QueueRow, at: int) -> int:
    """Return when the bucket will be full if one token is taken now."""
    return row.full_at if row.rate is None else max(row.full_at, at) + _interval(row)


def room_of(row: QueueRow | None, at: int, begun: int, own: int = 0) -> tuple[int, int | None]:
    """Return how many may begin now, and, if it only lacks a token, when there will be one."""
    if row is None:
        return PLENTY, None
    limits = [limit - used for limit, used in ((row.concurrency, begun), (row.per_worker, own)) if limit is not None]
    room = min(limits, default=PLENTY)
    if row.paused or room <= 0:
        return 0, None
    left = tokens(row, at)
    if left < 1:
        return 0, row.full_at - _interval(row) * ((row.rate or 1) - 1)
    return min(room, left), None


def key_of(tags: Mapping[str, str]) -> str | None:
    """Return the key of a run, which `per_key` counts by."""
    return tags.get(KEY_TAG)
