"""Secrets are stored, and never shown. Everything that shows an event uses this module.

So does everything that exports: an event without its secrets keeps the digest of the original, so that the chain
continues after it, and says that something was left out. Such a history can be inspected, and never executed.
"""

from typing import Any, Final

import msgspec

HIDDEN: Final = "(secret)"
"""Shown in the place of a secret."""

FIELDS: Final = ("arguments", "details", "error", "preview", "ref", "value", "whole", "whole_ref", "why")
"""The fields of bodies that contain, or give away, a secret step's arguments, return value or error."""


def shown_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return an event's body, as plain data, without its secrets."""
    if not body.get("secret"):
        return _with_hidden_steps(body) if "carried" in body else body
    return {name: HIDDEN if name in FIELDS else value for name, value in body.items()}


def _with_hidden_steps(body: dict[str, Any]) -> dict[str, Any]:
    """Hide the arguments and outcomes of secret steps of older generations."""
    carried = body["carried"]
    if not isinstance(carried, dict) or not isinstance(carried.get("undoable"), list):
        return body
    undoable = [shown_body(one) if isinstance(one, dict) else one for one in carried["undoable"]]
    return {**body, "carried": {**carried, "undoable": undoable}}


LEFT_OUT: Final = "left_out"
"""The field of a body that says that its secrets were left out."""
REFS: Final = ("ref", "whole_ref")
"""The fields that name payloads stored outside the event."""


def has_secrets(body: bytes) -> bool:
    """Return True if an event's body has a secret, or cannot be read."""
    return b'"secret":true' in body and without_secrets(body) != body


def without_secrets(body: bytes) -> bytes:
    """Return an event's body without its secrets; unchanged if it has none."""
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
    """Return True if secrets were left out of an event's body."""
    try:
        return bool(msgspec.json.decode(body, type=_LeftOut).left_out)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


class _LeftOut(msgspec.Struct):
    left_out: bool = False


def error_without_text(payload: Any) -> Any:
    """Return the payload of an error, as plain data, with only its type."""
    facts = payload[0] if isinstance(payload, list) and payload and isinstance(payload[0], dict) else {}
    return [shown_error(facts, secret=True)]


def _without_refs(body: dict[str, Any]) -> dict[str, Any]:
    """Remove the references to secret payloads, because the payloads are left out."""
    if body.get("secret"):
        return {name: value for name, value in body.items() if name not in REFS}
    carried = body["carried"]
    undoable = [_without_refs(one) if one.get("secret") else one for one in carried["undoable"]]
    return {**body, "carried": {**carried, "undoable": undoable}}


def shown_error(facts: dict[str, Any], *, secret: bool) -> dict[str, Any]:
    """Return the facts of an error without its secrets: of a secret error, only its type."""
    return {"type": facts.get("type", ""), "message": HIDDEN, "traceback": ""} if secret else facts
