"""How values go to PostgreSQL and come back.

PostgreSQL's texts have no NUL, and ours may: an id, a preview or a note is any text. So a NUL is written as two
characters, the rare control character SUBSTITUTE and `0`, and that character itself as itself and `1`. Two different
texts stay different, a beginning of a text stays one, and whoever looks into a table sees what they expect.

Numbers and truth values are always 8 bytes: a statement is then prepared once, whatever its values.
"""

from typing import Any, Final

import psycopg
from psycopg.pq import Format
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import BytesBinaryDumper, StrBinaryDumper, TextBinaryLoader, TextLoader

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


class TextDumper(StrBinaryDumper):
    """Writes texts."""

    def dump(self, obj: str) -> Any:
        """Return the bytes of a text."""
        return super().dump(escaped(obj))


class _BinaryText(TextBinaryLoader):
    def load(self, data: Any) -> Any:
        return unescaped(super().load(data))  # type: ignore[arg-type]  # the client's encoding is UTF-8


class _PlainText(TextLoader):
    def load(self, data: Any) -> Any:
        return unescaped(super().load(data))  # type: ignore[arg-type]


def adapt(context: "psycopg.Connection[Any] | psycopg.RawCursor[Any]") -> None:
    """Let a connection, or a cursor, write and read values in this way."""
    adapters = context.adapters
    for kind, dumper in ((str, TextDumper), (int, Int8BinaryDumper), (bool, Int8BinaryDumper)):
        adapters.register_dumper(kind, dumper)
    adapters.register_dumper(bytes, BytesBinaryDumper)
    adapters.register_dumper(list, ListBinaryDumper)
    adapters.register_loader("text", _BinaryText)
    adapters.register_loader("text", _PlainText)


BINARY: Final = Format.BINARY
