"""What is secret is stored, and never shown. Everything that shows an event goes through here."""

from typing import Any, Final

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


def shown_error(facts: dict[str, Any], *, secret: bool) -> dict[str, Any]:
    """Return the facts of an error as anybody may see them: of a secret one, only its type."""
    return {"type": facts.get("type", ""), "message": HIDDEN, "traceback": ""} if secret else facts
