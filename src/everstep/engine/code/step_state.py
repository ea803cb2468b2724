"""The state of the attempts at an open step, and when the next one is due."""

from typing import Final

import msgspec

NEVER: Final = -1
"""The due time of an attempt that waits for a person."""
FALLBACK: Final = -2
"""The due time of an attempt that is never made: the step's fallback takes its place."""
DOUBT: Final = -3
"""The due time of an attempt while it is unknown whether the previous one happened."""
KEY: Final = -4
"""The due time of an attempt that waits for the step's key, which another step has."""
ROOM: Final = -5
"""The due time of an attempt that waits for room in the budget."""
SLOT: Final = -6
"""The due time of an attempt that waits for a slot of its named limit."""

EARLIER: Final = "earlier"
"""The reason of a doubt: an earlier generation of the run began the step."""


class StepState(msgspec.Struct, gc=False):
    """The state of the attempts at one open step, according to the history."""

    attempt: int = 0
    failures: int = 0
    due: int | None = None
    details: bytes = b""
    by_person: bool = False
    by: str = ""
    """The worker that began the last attempt (with `once` and `atomic`)."""
    database: str = ""
    """The database of the last attempt (with `atomic`)."""
    doubted_at: int = 0
    because: str = ""
    """Why it is in doubt."""
    happened: bool = False
    """Whether it certainly happened, and only its outcome is missing."""
    probes: int = 0
    round: int = 0
    """With `key=`: the round of the key in which it was begun."""
    inherited: bool = False
    """With `key=`: whether it was begun in an earlier generation of the run, which did not settle it."""
    asked: bool = False
    """Whether its probe or a person was asked since a part of the history was lost."""
    refused: bool = False
    """Whether the budget had no room for it, so that its fallback takes its place."""
