"""What is secret is stored, and never shown. Everything that shows an event goes through here."""

from typing import Any, Final

HIDDEN: Final = "(secret)"
"""Stands for what is not shown."""

FIELDS: Final = ("arguments", "details", "error", "preview", "ref", "value", "whole", "why")
"""The fields of bodies that have, or give away, what a secret step was given, returned or raised."""


def shown_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return an event's body, as plain data, as anybody may see it."""
    if not body.get("secret"):
        return body
    return {name: HIDDEN if name in FIELDS else value for name, value in body.items()}


def shown_error(facts: dict[str, Any], *, secret: bool) -> dict[str, Any]:
    """Return the facts of an error as anybody may see them: of a secret one, only its type."""
    return {"type": facts.get("type", ""), "message": HIDDEN, "traceback": ""} if secret else facts
