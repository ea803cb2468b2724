"""The deadlines of one run in memory: timers, next attempts, its timeout, the grace of a cancel."""

import heapq
import itertools
from typing import Literal, NamedTuple

DeadlineKind = Literal["timer", "attempt", "probe", "run", "grace"]


class Deadline(NamedTuple):
    """Something to do at a time. Equal times keep the order in which they were set."""

    at: int
    order: int
    kind: DeadlineKind
    call: int


class Deadlines:
    """A heap; entries whose cause is gone are dropped when they come to the top (`is_live` is asked)."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._order = itertools.count()

    @property
    def are_any(self) -> bool:
        """Whether there is any deadline."""
        return bool(self._heap)

    def add(self, at: int, kind: DeadlineKind, call: int = 0) -> None:
        """Set a deadline."""
        heapq.heappush(self._heap, Deadline(at, next(self._order), kind, call))

    def top(self) -> Deadline | None:
        """Return the earliest deadline."""
        return self._heap[0] if self._heap else None

    def pop(self) -> Deadline:
        """Take the earliest deadline off."""
        return heapq.heappop(self._heap)
