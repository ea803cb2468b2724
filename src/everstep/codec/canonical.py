"""The canonical bytes of a written value: the same for equal values, whatever the order of their keys and members.

Payloads keep the order that the user gave, except for the members of sets, which have none. Digests of arguments are
made from this form, and comparisons with a stored value use it: `is_same`, `meaning_digest`.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from everstep.codec.kinds import NOT_FIELDS, UNSET
from everstep.model.digests import hex_digest_of

Tree = str | dict[str, Any] | list[Any] | None

canonical_json = msgspec.json.Encoder(order="deterministic").encode
"""The canonical bytes of plain JSON."""


def canonical_bytes(value: Any, tree: Tree) -> bytes:
    """Return the canonical bytes of a value and its type tree. No two different values have the same."""
    if tree is None:
        return canonical_json(value)
    if isinstance(tree, str):
        return _tagged(tree, _sorted_if_free(tree, value, None))
    if isinstance(tree, dict) or len(tree) == 1:
        return _members(value, tree)
    tag, members = tree[0], tree[1]
    if len(tree) == 3:
        return _tagged(tag, canonical_bytes(value, members))
    return _tagged(tag, _sorted_if_free(tag, value, members))


def is_same(payload: msgspec.Raw | bytes, other: bytes) -> bool:
    """Return True if two payloads have equal values. (Older releases wrote the members of sets in any order.)"""
    if bytes(payload) == other:
        return True
    mine = _meaning(payload)
    return mine is not None and mine == _meaning(other)


def is_equal(payload: msgspec.Raw | bytes, other: bytes) -> bool:
    """Return True if two payloads have equal values, as the classes of these values compare them.

    Models of pydantic are equal whether a field was given or has its default. Payloads say which, and so do digests.
    """
    if is_same(payload, other):
        return True
    mine = _meaning(payload, without_unset)
    return mine is not None and mine == _meaning(other, without_unset)


def without_unset(value: Any) -> Any:
    """Return stored data without the record of which fields of a model have their defaults."""
    if isinstance(value, list):
        return [without_unset(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_unset(one) for key, one in value.items()}
    rest = kept.get(NOT_FIELDS)
    if isinstance(rest, dict) and isinstance(rest.get(UNSET), list):
        kept[NOT_FIELDS] = {key: one for key, one in rest.items() if key != UNSET}
        if not kept[NOT_FIELDS]:
            del kept[NOT_FIELDS]
    return kept


def meaning_digest(payload: bytes) -> str:
    """Return the digest of a payload's value: the same for equal values, whatever the order of their keys.

    For a value without types whose keys are sorted it is the digest of the payload itself.
    """
    meaning = _meaning(payload)
    return hex_digest_of(payload if meaning is None else meaning)


def _meaning(payload: msgspec.Raw | bytes, of: Callable[[Any], Any] | None = None) -> bytes | None:
    """Return the canonical bytes of a payload, or None if it is not one."""
    try:
        decoded = msgspec.json.decode(payload)
        value = decoded[0] if of is None else of(decoded[0])
        return b"[%b]" % canonical_bytes(value, (*decoded, None)[1])
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _tagged(tag: str, data: bytes) -> bytes:
    return b"<%b %b>" % (canonical_json(tag), data)  # no JSON begins like this, so no plain value has these bytes


def _sorted_if_free(tag: str, value: Any, members: Any) -> bytes:
    if tag in ("set", "frozenset", "dict", "Counter"):
        each = [canonical_bytes(member, _tree_of(members, str(index))) for index, member in enumerate(value)]
        return b"[%b]" % b",".join(sorted(each))
    return canonical_json(value) if members is None else _members(value, members)


def _tree_of(members: Any, key: str) -> Tree:
    if members is None:
        return None
    tree: Tree = members[0] if isinstance(members, list) else members.get(key)
    return tree


def _members(value: Any, members: Any) -> bytes:
    if isinstance(value, dict):
        named = ((canonical_json(key), canonical_bytes(value[key], _tree_of(members, key))) for key in sorted(value))
        return b"{%b}" % b",".join(b"%b:%b" % pair for pair in named)
    each = (canonical_bytes(member, _tree_of(members, str(index))) for index, member in enumerate(value))
    return b"[%b]" % b",".join(each)
