"""What is known about the attempts at an open step, and when the next one is due."""

from typing import Final

import msgspec

NEVER: Final = -1
"""The due time of an attempt that waits for a person."""
FALLBACK: Final = -2
"""The due time of an attempt that is never made: the step's fallback takes its place."""
DOUBT: Final = -3
"""The due time of an attempt about which nobody knows yet whether the one before it happened."""
KEY: Final = -4
"""The due time of an attempt that is not made before the step gets its key, which another one has."""
ROOM: Final = -5
"""The due time of an attempt that is made when there is room for it in the budget."""
SLOT: Final = -6
"""The due time of an attempt that is made when its named limit has a slot for it."""

EARLIER: Final = "earlier"
"""Why a step is in doubt that an earlier generation of its run began."""


class StepState(msgspec.Struct, gc=False):
    """What the history says about the attempts at one open step."""

    attempt: int = 0
    failures: int = 0
    due: int | None = None
    details: bytes = b""
    by_person: bool = False
    by: str = ""
    """The worker that began the last attempt (with `once` and `atomic`)."""
    database: str = ""
    """Where the last attempt was to write (with `atomic`)."""
    doubted_at: int = 0
    because: str = ""
    """Why it is in doubt."""
    happened: bool = False
    """Whether it surely happened, and only its outcome is missing."""
    probes: int = 0
    round: int = 0
    """With `key=`: the round of the key in which it was begun."""
    inherited: bool = False
    """With `key=`: whether it was begun in an earlier generation of the run, which did not settle it."""
    asked: bool = False
    """Whether it was asked about since a part of the history was lost."""
    refused: bool = False
    """Whether the budget had no room for it, so that its fallback takes its place."""
