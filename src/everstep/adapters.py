"""What adapters for agent frameworks are made of. Applications do not need it."""

from everstep.effects.surroundings import CURRENT, Outside, call_outside_with
from everstep.engine.calling import INLINE
from everstep.engine.grounds import Ground, ground_of
from everstep.engine.streams import stream_of
from everstep.model.digests import digest_of
from everstep.stores.saved import (
    ChangeItems,
    ChangeThread,
    SavedItem,
    SavedPart,
    SavedState,
    SavedWrite,
)

__all__ = [
    "CURRENT",
    "INLINE",
    "ChangeItems",
    "ChangeThread",
    "Ground",
    "Outside",
    "SavedItem",
    "SavedPart",
    "SavedState",
    "SavedWrite",
    "call_outside_with",
    "digest_of",
    "ground_of",
    "stream_of",
]
