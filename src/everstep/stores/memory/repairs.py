"""How the in-memory store repairs a run. Nothing in it is ever damaged; it behaves like the others all the same."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from everstep.stores.protocol import Accepted, MarkRestored, Refused, RepairRun, RunRow, Verdict
from everstep.stores.rows.answers_and_streams import ENTRY_COLUMNS
from everstep.stores.rows.archive import (
    CHECKPOINT_COLUMNS,
    EVENT_COLUMNS,
    PAYLOAD_COLUMNS,
    RUN_COLUMNS,
    ArchiveRow,
    archive_bytes,
)

if TYPE_CHECKING:  # a real cycle: the store has this part, which changes the store's rows
    from everstep.stores.memory.store import MemoryStore


class MemoryRepairs:
    """The archive, and the number of restores."""

    def __init__(self, store: "MemoryStore") -> None:
        self.rows: list[ArchiveRow] = []
        self.restores = 0
        self._store = store

    def repair(self, operation: RepairRun) -> Verdict:
        """Do it, or refuse it and change nothing."""
        store, new = self._store, operation.row
        row = store._runs.get(new.id)
        if row is None:
            return Refused("missing")
        if row.epoch != operation.epoch or (row.owner != operation.worker and not store._is_free(row)):
            return Refused("fenced")
        self._archive(operation, "run", row.generation, row.head_seq, RUN_COLUMNS, _values(row))
        for generation in store.generations(new.id):
            events = store._events[new.id, generation]
            kept = [event for event in events if generation == new.generation and event.seq <= operation.keep]
            if 0 < generation < new.generation:
                continue
            for event in events[len(kept) :]:
                self._archive(operation, "event", generation, event.seq, EVENT_COLUMNS, (new.id, generation, *event))
            if kept:
                store._events[new.id, generation] = kept
            else:
                del store._events[new.id, generation]
        self._archive_checkpoints(operation)
        for entry in store._forget_beside(new.id, new.generation, operation.keep):
            self._archive(operation, "entry", entry.generation, entry.seq, ENTRY_COLUMNS, entry)
        for digest in sorted(set(operation.payloads)):
            if (new.id, digest) in store._payloads:
                value = store._payloads.pop((new.id, digest))
                self._archive(operation, "payload", new.generation, 0, PAYLOAD_COLUMNS, (new.id, digest, value))
        store._runs[new.id] = msgspec.structs.replace(new, epoch=row.epoch + 1, owner=None)
        if operation.event is not None:
            store._events[new.id, new.generation].append(operation.event)
        for number in operation.pending:
            delivery = store._signals.get(number)
            if delivery is not None and delivery.run == new.id and delivery.state in ("consumed", "undelivered"):
                delivery.state = "pending"
        if operation.hold is not None:
            store._hold(operation.hold)
        return Accepted()

    def _archive_checkpoints(self, operation: RepairRun) -> None:
        """A checkpoint stands for the events before it: without them it is worth nothing."""
        run, kept = operation.row, self._store._checkpoints
        for generation in sorted(generation for id, generation in kept if id == run.id):
            for seq in sorted(kept[run.id, generation]):
                is_later = generation == run.generation and not 1 <= seq <= operation.keep
                if is_later or generation > run.generation or generation < 1:
                    row = kept[run.id, generation].pop(seq)
                    self._archive(operation, "checkpoint", generation, seq, CHECKPOINT_COLUMNS, row)

    def mark_restored(self, operation: MarkRestored) -> Verdict:
        """Raise the number of restores by one, and begin another life."""
        if self.restores != operation.expected or self._store._workers:
            return Refused("fenced")
        self.restores += 1
        self._store.begin_life()
        return Accepted()

    def _archive(
        self,
        operation: RepairRun,
        what: str,
        generation: int,
        seq: int,
        columns: Sequence[str],
        values: Sequence[object],
    ) -> None:
        row = archive_bytes(columns, values)
        self.rows.append(ArchiveRow(operation.row.id, generation, what, seq, row, operation.why, operation.at))


def _values(row: RunRow) -> list[object]:
    tags = msgspec.json.encode(row.tags).decode()
    return [tags if name == "tags" else getattr(row, name) for name in RUN_COLUMNS]
