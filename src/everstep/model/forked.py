"""Where a run comes from that was forked from another one."""

from typing import Any, Final

import msgspec

TAG: Final = "forked-from"
"""The tag with which a fork is listed."""


class Forked(msgspec.Struct, omit_defaults=True):
    """The origin of a fork: its first `seq` events are those of another run. It stands in its `run_started`."""

    run: str
    generation: int
    seq: int
    """The last event that was copied."""
    head: str
    """That event's digest in the history that it was copied from."""
    at: int
    """When it was forked: its own time begins here."""
    entropy: str
    """What the keys of all that it asks for itself hang on. What was copied keeps the keys that it had."""
    earlier: list[tuple[int, str]] = []
    """The same for forks among what was copied, if the other run is a fork as well: last event, entropy."""
    edited: str = ""
    """What is not as it was: `arguments` (of the run), or `outcome` (of the last event that was copied)."""
    by: str = ""
    note: str = ""

    @property
    def origin(self) -> str:
        """The event that it was forked at, as persons are told of it."""
        place = f"{self.run}@{self.seq}"
        return place if self.generation == 1 else f"{place} of generation {self.generation}"


def switches(started: Any) -> list[tuple[int, str]]:
    """Return where in a history the entropy changes because it was forked: after which events, and to what."""
    forked: Forked | None = started.forked
    return [] if forked is None else [*forked.earlier, (forked.seq, forked.entropy)]


def copied_events(started: Any) -> int:
    """Return how many events of a history are another run's: what they did is that run's to answer for."""
    return started.forked.seq if started.forked is not None else 0
