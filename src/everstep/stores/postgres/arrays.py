"""Columns of many rows, as arrays that say what they are: of numbers, texts or bytes.

psycopg can write any list, value by value. That would be half of what a commit costs the client; and a list of nothing
but NULLs would have another type than the same column with a value in it, so that a statement is prepared once more for
each mixture of both. Here a whole column is written at once, and its type is the same whatever is in it.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from psycopg.adapt import Dumper
from psycopg.pq import Format

from everstep.stores.sql.nul import escaped
from everstep.stores.sql.rows import Row

NULL: Final = b"\xff\xff\xff\xff"
HEAD: Final = struct.Struct(">iiIii").pack
"""Dimensions, whether there are NULLs, the type of the elements, their count, the number of the first."""
EMPTY: Final = struct.Struct(">iiI").pack
LENGTH: Final = struct.Struct(">i").pack


class Numbers(list[Any]):
    """A column of bigints."""


class Texts(list[Any]):
    """A column of texts."""


class Blobs(list[Any]):
    """A column of bytes."""


OID_OF_ELEMENT: Final = {"n": 20, "t": 25, "b": 17}
OID_OF_ARRAY: Final = {"n": 1016, "t": 1009, "b": 1001}


def array_bytes(kind: str, values: Sequence[Any]) -> bytes:
    """Return a column as it is sent. `kind`: `n`umbers, `t`exts or `b`ytes."""
    element = OID_OF_ELEMENT[kind]
    if not values:
        return EMPTY(0, 0, element)
    has_null = None in values
    head = HEAD(1, has_null, element, len(values), 1)
    if kind == "b":
        return head + _joined(values)
    if kind == "t":
        return head + _joined([None if value is None else escaped(value).encode() for value in values])
    if has_null:
        one = _numbers(1)
        return head + b"".join([NULL if value is None else one(8, value) for value in values])
    both = [8] * (2 * len(values))
    both[1::2] = values
    return head + _numbers(len(values))(*both)


@lru_cache(maxsize=1000)
def _numbers(count: int) -> Callable[..., bytes]:
    """Return what writes so many numbers, each of eight bytes, after its length."""
    return struct.Struct(">" + "iq" * count).pack


def _joined(values: Iterable[bytes | None]) -> bytes:
    parts: list[bytes] = []
    add = parts.append
    for value in values:
        if value is None:
            add(NULL)
        else:
            add(LENGTH(len(value)))
            add(value)
    return b"".join(parts)


class _Array(Dumper):
    format = Format.BINARY
    kind: str

    def dump(self, obj: list[Any]) -> bytes:
        """Return an array as it is sent."""
        return array_bytes(self.kind, obj)


class NumbersDumper(_Array):
    """Writes numbers and truth values."""

    kind = "n"
    oid = OID_OF_ARRAY[kind]


class BlobsDumper(_Array):
    """Writes bytes."""

    kind = "b"
    oid = OID_OF_ARRAY[kind]


class TextsDumper(_Array):
    """Writes texts."""

    kind = "t"
    oid = OID_OF_ARRAY[kind]


_KINDS: Final[dict[str, type[list[Any]]]] = {"n": Numbers, "t": Texts, "b": Blobs}


def arrays(kinds: str, rows: Sequence[Row]) -> list[list[Any]]:
    """Return rows as one list for each of their columns. `kinds`: a letter for each, `n`umbers, `t`exts or `b`ytes."""
    if not rows:
        return [_KINDS[kind]() for kind in kinds]
    return [_KINDS[kind](column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)]
