"""The statuses of a run and the legal arrows between them. Everything else asks this table."""

from typing import Final, Literal

Status = Literal["queued", "running", "waiting", "held", "completed", "failed", "cancelled"]

STATUSES: Final[tuple[Status, ...]] = ("queued", "running", "waiting", "held", "completed", "failed", "cancelled")
ENDED: Final[frozenset[Status]] = frozenset({"completed", "failed", "cancelled"})
UNFINISHED: Final[frozenset[Status]] = frozenset(STATUSES) - ENDED

ARROWS: Final[dict[Status, frozenset[Status]]] = {
    # A driver keeps `running`, comes to rest in `waiting`, or gives the run back as `queued`.
    "queued": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    "running": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    "waiting": frozenset({"queued", "running", "waiting", "held", "completed", "failed", "cancelled"}),
    # A held run moves only by a resolution: on again, or to its end.
    "held": frozenset({"held", "queued", "cancelled"}),
    # An ended run moves only when somebody says `retry` (failed), `restart` or `rollback` (any).
    "completed": frozenset({"queued", "running"}),
    "failed": frozenset({"queued", "running"}),
    "cancelled": frozenset({"queued", "running"}),
}


def may_become(before: Status, after: Status) -> bool:
    """Tell whether a run may go from one status to another. What is no status, as damage leaves it, leads to a hold."""
    return after in ARROWS.get(before, {"held"})
