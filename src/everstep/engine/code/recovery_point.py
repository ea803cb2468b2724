"""What recovery starts from: a run's newest valid checkpoint with its events, or its whole history.

With a checkpoint, the events up to the first one are read, because the code is replayed up to there, and those from the
newest on; the events in between are not. The chain of digests of the newer part begins with the digest in the
checkpoint, and its own event, which is in that chain, has the digest of the checkpoint: so each confirms the other.

A checkpoint after a completed step with a compensation (`compensate=`) is not used: only the code that called a step
knows how to compensate it.

If a checkpoint is damaged or missing, the next older one is used; if there is none, the whole history is replayed. None
is ever used in part.
"""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from everstep.engine.code.checkpoints import KEPT_MIN, Checkpoint, decode_part
from everstep.engine.history.journal import unpacked
from everstep.engine.history.streams import verify_streams
from everstep.engine.history.verify import (
    Recorded,
    chained,
    compare_budget,
    compare_published,
    compare_with_head,
    compare_with_row,
    key_of,
    kinds_of,
    load_verified,
    published_by,
    refuse_unreadable,
    verify_now,
    without_collections,
)
from everstep.errors import Damaged
from everstep.model.accounts import copied
from everstep.model.digests import chain_start, checkpoint_digest
from everstep.model.events import ENDS, EventRow, ValuePublished, decode_body
from everstep.model.forked import copied_events
from everstep.stores.protocol import CheckpointRow, RunRow, Store


class DamagedCheckpoint(NamedTuple):
    """A checkpoint that cannot be used. `row` is None if it is missing."""

    seq: int
    why: str
    row: CheckpointRow | None = None


class Past(NamedTuple):
    """The events and the checkpoint against which a run's code is replayed."""

    events: list[Recorded]
    checkpoint: "Checkpoint | None"
    damaged: Sequence[DamagedCheckpoint]
    kinds: Set[str]
    """The kinds of all of these events."""


class _Unfit(Exception):
    """A checkpoint cannot be used. The message is the reason; it is empty if the checkpoint is not damaged but, for
    instance, voided by a retry.
    """


def verify_whole(store: Store, run: str) -> list[Recorded]:
    """Return the history of a run as it is now, verified with its payloads, checkpoints and streams."""
    return verify_now(store, run, _verify_what_is_beside)


def _verify_what_is_beside(store: Store, row: RunRow, history: Sequence[Recorded]) -> None:

    if not getattr(history, "left_out", 0):  # otherwise its checkpoints were left out as well
        verify_checkpoints(store, row, history)
    verify_streams(store, row, history)


def verify_checkpoints(store: Store, row: RunRow, history: Sequence[Recorded]) -> None:
    """Raise `Damaged` if a checkpoint cannot be used, given the whole verified history."""
    for seq, why, _ in damaged_checkpoints(store, row, history):
        raise Damaged(f"The checkpoint at event {seq} of run {row.id} is damaged: {why}.", row.head_seq)


def load_past(store: Store, row: RunRow, whole: Sequence[EventRow] = ()) -> Past:
    """Return what to replay a run's code against, verified; raise `Damaged` if nothing is sound enough.

    whole: the history, if it was read already.
    """
    refuse_unreadable(row)
    passed_over: dict[int, DamagedCheckpoint | None] = {}
    for found in _checkpoints_of(store, row) if row.head_seq > 1 else ():
        try:
            events, checkpoint = _load_from(store, row, found)
        except _Unfit as unfit:
            passed_over[found.seq] = DamagedCheckpoint(found.seq, str(unfit), found) if unfit.args else None
            continue
        kinds = kinds_of(events)
        return Past(events, checkpoint, _all_damaged(events, kinds, checkpoint.seq, passed_over), kinds)
    events = load_verified(store, row, whole)
    kinds = kinds_of(events)
    return Past(events, None, _all_damaged(events, kinds, 0, passed_over), kinds)


def damaged_checkpoints(store: Store, row: RunRow, history: Sequence[Recorded]) -> list[DamagedCheckpoint]:
    """Return those of a run's checkpoints that cannot be used, given its whole verified history."""
    seen: dict[int, DamagedCheckpoint | None] = {}
    taken = {event.seq: event.body.digest for event in history if event.kind == "checkpoint_taken"}
    for found in _checkpoints_of(store, row):
        seen[found.seq] = None
        try:
            _opened(found, row)
            if taken.get(found.seq) != found.digest.hex():
                raise _Unfit("its event speaks of another one")
        except _Unfit as unfit:
            seen[found.seq] = DamagedCheckpoint(found.seq, str(unfit), found)
    return _all_damaged(history, kinds_of(history), 0, seen)


def _checkpoints_of(store: Store, row: RunRow) -> Iterator[CheckpointRow]:
    """Give a run's checkpoints, the newest first. Each is read only when it is needed."""
    found = store.checkpoint(row.id, row.generation)
    while found is not None:
        yield found
        found = store.checkpoint(row.id, row.generation, found.seq)


