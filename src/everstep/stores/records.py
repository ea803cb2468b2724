"""Rows of a store that stand for themselves: holds, checkpoints, what was archived, workers; and which runs to list."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from everstep.model.status import Status


class CheckpointRow(NamedTuple):
    """A checkpoint as it is stored: whoever reads it verifies it. `seq` is that of its event, which has its digest."""

    run: str
    generation: int
    seq: int
    previous: bytes
    """The digest of the event before its own: the chain goes on from there."""
    engine: bytes
    """What the engine remembers beside the code's state."""
    state: bytes
    digest: bytes
    complete: int = 1


class ArchiveRow(NamedTuple):
    """A damaged row of another table (`what` names which), kept whole as JSON. Nothing reads it by itself."""

    run: str
    generation: int
    what: str
    seq: int
    row: bytes
    why: str
    at: int


class HoldRow(msgspec.Struct, kw_only=True):
    """A question for a person about one run."""

    id: str
    run: str
    reason: str
    step: str = ""
    summary: str = ""
    report: bytes = b"{}"
    """JSON with the facts: what was recorded, what is now, resolutions and their consequences."""
    resolutions: list[str] = []
    created_at: int = 0
    resolved_at: int | None = None
    resolution: str = ""
    by: str = ""
    note: str = ""
    workflow: str = ""
    """Filled when read: the run's workflow."""


class RunFilter(msgspec.Struct, kw_only=True):
    """Which runs to list. Newest first. `before` is a `created_at`/id pair to page on."""

    status: Sequence[Status] = ()
    workflow: str | None = None
    parent: str | None = None
    tags: dict[str, str] = {}
    limit: int = 100
    offset: int = 0


class WorkerRow(msgspec.Struct):
    """A process that drives runs. `place` is its byte in the file of liveness locks."""

    id: str
    place: int
    pid: int
    host: str
    started_at: int
    lease_until: int
    targets: list[str] = []
    """Where it delivers notifications of holds to, by name."""
