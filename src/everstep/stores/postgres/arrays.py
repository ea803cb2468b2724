"""Columns of many rows, as arrays of numbers, texts or bytes.

psycopg can write any list, value by value. That would be half of what a commit costs the client. Here a whole column is
written at once.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from everstep.stores.sql.nul import NUL, SUBSTITUTE, escaped

NULL: Final = b"\xff\xff\xff\xff"
HEAD: Final = struct.Struct(">iiIii").pack
"""Dimensions, whether there are NULLs, the type of the elements, their count, the index of the first."""
EMPTY: Final = struct.Struct(">iiI").pack
LENGTH: Final = struct.Struct(">i").pack


OID_OF_ELEMENT: Final = {"n": 20, "t": 25, "b": 17}
OID_OF_ARRAY: Final = {"n": 1016, "t": 1009, "b": 1001}


def array_bytes(kind: str, values: Sequence[Any]) -> bytes:
    """Return a column in its wire format. `kind`: `n`umbers, `t`exts or `b`ytes."""
    element = OID_OF_ELEMENT[kind]
    if not values:
        return EMPTY(0, 0, element)
    has_null = None in values
    head = HEAD(1, has_null, element, len(values), 1)
    if has_null and values.count(None) == len(values):
        return head + NULL * len(values)
    if kind == "b":
        return head + (_joined_with_nulls(values) if has_null else _joined(values))
    if kind == "t":
        if has_null:
            return head + _joined_with_nulls([None if value is None else escaped(value).encode() for value in values])
        together = "".join(values)
        if NUL in together or SUBSTITUTE in together:
            values = list(map(escaped, values))
        return head + _joined([value.encode() for value in values])
    if has_null:
        one = _numbers(1)
        return head + b"".join([NULL if value is None else one(8, value) for value in values])
    both = [8] * (2 * len(values))
    both[1::2] = values
    return head + _numbers(len(values))(*both)


@lru_cache(maxsize=1000)
def _numbers(count: int) -> Callable[..., bytes]:
    """Return a function that writes `count` numbers of eight bytes, each after its length."""
    return struct.Struct(">" + "iq" * count).pack


def _joined(values: Sequence[bytes]) -> bytes:
    """Return values, each after its length. In most columns all lengths are equal."""
    lengths = set(map(len, values))
    if len(lengths) == 1:
        length = LENGTH(lengths.pop())
        return length + length.join(values)
    return _joined_with_nulls(values)


def _joined_with_nulls(values: Iterable[bytes | None]) -> bytes:
    parts: list[bytes] = []
    add = parts.append
    for value in values:
        if value is None:
            add(NULL)
        else:
            add(LENGTH(len(value)))
            add(value)
    return b"".join(parts)
