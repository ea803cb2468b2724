"""Lost tails: a database that was replaced by a copy of itself may lack the newest events of a history.

They were durable, and this process has told others of them or acted on them. A history that ends earlier is sound by
its digests, so nothing in the store can tell. Only whoever remembers its head can.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from everstep.model.events import EventRow
from everstep.model.status import Status


class LostTail(msgspec.Struct, kw_only=True):
    """A run whose history no longer has an event that this process saw durable."""

    run: str
    generation: int
    seen: int
    """The number of the newest event that was seen durable."""
    seen_at: int
    seen_status: str
    """What the run was with that event."""
    there: int | None
    """The number of the newest event that is there now; None if the run itself is gone."""
    there_at: int = 0
    status: Status | None = None
    """What the run is now."""
    events: list[EventRow] = []
    """The newest events of this history that this process wrote, as far as it still has them."""

    @property
    def is_other(self) -> bool:
        """Whether there is an event of the same number, and it is another one: somebody went on without the tail."""
        return self.there is not None and self.there >= self.seen


class TailStore(Protocol):
    """What a store tells about lost tails."""

    def lost_tails(self) -> Sequence[LostTail]:
        """Return the runs that were found to have lost their tails, each once. Very cheap, and mostly nothing.

        A store that can be replaced under a running process compares before it writes the next thing: whoever asks
        after a verdict knows whatever could be known when that was reached. Others return nothing.
        """
        ...
