"""Texts for PostgreSQL, whose texts cannot have a NUL. Ours may have one, because an id is any text.

A NUL is written as two characters, the rare control character SUBSTITUTE and `0`, and that character itself as itself
and `1`. Two different texts stay different, a prefix of a text stays a prefix, and ordinary texts look the same in the
tables.
"""

from typing import Final

SUBSTITUTE: Final = "\x1a"
NUL: Final = "\0"


def escaped(value: str) -> str:
    """Return a text in the form that PostgreSQL accepts."""
    if NUL in value or SUBSTITUTE in value:
        return value.replace(SUBSTITUTE, SUBSTITUTE + "1").replace(NUL, SUBSTITUTE + "0")
    return value


def unescaped(value: str) -> str:
    """Return a text as it was before `escaped`."""
    if SUBSTITUTE not in value:
        return value
    first, *rest = value.split(SUBSTITUTE)
    return first + "".join((NUL if part[:1] == "0" else SUBSTITUTE) + part[1:] for part in rest)
