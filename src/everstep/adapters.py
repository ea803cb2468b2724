"""What adapters for agent frameworks are made of. Applications do not need it."""

from everstep.codec.kinds import kind_of, private_values
from everstep.effects.surroundings import CURRENT, Outside, call_outside_with
from everstep.engine.app.blocking import stream_of
from everstep.engine.app.ground import Ground, Right, ground_of
from everstep.engine.code.calls import INLINE
from everstep.engine.code.commands import LEFT_OUT
from everstep.engine.code.loop import Generators
from everstep.engine.history.saved import (
    WHOLE,
    Body,
    Ref,
    body_of,
    first_digest,
    joined,
    moved,
    moved_write,
    next_digest,
    state_row,
    value_of_write,
    write_row,
)
from everstep.model.digests import digest_of
from everstep.stores.rows.saved import (
    ChangeItems,
    ChangeThread,
    SavedItem,
    SavedPart,
    SavedState,
    SavedWrite,
    labels_of,
    namespace_of,
)

__all__ = [
    "CURRENT",
    "INLINE",
    "LEFT_OUT",
    "WHOLE",
    "Body",
    "ChangeItems",
    "ChangeThread",
    "Generators",
    "Ground",
    "Outside",
    "Ref",
    "Right",
    "SavedItem",
    "SavedPart",
    "SavedState",
    "SavedWrite",
    "body_of",
    "call_outside_with",
    "digest_of",
    "first_digest",
    "ground_of",
    "joined",
    "kind_of",
    "labels_of",
    "moved",
    "moved_write",
    "namespace_of",
    "next_digest",
    "private_values",
    "state_row",
    "stream_of",
    "value_of_write",
    "write_row",
]
