"""The statuses of a run and the legal arrows between them. All other code uses this table."""

from typing import Final, Literal

Status = Literal["queued", "running", "waiting", "held", "completed", "failed", "cancelled"]

STATUSES: Final[tuple[Status, ...]] = ("queued", "running", "waiting", "held", "completed", "failed", "cancelled")
ENDED: Final[frozenset[Status]] = frozenset({"completed", "failed", "cancelled"})
UNFINISHED: Final[frozenset[Status]] = frozenset(STATUSES) - ENDED

ARROWS: Final[dict[Status, frozenset[Status]]] = {
    # A driver keeps `running`, settles in `waiting`, or gives the run back as `queued`.
    "queued": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    "running": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    "waiting": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    # A held run leaves this status only by a resolution: it continues, or it ends.
    "held": frozenset({"held", "queued", "cancelled"}),
    # An ended run leaves its status only by `retry` (failed), `restart` or `rollback` (any).
    "completed": frozenset({"queued", "running"}),
    "failed": frozenset({"queued", "running"}),
    "cancelled": frozenset({"queued", "running"}),
}


def may_become(before: Status, after: Status) -> bool:
    """Return True if a run may go from one status to another. From a damaged status it may only become held."""
    return after in ARROWS.get(before, {"held"})
