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

from everstep.stores.postgres.escaping import escaped
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


class _Array(Dumper):
    format = Format.BINARY
    element: int

    def dump(self, obj: list[Any]) -> bytes:
        """Return an array as it is sent."""
        if not obj:
            return EMPTY(0, 0, self.element)
        has_null = None in obj
        return HEAD(1, has_null, self.element, len(obj), 1) + self.written(obj, has_null)

    def written(self, values: Sequence[Any], has_null: bool) -> bytes:
        """Return the elements, each after its length."""
        raise NotImplementedError


class NumbersDumper(_Array):
    """Writes numbers and truth values."""

    oid = 1016
    element = 20

    def written(self, values: Sequence[Any], has_null: bool) -> bytes:
        """Return the elements. Each has eight bytes."""
        if has_null:
            one = _numbers(1)
            return b"".join([NULL if value is None else one(8, value) for value in values])
        both = [8] * (2 * len(values))
        both[1::2] = values
        return _numbers(len(values))(*both)


@lru_cache(maxsize=1000)
def _numbers(count: int) -> Callable[..., bytes]:
    """Return what writes so many numbers."""
    return struct.Struct(">" + "iq" * count).pack


class BlobsDumper(_Array):
    """Writes bytes."""

    oid = 1001
    element = 17

    def written(self, values: Sequence[Any], has_null: bool) -> bytes:
        """Return the elements, as they are."""
        return _joined(values)


class TextsDumper(_Array):
    """Writes texts."""

    oid = 1009
    element = 25

    def written(self, values: Sequence[Any], has_null: bool) -> bytes:
        """Return the elements, in UTF-8 and without NULs."""
        return _joined([None if value is None else escaped(value).encode() for value in values])


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


_KINDS: Final[dict[str, type[list[Any]]]] = {"n": Numbers, "t": Texts, "b": Blobs}


def arrays(kinds: str, rows: Sequence[Row]) -> list[list[Any]]:
    """Return rows as one list for each of their columns. `kinds`: a letter for each, `n`umbers, `t`exts or `b`ytes."""
    if not rows:
        return [_KINDS[kind]() for kind in kinds]
    return [_KINDS[kind](column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)]
