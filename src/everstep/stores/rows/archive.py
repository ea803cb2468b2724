"""The archive: what was taken out of a store because it is damaged. Nothing in it is ever changed or merged."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

RUN_COLUMNS: Final = (
    "id",
    "workflow",
    "version",
    "semantics",
    "status",
    "generation",
    "head_seq",
    "head_digest",
    "epoch",
    "owner",
    "wake_at",
    "queue",
    "priority",
    "tags",
    "parent",
    "arguments",
    "current_step",
    "deaths",
    "created_at",
    "updated_at",
    "ended_at",
    "preview",
    "published",
    "outcome",
    "budget",
)
EVENT_COLUMNS: Final = ("run", "generation", "seq", "kind", "step", "at", "body", "digest")
PAYLOAD_COLUMNS: Final = ("run", "digest", "value")
CHECKPOINT_COLUMNS: Final = ("run", "generation", "seq", "previous", "engine", "state", "digest", "complete")


def archive_bytes(columns: Sequence[str], values: Sequence[object]) -> bytes:
    """Return a row as the archive keeps it. A text that is not valid UTF-8 is kept as bytes."""
    return msgspec.msgpack.encode(dict(zip(columns, values, strict=True)))


class ArchiveRow(NamedTuple):
    """Something that was taken out of a table because it is damaged. `row` is MessagePack: column to value.

    what: `run` (its row), `event`, `payload` or `checkpoint`.
    """

    run: str
    generation: int
    what: str
    seq: int
    row: bytes
    why: str
    at: int

    def columns(self) -> dict[str, Any]:
        """Return the row that was archived, column to value."""
        columns: dict[str, Any] = msgspec.msgpack.decode(self.row)
        return columns
