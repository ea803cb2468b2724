"""Where to start reading the lines of waiting runs: at the place where the last look found the first one.

Runs are claimed from the front of an index, and a claimed run leaves a dead entry there. As long as any transaction can
see the past of the database, no entry may be removed, and a look that begins at the front walks over all of them. So a
store object remembers up to where no run waits, and begins there.

What is remembered need not be right. A run that is put back has its old age, and so does one whose start took long to
commit: it may appear before the remembered place. So places stay a little behind the clock, a process that puts runs
back announces it, and now and then a look begins at the front: every second, or less often if that takes long.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from everstep.stores.ticks import ticks

BEHIND_MICROSECONDS: Final = 1_000_000
"""How far places stay behind the clock, because a start is older than its commit."""
WHOLE_SECONDS: Final = 1.0
"""The minimum time between looks from the front, in seconds."""
SHARE: Final = 100
"""Looks from the front take at most one part in this many of the time."""
NUMBERS_BEHIND: Final = 200
"""The number of newest deliveries that each look reads."""
PRIORITIES_MAX: Final = 32
"""The maximum number of priorities of a line for which a place is remembered."""
QUEUES_MAX: Final = 1_000
LEAST: Final = -(2**63)
MOST: Final = 2**63 - 1
LAST_NAME: Final = "\U0010ffff"
"""Sorts after every name."""

Place = tuple[int, str]
BEGINNING: Final[Place] = (LEAST, "")


class Line:
    """Runs that wait, in the order of their priorities and ages. The default priority is known from the beginning."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {0: BEGINNING}

    def known(self) -> tuple[list[int], list[int], list[str]]:
        """Return the priorities with a remembered place, and the places."""
        return list(self.places), [at for at, _ in self.places.values()], [id for _, id in self.places.values()]

    def gaps(self) -> tuple[list[int], list[int]]:
        """Return the ranges between the known priorities: their upper and lower bounds, both exclusive."""
        known = sorted(self.places, reverse=True)
        return [MOST, *known], [*known, LEAST]

    def note(self, at: int, firsts: Iterable[tuple[int, int, str]]) -> None:
        """Remember the first run of each priority, as (priority, age, id), that a look found which began at `at`."""
        behind = (at - BEHIND_MICROSECONDS, "")
        found = {priority: (created_at, id) for priority, created_at, id in firsts}
        for priority, place in self.places.items():
            self.places[priority] = max(place, min(behind, found.get(priority, behind)))
        for priority in found.keys() - self.places.keys():
            if len(self.places) < PRIORITIES_MAX:
                self.places[priority] = min(behind, found[priority])

    def begin_anew(self) -> None:
        """Read from the front."""
        self.places = dict.fromkeys(self.places, BEGINNING)


class Looks:
    """Decides when a look begins at the front."""

    def __init__(self, seconds: float) -> None:
        self._pause = round(seconds * 1_000_000)
        self._next_at = 0
        self._began_at = 0

    def are_due(self) -> bool:
        """Return True if the look that begins now should begin at the front."""
        self._began_at = ticks()
        return self._began_at >= self._next_at or not self._pause

    def took_place(self) -> None:
        """Record the end of a look from the front."""
        now = ticks()
        self._next_at = now + max(self._pause, SHARE * (now - self._began_at))

    def begin_anew(self) -> None:
        """Make the next look begin at the front."""
        self._next_at = 0


class Lines:
    """The lines of all queues except `default`."""

    def __init__(self, whole_seconds: float) -> None:
        self.looks = Looks(whole_seconds)
        self.lines: dict[str, Line] = {}
        self.delayed: dict[str, int] = {}
        """The time from which runs with a delay are read, by queue."""

    def add(self, names: Iterable[str]) -> bool:
        """Read the lines of these queues from now on; True if any of them is new."""
        new = [name for name in names if name not in self.lines]
        if len(self.lines) + len(new) > QUEUES_MAX:
            self.lines, self.delayed = {}, {}
        for name in new:
            self.lines[name], self.delayed[name] = Line(), LEAST
        return bool(new)

    def begin_anew(self) -> None:
        """Read all from the front."""
        for line in self.lines.values():
            line.begin_anew()
        self.delayed = dict.fromkeys(self.lines, LEAST)

    def asked(self) -> list[list[object]]:
        """Return the parameters of `fronts`."""
        known = [(name, *one) for name, line in self.lines.items() for one in zip(*line.known(), strict=True)]
        gaps = [(name, *one) for name, line in self.lines.items() for one in zip(*line.gaps(), strict=True)]
        names = sorted(self.lines)
        delayed: list[list[object]] = [list(self.delayed), list(self.delayed.values())]
        return [*_columns(4, known), *_columns(3, gaps), *delayed, ["", *names], [*names, LAST_NAME]]

    def note(self, at: int, rows: Sequence[tuple[int, str, int, int, str]]) -> None:
        """Remember what `fronts` found at a time."""
        behind = at - BEHIND_MICROSECONDS
        firsts: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.lines}
        due = dict.fromkeys(self.lines, MOST)
        for kind, queue, priority, created_at, id in rows:
            if kind == 0:
                firsts[queue].append((priority, created_at, id))
            elif kind == 1:
                due[queue] = created_at
        for name, line in self.lines.items():
            line.note(at, firsts[name])
            self.delayed[name] = max(self.delayed[name], min(behind, due[name]))


class Inboxes:
    """The number from which pending deliveries are read, and the older ones that were pending at the last look."""

    def __init__(self, whole_seconds: float) -> None:
        self.looks = Looks(whole_seconds)
        self.since = 0
        self.older: list[int] = []

    def note(self, newest: int, pending: Sequence[int]) -> None:
        """Remember what a look found. Numbers are not committed in order, so the newest are read again."""
        self.since = max(self.since, newest - NUMBERS_BEHIND)
        self.older = [number for number in pending if number < self.since]


class Due:
    """What `due` and `next_wake` remember: free runs of the queue `default`, timers, and owners that are gone."""

    def __init__(self, whole_seconds: float) -> None:
        self.looks = Looks(whole_seconds)
        self.at = LEAST + BEHIND_MICROSECONDS
        """When the last look was."""
        self.asked_by: tuple[str, bool] | None = None
        """The worker of the last look, and whether it looked for all runs or only its own."""
        self.free = Line()
        self.free_from = LEAST
        """The time from which timers of free runs are read."""
        self.own_from = LEAST
        self.gone_owners: list[str] = []
        """Owners of runs without a lease, at the last look from the front."""
        self.gone_wake: int | None = None
        """When the first timer of their runs is due; None if that was not read yet."""
        self.gone: list[str] = []
        """Those of them whose runs the last look found."""

    def begin_anew(self, worker: str, everyone: bool) -> None:
        """Read all from the front."""
        self.asked_by = (worker, everyone)
        self.free.begin_anew()
        self.free_from = self.own_from = LEAST


def _columns(width: int, rows: Sequence[Sequence[object]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]
