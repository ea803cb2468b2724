"""The named statements of queries.sql, and statements for batches."""

import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_ROWS: Final = re.compile(r"\{rows:(\d+)\}")

HERE: Final = os.path.dirname(__file__)
ROWS_MAX: Final = 32
"""More in one statement gain nothing, and such a statement takes longer to prepare than a small batch to write."""


def sql_text(*names: str) -> str:
    """Return the text of a file of this package. (`importlib.resources` would take longer to import than to read.)"""
    with open(os.path.join(HERE, *names), encoding="utf-8") as stream:
        return stream.read()


@cache
def statements(file: str) -> dict[str, str]:
    """Return the statements of a file of this package by their names."""
    parts = _NAME.split(sql_text(file))[1:]
    # Comments are for readers; without them a cached statement is found quicker.
    return {name: _without_comments(part) for name, part in zip(parts[::2], parts[1::2], strict=True)}


def _without_comments(part: str) -> str:
    lines = (line.strip() for line in part.splitlines() if not line.lstrip().startswith("--"))
    return " ".join(line for line in lines if line).removesuffix(";")


def query(name: str) -> str:
    """Return a statement by its name."""
    return statements("queries.sql")[name]


def names() -> list[str]:
    """Return the names of all statements."""
    return list(statements("queries.sql"))


@cache
def _for_rows(name: str, count: int) -> str:
    """Return a statement for this many rows of parameters."""

    def rows(match: re.Match[str]) -> str:
        return ",".join(["(" + ",".join("?" * int(match[1])) + ")"] * count)

    return _ROWS.sub(rows, query(name))


def batches(name: str, width: int, parameters: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Split a long list of parameters, `width` for each row, into statements of 1, 2, 4, 8, 16 or 32 rows.

    So there are few different texts, all of them prepared once and kept by APSW, and few statements for any number.
    """
    rows = len(parameters) // width
    done = 0
    while done < rows:
        count = min(ROWS_MAX, 1 << ((rows - done).bit_length() - 1))
        yield _for_rows(name, count), parameters[done * width : (done + count) * width]
        done += count
