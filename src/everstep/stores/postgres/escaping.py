"""Texts with a NUL, which PostgreSQL refuses, and ours may have: an id, a preview or a note is any text.

So a NUL is written as two characters, the rare control character SUBSTITUTE and `0`, and that character itself as
itself and `1`. Two different texts stay different, a beginning of a text stays one, and whoever looks into a table sees
what they expect.
"""

from typing import Final

SUBSTITUTE: Final = "\x1a"
NUL: Final = "\0"


def escaped(value: str) -> str:
    """Return a text as PostgreSQL takes it."""
    if NUL in value or SUBSTITUTE in value:
        return value.replace(SUBSTITUTE, SUBSTITUTE + "1").replace(NUL, SUBSTITUTE + "0")
    return value


def unescaped(value: str) -> str:
    """Return a text as it was before `escaped`."""
    if SUBSTITUTE not in value:
        return value
    first, *rest = value.split(SUBSTITUTE)
    return first + "".join((NUL if part[:1] == "0" else SUBSTITUTE) + part[1:] for part in rest)
