"""Whether commits in halves are quicker: both ways are tried now and then, and measured.

Two commits instead of one take longer, but the code of the other half runs meanwhile. Which is quicker hangs on the
disk, on the code, and on whether another core is free just now. Until that is measured, it is guessed by the cores.
"""

import os
from typing import Final

TRIED: Final = 8
"""So many commits, or twice as many halves, are made to see which way is quicker: starts, steps and ends take turns."""
PERIOD: Final = 64 * TRIED
"""After so many commits both ways are tried again."""
CLEARLY: Final = 1.05
"""The other way must be so many times quicker: a measurement varies, and a change by mistake lasts for a period."""
PAUSE: Final = 8
"""A commit that comes so many times later than most has waited for something else."""


class Halves:
    """Counts commits of many runs, and decides how the next one is made."""

    def __init__(self, cores: int) -> None:
        self._count = 3 * TRIED
        self._are_quicker = cores > 1
        self._last = (0.0, False)
        self._found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        """Since both ways are tried: after how many seconds a commit followed another one, and of how many runs."""

    def are_wanted(self) -> bool:
        """Tell how the next commit of many runs is to be made."""
        place = self._count % PERIOD
        self._count += 1
        if place == 0:
            self._found = {True: [], False: []}
        elif place == 3 * TRIED and all(self._found.values()):
            halves, wholes = _seconds_for_one(self._found[True]), _seconds_for_one(self._found[False])
            self._are_quicker = halves < wholes * CLEARLY if self._are_quicker else halves * CLEARLY < wholes
        if place < 3 * TRIED:
            return place < 2 * TRIED
        return self._are_quicker

    def note(self, runs: int, at: float, *, is_half: bool) -> None:
        """A commit of so many runs is done at a time in seconds. With the one before, that shows what a run takes."""
        (before, was_half), self._last = self._last, (at, is_half)
        if was_half is is_half and before and self._count % PERIOD <= 3 * TRIED:
            self._found[is_half].append((at - before, runs))


def cores_of_process() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _seconds_for_one(found: list[tuple[float, int]]) -> float:
    """Return what a run takes. Pauses, in which nobody had anything to do, do not count."""
    usual = PAUSE * sorted(seconds / runs for seconds, runs in found)[len(found) // 2]
    counted = [(seconds, runs) for seconds, runs in found if seconds / runs <= usual]
    return sum(seconds for seconds, _ in counted) / sum(runs for _, runs in counted)
