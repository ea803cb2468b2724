"""Values to canonical bytes and back, by a closed set of types: never pickle, never an import by a stored name."""

from everstep.codec.annotations import plain_type, types_text
from everstep.codec.canonical import is_same, meaning_digest
from everstep.codec.codec import Arguments, Codec, error_facts, is_immutable_scalar
from everstep.codec.nearby import near
from everstep.codec.signature import Live, Signature
from everstep.codec.tables import ANY, Types, register, types_of

__all__ = [
    "ANY",
    "Arguments",
    "Codec",
    "Live",
    "Signature",
    "Types",
    "error_facts",
    "is_immutable_scalar",
    "is_same",
    "meaning_digest",
    "near",
    "plain_type",
    "register",
    "types_of",
    "types_text",
]
