"""Ids of runs, and names of workflows, steps and signals: narrow patterns, so that no id is ever a surprise."""

import re
from functools import cache
from typing import Final

from everstep.errors import Misuse
from everstep.model.untrusted import is_a, text_of, type_name

# The pattern is not compiled here: a program that needs none of it need not wait for that.
RUN_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._:@+/-]{0,199}"
KEY: Final = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,500}"
STEP_PREFIX: Final = "step:"
"""The prefix of the workflow name of a run that a framework makes for one step. The step's name follows."""
NAME: Final = r"[^\s#\x00-\x1f\x7f\ud800-\udfff]{1,200}"


_pattern: Final = cache(re.compile)


def _text(value: object) -> str | None:
    """Return a text as a plain `str`, or None for anything else."""
    return str.__str__(value) if type(value) is str or is_a(value, str) else None


def checked_run_id(run: object) -> str:
    """Return the id if it is one. Raises `Misuse` that says what an id looks like."""
    text = _text(run)
    if text is not None and _pattern(RUN_ID).fullmatch(text):
        return text
    raise Misuse(
        f"{text_of(run, most=80)!r} is not a run id. An id has 1 to 200 characters: letters, digits and . _ : @ + / -, "
        "and begins with a letter or digit."
    )


def checked_name(name: object, what: str) -> str:
    """Return a workflow's, step's or signal's name if it is valid."""
    text = _text(name)
    if text is not None and (_is_plain(text) or _pattern(NAME).fullmatch(text)):
        return text
    raise Misuse(
        f"{text_of(name, most=80)!r} is not a name for a {what}: use 1 to 200 characters without spaces and '#'."
    )


def _is_plain(name: str) -> bool:
    """Return True for a name in the most common form, without matching the pattern."""
    return name.isidentifier() and len(name) <= 200


def checked_key(key: object, step: str) -> str:
    """Return a step's own key if it is valid."""
    text = _text(key)
    if text is None:
        raise Misuse(f"The key of {step} is a {type_name(key)}. A key is a text.")
    if _pattern(KEY).fullmatch(text):
        return text
    raise Misuse(f"The key of {step} has {len(text)} characters. It needs 1 to 500, without control characters.")


def checked_delivery_id(id: object, what: str, most: int) -> str:
    """Return the id that a sender gave a signal or a request, or an empty text for None."""
    if id is None:
        return ""
    text = _text(id)
    if text is not None and len(text) <= most and _pattern(KEY).fullmatch(text):
        return text
    is_of = f"has {len(text)} characters" if text is not None else f"is of the type {type_name(id)}"
    raise Misuse(
        f"The id of a {what} is a text of 1 to {most} characters, without control characters. This one {is_of}."
    )


def child_id(parent: str, generation: int, call: int, branch: int = 0) -> str:
    """Return the default id of a child run: it names its parent and its place in the parent's code.

    After a retry, calls that no longer count give their numbers to other children; `branch` tells them apart.
    """
    middle = (f".g{generation}" if generation > 1 else "") + (f".r{branch}" if branch else "")
    return f"{parent[:170]}{middle}.{call}"
