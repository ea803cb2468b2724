"""Runs as a store keeps them, with their inboxes, checkpoints and holds."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from everstep.model.events import EventRow
from everstep.model.run_events import RunStarted
from everstep.model.status import Status
from everstep.stores.rows.answers_and_streams import EntryRow

# `gc=False` below: these are plain data without reference cycles, and there are very many of them. The garbage
# collector need not scan them.

DeliveryKind = Literal["signal", "cancel", "hold", "child", "key", "request"]


class RunRow(msgspec.Struct, kw_only=True, gc=False):
    """A run as the table `runs` has it."""

    id: str
    workflow: str
    version: str = ""
    semantics: int = 1
    status: Status = "queued"
    generation: int = 1
    head_seq: int = 0
    head_digest: bytes = b""
    epoch: int = 0
    owner: str | None = None
    wake_at: int | None = None
    queue: str = "default"
    priority: int = 0
    tags: dict[str, str] = {}
    parent: str | None = None
    arguments: str = ""
    """The digest of the run's arguments: what `attach` compares."""
    preview: str = ""
    outcome: bytes | None = None
    """The payload of the result, or of the error."""
    current_step: str = ""
    published: bytes | None = None
    """JSON: name to payload, of the values the run published."""
    budget: bytes | None = None
    """JSON: the state of the run's budget, if it has one. For people; decisions are made by the history."""
    deaths: int = 0
    """How often in a row the run's owner died while it drove this run and the head did not move."""
    created_at: int = 0
    updated_at: int = 0
    ended_at: int | None = None
    damage: str = ""
    """Filled when read: which part of the row is damaged."""


def has_moved(before: RunRow, now: RunRow) -> bool:
    """Return True if a run was driven, or claimed, between two reads of its row."""
    return (now.head_seq, now.generation, now.epoch) != (before.head_seq, before.generation, before.epoch)


class RowChange(msgspec.Struct, gc=False):
    """What an `Append` writes into the run's row in addition to the new head."""

    status: Status
    at: int
    wake_at: int | None = None
    current_step: str = ""
    published: bytes | None = None
    """New published values, or None to leave them."""
    outcome: bytes | None = None
    """Set with an end."""
    progress: bool = True
    """False when the events only repeat what a crash had cut off: such an append does not set `deaths` to 0."""
    budget: bytes | None = None
    """The new state of the run's budget, or None to leave it. With an end, followers receive it."""
    stays: bool = False
    """A hint that the row is `running` already, with no time to wake up, under the same owner, so that only the head
    moves. It changes nothing but the time that the append takes.
    """


class NewRun(msgspec.Struct, gc=False):
    """A run to be created, with its first event. `row.head_seq` and `row.head_digest` are its last event's."""

    row: RunRow
    event: EventRow
    payloads: Sequence[tuple[str, bytes]] = ()
    follower: str | None = None
    """The run (its parent) whose inbox gets this run's end, under `follower_call`."""
    follower_call: int = 0
    more: Sequence[EventRow] = ()
    """The events after the first one, for a run that begins with a history."""
    entries: Sequence[EntryRow] = ()
    """The entries of its streams, for such a run."""
    started: RunStarted | None = None
    """The body of its first event, if the process that made it drives it at once."""


class Post(msgspec.Struct, gc=False):
    """A delivery for a run's inbox. With an `id`, a second one of the same kind and id is not delivered again.

    One that is `undelivered` does not count: sent again, it is pending again, unless the run has ended. The id of a
    `child` or `key` delivery is a call, which may come again, so it does not count here.
    """

    run: str
    kind: DeliveryKind
    name: str = ""
    id: str = ""
    value: bytes = b""
    at: int = 0


class Delivery(msgspec.Struct):
    """An inbox row.

    It is `pending` until the run takes it (`consumed`) or ends without it (`undelivered`). A retry makes undelivered
    signals and requests pending again; a restart makes what is not consumed `left`: no later generation gets it.
    """

    number: int
    run: str
    kind: DeliveryKind
    name: str
    id: str
    value: bytes
    at: int
    state: Literal["pending", "consumed", "undelivered", "left"] = "pending"


class ClaimedPast(NamedTuple):
    """What a claim has read of its run in its transaction, so that the worker need not ask for it.

    A store may leave it out, and does so if the history is long.
    """

    events: Sequence[EventRow]
    inbox: Sequence[Delivery]


class CheckpointRow(NamedTuple):
    """A checkpoint as it is stored. The reader verifies it. `seq` is that of its event, which has its digest."""

    run: str
    generation: int
    seq: int
    previous: bytes
    """The digest of the event before its own, from which the chain continues."""
    engine: bytes
    """What the engine remembers in addition to the code's state."""
    state: bytes
    digest: bytes
    complete: int = 1


class HoldRow(msgspec.Struct, kw_only=True):
    """A question for a person about one run."""

    id: str
    run: str
    reason: str
    step: str = ""
    summary: str = ""
    report: bytes = b"{}"
    """JSON with the facts: what was recorded, what is true now, resolutions and their consequences."""
    resolutions: list[str] = []
    created_at: int = 0
    resolved_at: int | None = None
    resolution: str = ""
    by: str = ""
    note: str = ""
    workflow: str = ""
    """Filled when read: the run's workflow."""


class RunFilter(msgspec.Struct, kw_only=True):
    """Which runs to list. Newest first."""

    status: Sequence[Status] = ()
    workflow: str | None = None
    parent: str | None = None
    tags: dict[str, str] = {}
    text: str = ""
    """A text to look for in the id, the workflow, the arguments' preview and the tags, ignoring case (A to Z)."""
    before: tuple[int, str] | None = None
    """A run's `created_at` and id: list only the runs after it. For paging, also while runs arrive."""
    limit: int = 100
    offset: int = 0


SMALL: Final = {ord(letter): letter.lower() for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


class LostTail(msgspec.Struct, kw_only=True):
    """A run whose history lacks an event that this process saw durable.

    The database was replaced by a copy that lacks the newest events. They were durable, and this process has reported
    them to others or acted on them. The shorter history is sound: only a process that remembers its head can tell.
    """

    run: str
    generation: int
    seen: int
    """The number of the newest event that was seen durable."""
    seen_at: int
    seen_status: str
    """The run's status at that event."""
    there: int | None
    """The number of the newest event in the store now; None if the run itself is gone."""
    there_at: int = 0
    status: Status | None = None
    """The run's status now."""
    events: list[EventRow] = []
    """The newest events of this history that this process wrote, as far as it still has them."""

    @property
    def is_other(self) -> bool:
        """Whether an event of the same number exists and is another one: another process continued without the tail."""
        return self.there is not None and self.there >= self.seen
