"""Payloads as plain JSON data for people and other programs, without the classes of the user's code.

Types that JSON lacks are written in the usual way: a large number as a number, a time in ISO 8601, a dict with numbers
for keys as an object. An instance of a class becomes the dict of its fields.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from everstep.codec.leaves import LOADERS
from everstep.codec.preview import fields_only


def shown(payload: bytes) -> Any:
    """Return the value in a payload as plain data. What does not fit its types is returned as it is stored."""
    envelope = msgspec.json.decode(payload)
    if len(envelope) == 1:
        return envelope[0]
    try:
        found = _shown(envelope[0], envelope[1])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        found = msgspec.json.decode(payload)[0]
    return fields_only(found)


def payload_json(payload: bytes) -> Any:
    """Return the value in a payload as plain JSON data; None if it cannot be read."""
    try:
        if len(envelope := msgspec.json.decode(payload)) > 1:  # with types that JSON does not have
            return shown(payload)
        return envelope[0]
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError):
        return None


def _shown(value: Any, tree: Any) -> Any:
    if tree is None:
        return value
    if isinstance(tree, str):
        show = _SHOW.get(tree)
        return show(value) if show is not None else value
    if isinstance(tree, list) and len(tree) > 1:
        inner = _shown(value, tree[1]) if len(tree) == 3 else _members(value, tree[1])
        return _shown(inner, tree[0])
    return _members(value, tree)


def _members(value: Any, members: Any) -> Any:
    if isinstance(members, list):
        every = members[0]
        if isinstance(value, dict):
            return {key: _shown(member, every) for key, member in value.items()}
        return [_shown(member, every) for member in value]
    if members is None:
        return value
    for name, tree in members.items():
        key = int(name) if isinstance(value, list) else name
        value[key] = _shown(value[key], tree)
    return value


def _time(tag: str) -> Callable[[Any], Any]:
    return lambda stored: LOADERS[tag](stored).isoformat()


def _object(pairs: Any) -> Any:
    """Return pairs as an object, if no two of their keys have the same text."""
    found = {key if isinstance(key, str) else msgspec.json.encode(key).decode(): value for key, value in pairs}
    return found if len(found) == len(pairs) else pairs


_SHOW: Final[dict[str, Callable[[Any], Any]]] = {
    "int": LOADERS["int"],
    "str": lambda stored: LOADERS["str"](stored).encode("utf-8", "backslashreplace").decode("utf-8"),
    "datetime": _time("datetime"),
    "time": _time("time"),
    "timedelta": lambda stored: msgspec.to_builtins(LOADERS["timedelta"](stored)),
    "dict": _object,
}
