"""How values go to PostgreSQL and come back.

Texts are escaped (see stores/sql/nul.py), and in UTF-8, as each session or transaction of the store sets: psycopg's
idea of the encoding may come from another client's transaction behind a pooler. What is written for every step uses
direct.py instead.

Numbers and truth values are always 8 bytes: so a statement is prepared once, whatever its values.
"""

from typing import Any, Final

import psycopg
from psycopg.pq import Format
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import BytesBinaryDumper, StrBinaryDumper, TextBinaryLoader, TextLoader

from everstep.stores.sql.nul import escaped, unescaped


class TextDumper(StrBinaryDumper):
    """Writes texts."""

    def dump(self, obj: str) -> Any:
        """Return the bytes of a text."""
        return escaped(obj).encode()


class _BinaryText(TextBinaryLoader):
    def load(self, data: Any) -> Any:
        return unescaped(bytes(data).decode())


class _PlainText(TextLoader):
    def load(self, data: Any) -> Any:
        return unescaped(bytes(data).decode())


def adapt(context: "psycopg.Connection[Any] | psycopg.RawCursor[Any]") -> None:
    """Make a connection, or a cursor, write and read values in this way."""
    adapters = context.adapters
    for kind, dumper in ((str, TextDumper), (int, Int8BinaryDumper), (bool, Int8BinaryDumper)):
        adapters.register_dumper(kind, dumper)
    adapters.register_dumper(bytes, BytesBinaryDumper)
    adapters.register_dumper(list, ListBinaryDumper)
    adapters.register_loader("text", _BinaryText)
    adapters.register_loader("text", _PlainText)


BINARY: Final = Format.BINARY
