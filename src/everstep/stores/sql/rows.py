"""Between rows of the tables and the structs of the protocol.

A text arrives as a `str`, or as bytes where the database does not check its encoding: then it may be damaged.
"""

from typing import Any

import msgspec

from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.protocol import Append, HoldRow, RunRow, WorkerRow
from everstep.stores.rows.answers_and_streams import EntryRow
from everstep.stores.rows.keys import EffectRow
from everstep.stores.rows.notifications import NotificationRow

Row = tuple[Any, ...]

_encode = msgspec.json.Encoder().encode
_decode_tags = msgspec.json.Decoder(dict[str, str]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def as_json(value: object) -> str:
    """Return a JSON text, which SQLite's `json_each` splits again."""
    return _encode(value).decode()


def run_values(row: RunRow) -> Row:
    """Return a run's columns in their order in the table."""
    return (
        row.id,
        row.workflow,
        row.version,
        row.semantics,
        row.status,
        row.generation,
        row.head_seq,
        row.head_digest,
        row.epoch,
        row.owner,
        row.wake_at,
        row.queue,
        row.priority,
        as_json(row.tags) if row.tags else "{}",
        row.parent,
        row.arguments,
        row.current_step,
        row.deaths,
        row.created_at,
        row.updated_at,
        row.ended_at,
        row.preview,
        row.published,
        row.outcome,
        row.budget,
    )


def text(value: bytes | str, errors: str = "replace") -> str:
    """Return a text that may have been read as bytes. Damaged bytes are replaced."""
    return value if isinstance(value, str) else value.decode("utf-8", errors)


def tag_values(row: RunRow) -> list[Row]:
    """Return the rows of `tagged` of a new run. (Triggers update them when its row changes or is deleted.)"""
    return [(name, value, row.created_at, row.id) for name, value in row.tags.items()]


def run_row(values: Row) -> RunRow:
    """Return a run from its columns in their order in the table. A damaged row is marked in `damage`."""
    try:
        return _run_row(values, "strict", {} if values[13] in (b"{}", "{}") else _decode_tags(values[13]))
    except (UnicodeDecodeError, msgspec.MsgspecError):
        row = _run_row(values, "replace", {})
        row.damage = "a text in it is not valid UTF-8, or its tags are not JSON"
        return row


def _run_row(values: Row, errors: str, tags: dict[str, str]) -> RunRow:
    return RunRow(
        id=text(values[0], errors),
        workflow=text(values[1], errors),
        version=text(values[2], errors),
        semantics=values[3],
        status=text(values[4], errors),  # type: ignore[arg-type]  # one of them, unless damaged
        generation=values[5],
        head_seq=values[6],
        head_digest=values[7],
        epoch=values[8],
        owner=None if values[9] is None else text(values[9], errors),
        wake_at=values[10],
        queue=text(values[11], errors),
        priority=values[12],
        tags=tags,
        parent=None if values[14] is None else text(values[14], errors),
        arguments=text(values[15], errors),
        current_step=text(values[16], errors),
        deaths=values[17],
        created_at=values[18],
        updated_at=values[19],
        ended_at=values[20],
        preview=text(values[21], errors),
        published=values[22],
        outcome=values[23],
        budget=values[24],
    )


def stays(append: Append) -> bool:
    """Return True if an append only moves the head of its run and leaves the rest of the row as it is."""
    if append.plain:
        return True
    row = append.row
    is_running = row.stays and row.status == "running" and row.wake_at is None
    return is_running and row.outcome is None and row.progress and not append.release


def change_values(append: Append) -> Row:
    """Return the parameters of `change_row`: what is expected, what always changes, the new head, and the rest."""
    row, events = append.row, append.events
    ended = row.status in ENDED
    return (
        append.run,
        append.generation,
        append.epoch,
        append.expected_seq,
        append.expected_digest,
        row.at,
        row.current_step,
        row.published,
        events[-1][0] if events else append.expected_seq,
        events[-1][5] if events else append.expected_digest,
        row.status,
        row.wake_at,
        row.outcome,
        row.at if ended else None,
        ended or append.release,
        bool(append.events) and row.progress,
    )


def entry_row(row: Row) -> EntryRow:
    """Return an entry of a stream. Damaged text is replaced, so that the chain of digests ends there."""
    run, generation, name, position, seq, step, *rest = row
    return EntryRow(text(run), generation, text(name), position, seq, text(step), *rest)


def event_row(row: Row) -> EventRow:
    """Return an event. Damaged text is replaced, so that the chain of digests ends just before it."""
    seq, kind, step, at, body, digest = row
    return EventRow(seq, text(kind), text(step), at, body, digest)


def effect_values(row: EffectRow) -> Row:
    """Return a key's columns in their order in the table."""
    return (
        row.key,
        row.state,
        row.run,
        row.generation,
        row.call,
        row.seq,
        row.step,
        row.effect,
        row.arguments,
        row.round,
        row.begun_at,
        row.changed_at,
        row.by,
        row.note,
        row.digest,
        row.outcome,
        row.secret,
    )


def effect_row(values: Row) -> EffectRow:
    """Return a key from its columns in their order in the table."""
    row = EffectRow(**dict(zip(EffectRow.__struct_fields__, values, strict=True)))
    row.secret = bool(row.secret)
    return row


def resolved_values(hold: HoldRow) -> Row:
    """Return the parameters of `resolve_hold`."""
    return (hold.resolved_at, hold.resolution, hold.by, hold.note, hold.id, hold.run)


def hold_row(values: Row) -> HoldRow:
    """Return a hold from its columns in their order in the table, and its run's workflow."""
    return HoldRow(
        id=values[0],
        run=values[1],
        reason=values[2],
        step=values[3],
        summary=values[4],
        report=values[5],
        resolutions=_decode_texts(values[6]),
        created_at=values[7],
        resolved_at=values[8],
        resolution=values[9],
        by=values[10],
        note=values[11],
        workflow=text(values[12]),
    )


def notification_values(row: NotificationRow) -> Row:
    """Return a notification's columns in their order in the table."""
    facts = (row.id, row.hold, row.run, row.target, row.state, row.attempts, row.next_at, row.claimed_by)
    return (*facts, row.last_error, row.created_at)


def notification_row(values: Row) -> NotificationRow:
    """Return a notification from its columns. A damaged one must not hide the others."""
    return NotificationRow(
        id=text(values[0]),
        hold=text(values[1]),
        run=text(values[2]),
        target=text(values[3]),
        state=text(values[4]),  # type: ignore[arg-type]  # one of them, unless damaged
        attempts=values[5],
        next_at=values[6],
        claimed_by=None if values[7] is None else text(values[7]),
        last_error=text(values[8]),
        created_at=values[9],
    )


def worker_row(values: Row) -> WorkerRow:
    """Return a worker from its columns in their order in the table. Damaged targets count as none."""
    id, place, pid, host, started_at, lease_until, listed, about = values
    try:
        targets = _decode_texts(listed)
    except (UnicodeDecodeError, msgspec.MsgspecError):
        targets = []
    return WorkerRow(id, place, pid, host, started_at, lease_until, targets, about)
