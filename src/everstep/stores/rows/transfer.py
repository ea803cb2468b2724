"""Taking whole runs out of a store: deleting ended ones part by part, and moving runs to another store."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from everstep.model.events import EventRow
from everstep.stores.rows.answers_and_streams import AnswerRow, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import EffectRow
from everstep.stores.rows.runs import CheckpointRow, Delivery, HoldRow, RunRow


class MarkerRow(NamedTuple):
    """The marker of an atomic step that writes to the store's own database."""

    key: str
    run: str
    step: str
    attempt: int
    outcome: bytes | None
    at: int


class Arrival(NamedTuple):
    """An imported run. What its events up to this one say about restored backups concerns other stores."""

    run: str
    generation: int
    seq: int
    doubted: int
    """Whether the store that it came from was restored from a backup, and the run had not recorded that."""


class RunDump(msgspec.Struct):
    """Everything that a store has of one run, read in one transaction, except notifications."""

    row: RunRow
    events: list[tuple[int, EventRow]] = []
    """Each with its generation."""
    payloads: list[tuple[str, bytes]] = []
    checkpoints: list[CheckpointRow] = []
    deliveries: list[Delivery] = []
    followers: list[tuple[str, int]] = []
    """The runs and calls that receive this run's end."""
    holds: list[HoldRow] = []
    effects: list[EffectRow] = []
    """The keys of actions that the run has, or had last."""
    waits: list[tuple[str, int]] = []
    """The keys that the run waits for, with the calls."""
    archive: list[ArchiveRow] = []
    markers: list[MarkerRow] = []
    answers: list[AnswerRow] = []
    entries: list[EntryRow] = []
    """The entries of all streams."""
    arrivals: list[Arrival] = []
    """At most one. In a file: that its run is doubted. In an import: what the store records about that."""


class ImportRuns(msgspec.Struct, gc=False):
    """Insert runs of another store, all or none. They get no owner, and their epochs are raised by one.

    `Refused("taken")` if a run with one of the ids exists here, or a hold, or a marker; `Refused("key")` if a key
    exists here that one of the runs has in progress or is undoing. A key that is done or free is left as it is here.
    What was `running` becomes `queued`. A delivery keeps its number if that is free here; pending ones stay in their
    order.
    """

    dumps: Sequence[RunDump]


class ClaimFamily(msgspec.Struct, gc=False):
    """Claim a family of ended runs for its deletion, all of them or none: from then on no other worker can claim them.

    The conditions were read before and are checked again here. `Refused("fenced")` unless each run has the epoch with
    which it is named, ended before `before`, has no living owner, no open hold, no key in progress, and no thread of a
    framework in which it may be asked for again. `Refused("taken")` while another run needs one of them: see
    `Store.is_needed`. `Accepted`: `worker` owns them, their epochs are raised by one, and `deletions` lists them.
    """

    epochs: dict[str, int]
    worker: str
    at: int
    before: int


class DeletePart(msgspec.Struct, gc=False):
    """Delete up to `limit` rows of an ended run that was claimed at `epoch`; with the last of them its own row.

    Verdict: `Deleted`, `Refused("missing")`, or `Refused("fenced")` if its epoch is another, it has not ended, or a
    hold of it is open. The keys of its actions stay.
    """

    run: str
    epoch: int
    at: int
    limit: int = 200


class Deleted(msgspec.Struct, frozen=True):
    """The number of rows that were deleted; `done` when nothing of the run is left."""

    rows: int
    done: bool


def arrived(dump: RunDump) -> RunRow:
    """Return a run's row as it is in the store that it was moved to."""
    status = "queued" if dump.row.status == "running" else dump.row.status
    return msgspec.structs.replace(dump.row, status=status, epoch=dump.row.epoch + 1, owner=None, deaths=0)


def numbered(dump: RunDump, is_taken: Callable[[int], bool]) -> Iterator[tuple[int | None, Delivery]]:
    """Return a run's deliveries with the numbers that they keep; None for the next free one, greater than all."""
    has_moved = False
    for one in dump.deliveries:
        has_to_move = is_taken(one.number) or (has_moved and one.state == "pending")
        has_moved = has_moved or (has_to_move and one.state == "pending")
        yield None if has_to_move else one.number, one
