"""The origin of a forked run."""

from typing import Any, Final

import msgspec

TAG: Final = "forked-from"
"""The tag by which forks are listed."""


class Forked(msgspec.Struct, omit_defaults=True):
    """The origin of a fork: its first `seq` events are those of another run. It is part of its `run_started`."""

    run: str
    generation: int
    seq: int
    """The last event that was copied."""
    head: str
    """The digest of that event in the history that it was copied from."""
    at: int
    """When it was forked. The fork's own timeout counts from here."""
    entropy: str
    """The entropy from which the fork's own keys derive. Copied events keep the keys that they had."""
    earlier: list[tuple[int, str]] = []
    """The same for earlier forks, if the other run is a fork as well: last event, entropy."""
    edited: str = ""
    """What was changed: `arguments` (of the run), or `outcome` (of the last event that was copied)."""
    by: str = ""
    note: str = ""

    @property
    def origin(self) -> str:
        """The event that it was forked at, as people see it."""
        place = f"{self.run}@{self.seq}"
        return place if self.generation == 1 else f"{place} of generation {self.generation}"


def switches(started: Any) -> list[tuple[int, str]]:
    """Return after which events of a history the entropy changes because of a fork, and to what."""
    forked: Forked | None = started.forked
    return [] if forked is None else [*forked.earlier, (forked.seq, forked.entropy)]


def copied_events(started: Any) -> int:
    """Return the number of events that were copied from another run, which remains responsible for their effects."""
    return started.forked.seq if started.forked is not None else 0
