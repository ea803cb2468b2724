"""Repairing a damaged run, and recording that the store was restored from a backup: within an open transaction."""

from collections.abc import Sequence
from typing import Any

from everstep.stores.protocol import Accepted, MarkRestored, Refused, RepairRun, Verdict
from everstep.stores.rows.answers_and_streams import ENTRY_COLUMNS
from everstep.stores.rows.archive import CHECKPOINT_COLUMNS, EVENT_COLUMNS, PAYLOAD_COLUMNS, RUN_COLUMNS, archive_bytes
from everstep.stores.sql.rows import Row, resolved_values
from everstep.stores.sql.statements import Statements


class Repairs:
    """A connection's repairs. What is taken out of a table goes into the archive, in the same transaction."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._all = statements.all
        self._run = statements.run

    def repair(self, operation: RepairRun) -> Verdict:
        """Do it, or refuse it and change nothing."""
        run = operation.row.id
        rows = self._all("row_to_repair", run, operation.epoch, operation.worker)
        if not rows:
            return Refused("fenced" if self._all("run_head", run) else "missing")
        self._archive(operation, "run", rows[0][6], RUN_COLUMNS, rows[0])
        where = (run, operation.row.generation, operation.keep)
        for row in self._all("events_to_archive", *where):
            self._archive(operation, "event", row[2], EVENT_COLUMNS, row)
        self._run("forget_events", *where)
        for row in self._all("checkpoints_to_archive", *where):
            self._archive(operation, "checkpoint", row[2], CHECKPOINT_COLUMNS, row)
        self._run("forget_checkpoints", *where)
        for row in self._all("entries_to_archive", *where):
            self._archive(operation, "entry", row[4], ENTRY_COLUMNS, row)
        self._run("forget_entries", *where)
        self._run("forget_answers", *where)
        digests = self._statements.texts(operation.payloads)
        for row in self._all("payloads_to_archive", run, digests):
            self._archive(operation, "payload", 0, PAYLOAD_COLUMNS, row)
        self._run("forget_payloads", run, digests)
        self._statements.replace_run(operation.row)
        self._run("raise_epoch", run)
        if operation.event is not None:
            self._run("append_event", run, operation.row.generation, *operation.event)
        self._run("pend_again", run, self._statements.numbers(operation.pending))
        if operation.hold is not None:
            self._run("resolve_hold", *resolved_values(operation.hold))
            self._run("drop_notifications", operation.hold.id)
        return Accepted()

    def mark_restored(self, operation: MarkRestored) -> Verdict:
        """Raise the number of restores by one, and begin another life of the store."""
        if not self._all("mark_restored", operation.expected):
            return Refused("fenced")
        self._run("begin_life")
        return Accepted()

    def _archive(self, operation: RepairRun, what: str, seq: int, columns: Sequence[str], row: Row) -> None:
        # Texts are read as bytes, because they may be damaged.
        named = zip(columns, row, strict=True)
        values = [value if (what, name) in _BLOBS else _readable(value) for name, value in named]
        generation = values[columns.index("generation")] if "generation" in columns else operation.row.generation
        packed = archive_bytes(columns, values)
        self._run("archive_one", operation.row.id, generation, what, seq, packed, operation.why, operation.at)


_BLOBS = frozenset(
    {
        ("run", "head_digest"),
        ("run", "published"),
        ("run", "outcome"),
        ("run", "budget"),
        ("event", "body"),
        ("event", "digest"),
    }
    | {("payload", "value"), ("entry", "value"), ("entry", "digest")}
    | {("checkpoint", name) for name in ("previous", "engine", "state", "digest")}
)


def _readable(value: Any) -> Any:
    """Return bytes as a text, or as they are if they are not valid UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
