"""What is secret is stored, and never shown. Everything that shows an event goes through here.

What is exported goes through here as well: an event without what is secret in it keeps the digest of what it was, so
that the chain goes on behind it, and says that something was left out. Nothing is ever done again because of that: such
a history can be looked at, and no more.
"""

from typing import Any, Final

import msgspec

HIDDEN: Final = "(secret)"
"""Stands for what is not shown."""

FIELDS: Final = ("arguments", "details", "error", "preview", "ref", "value", "whole", "whole_ref", "why")
"""The fields of bodies that have, or give away, what a secret step was given, returned or raised."""


def shown_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return an event's body, as plain data, as anybody may see it."""
    if not body.get("secret"):
        return _with_hidden_steps(body) if "carried" in body else body
    return {name: HIDDEN if name in FIELDS else value for name, value in body.items()}


def _with_hidden_steps(body: dict[str, Any]) -> dict[str, Any]:
    """Hide what secret steps of older generations were given and returned."""
    carried = body["carried"]
    if not isinstance(carried, dict) or not isinstance(carried.get("undoable"), list):
        return body
    undoable = [shown_body(one) if isinstance(one, dict) else one for one in carried["undoable"]]
    return {**body, "carried": {**carried, "undoable": undoable}}


LEFT_OUT: Final = "left_out"
"""The field of a body that says that what is secret was left out of it."""
REFS: Final = ("ref", "whole_ref")
"""The fields that name payloads beside the event."""


def has_secrets(body: bytes) -> bool:
    """Tell whether something in an event's body is secret. What cannot be read may be."""
    return b'"secret":true' in body and without_secrets(body) != body


def without_secrets(body: bytes) -> bytes:
    """Return an event's body with nothing in it that is secret; as it is if nothing is."""
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        plain = {"secret": True}
    if not isinstance(plain, dict) or is_left_out(body):
        return body
    shown = shown_body(plain)
    if shown == plain:
        return body
    if "error" in plain:
        shown["error"] = error_without_text(plain["error"])
    return msgspec.json.encode(_without_refs(shown) | {LEFT_OUT: True})


def is_left_out(body: bytes) -> bool:
    """Tell whether what was secret in an event's body was left out."""
    try:
        return bool(msgspec.json.decode(body, type=_LeftOut).left_out)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


class _LeftOut(msgspec.Struct):
    left_out: bool = False


def error_without_text(payload: Any) -> Any:
    """Return the payload of an error, as plain data, with nothing but its type."""
    facts = payload[0] if isinstance(payload, list) and payload and isinstance(payload[0], dict) else {}
    return [shown_error(facts, secret=True)]


def _without_refs(body: dict[str, Any]) -> dict[str, Any]:
    """Payloads that are secret are not there, so nothing names them."""
    if body.get("secret"):
        return {name: value for name, value in body.items() if name not in REFS}
    carried = body["carried"]
    undoable = [_without_refs(one) if one.get("secret") else one for one in carried["undoable"]]
    return {**body, "carried": {**carried, "undoable": undoable}}


def shown_error(facts: dict[str, Any], *, secret: bool) -> dict[str, Any]:
    """Return the facts of an error as anybody may see them: of a secret one, only its type."""
    return {"type": facts.get("type", ""), "message": HIDDEN, "traceback": ""} if secret else facts