def _load_from(store: Store, row: RunRow, found: CheckpointRow) -> "tuple[list[Recorded], Checkpoint]":
    """Return the events that go with a checkpoint. Raises `_Unfit` if it, and `Damaged` if they cannot be used."""
    checkpoint = _opened(found, row)
    if checkpoint.part.is_undoable:
        raise _Unfit  # only the code that called a step knows its compensation
    first = checkpoint.part.first
    newer = store.events(row.id, row.generation, found.seq)
    if not _confirms(newer, found):
        raise _Unfit("its event speaks of another one")
    older = store.events(row.id, row.generation, 1, min(first, found.seq - 1))
    with without_collections(len(older) + len(newer)):
        key = key_of(older, row, store.chain)
        head, digest = chained(older, row, chain_start(row.id, row.generation), key)
        if digest != (checkpoint.part.first_digest if first < found.seq else found.previous):
            raise _Unfit("the history has another beginning than it knows")
        tail, digest = chained(newer, row, found.previous, key, found.seq)
    compare_with_head(row, tail[-1].seq, digest)
    if any(event.kind == "run_retried" and event.body.voids <= found.seq for event in tail):
        raise _Unfit
    events = [*head, *tail]
    if events[0].kind != "run_started":
        raise Damaged(f"The history of run {row.id} does not begin with run_started.", 0)
    compare_with_row(store, row, events)
    _compare_published(row, checkpoint, tail)
    _compare_budget(row, checkpoint, tail)
    return events, checkpoint


def _compare_published(row: RunRow, checkpoint: "Checkpoint", tail: Sequence[Recorded]) -> None:
    """Compare the published values in the row. It may still have values that a retry made void: the rest decides."""
    kept = {name: ValuePublished(0, name, value) for name, value in checkpoint.part.published.items()}
    try:
        compare_published(row, published_by(tail, kept), tail[-1].seq)
    except Damaged:
        raise _Unfit from None


def _compare_budget(row: RunRow, checkpoint: "Checkpoint", tail: Sequence[Recorded]) -> None:
    books = checkpoint.part.books
    if books is None or books.head is None:
        compare_budget(row, None, tail[-1].seq)
        return

    accounts = copied(books.head)
    for event in tail:
        accounts.take(event.kind, event.step, event.body, event.at)
    compare_budget(row, accounts.encoded(has_ended=tail[-1].kind in ENDS), tail[-1].seq)


def _opened(found: CheckpointRow, row: RunRow) -> "Checkpoint":
    """Return the content of a checkpoint, after it was verified."""
    if found.complete != 1:
        raise _Unfit("it is not marked as complete")
    place = (row.id, row.generation, found.seq)
    if checkpoint_digest(*place, found.previous, found.engine, found.state) != found.digest:
        raise _Unfit("it does not match its digest")
    try:
        part = decode_part(unpacked(found.engine, "engine's part"))
        return Checkpoint(found.seq, part, unpacked(found.state, "state"))
    except (Damaged, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Unfit(f"it cannot be read ({type(error).__name__})") from None


def _confirms(newer: Sequence[EventRow], found: CheckpointRow) -> bool:
    """Return True if the event of a checkpoint exists and names exactly this one."""
    if not newer or (newer[0].seq, newer[0].kind) != (found.seq, "checkpoint_taken"):
        return False
    try:
        return bool(decode_body(newer[0].kind, newer[0].body).digest == found.digest.hex())
    except msgspec.MsgspecError:
        return False


def _all_damaged(
    events: Sequence[Recorded], kinds: Set[str], used: int, seen: dict[int, DamagedCheckpoint | None]
) -> list[DamagedCheckpoint]:
    """Return the damaged checkpoints that were seen, and the missing ones that are newer than the one used.

    The newest few are always kept, so one of them that does not exist is missing: unless that was noted before, or a
    retry voided it, or it was taken before a repair, which may have archived the newer ones that it had to make room
    for.
    """
    damaged = [one for one in seen.values() if one is not None]
    if "checkpoint_taken" not in kinds:
        return sorted(damaged)
    repaired = max((event.seq for event in events if event.kind == "run_repaired"), default=0)
    used = max(used, repaired, copied_events(events[0].body))
    noted = {event.body.checkpoint for event in events if event.kind == "checkpoint_damaged"}
    voided = [(event.body.voids, event.seq) for event in events if event.kind == "run_retried"]
    newest = [event.seq for event in events if event.kind == "checkpoint_taken" and event.seq > used]
    if newest:
        newest = newest[-KEPT_MIN:]
    damaged += [
        DamagedCheckpoint(seq, "it is missing")
        for seq in newest
        if seq not in seen and seq not in noted and not any(voids <= seq < retried for voids, retried in voided)
    ]
    return sorted(damaged)
