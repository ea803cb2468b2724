"""Values to canonical bytes and back, by a closed set of types: never pickle, never an import by a stored name."""

from everstep.codec.annotations import names_around_function, plain_type, types_text
from everstep.codec.canonical import is_equal, is_same, meaning_digest
from everstep.codec.codec import Arguments, Codec, error_facts, is_immutable_scalar
from everstep.codec.conversion import as_declared, converted
from everstep.codec.nearby import near
from everstep.codec.preview import fields_only, without_internals
from everstep.codec.signature import Live, Signature
from everstep.codec.tables import ANY, PLAIN, Types, register, types_of

__all__ = [
    "ANY",
    "PLAIN",
    "Arguments",
    "Codec",
    "Live",
    "Signature",
    "Types",
    "as_declared",
    "converted",
    "error_facts",
    "fields_only",
    "is_equal",
    "is_immutable_scalar",
    "is_same",
    "meaning_digest",
    "names_around_function",
    "near",
    "plain_type",
    "register",
    "types_of",
    "types_text",
    "without_internals",
]
