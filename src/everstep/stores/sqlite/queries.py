"""The named statements of queries.sql, and statements for batches."""

import os
from functools import cache
from typing import Final

HERE: Final = os.path.dirname(__file__)
ROWS_MAX: Final = 32
"""The maximum number of rows in one statement. Longer statements gain nothing, and take longer to prepare than a small
batch to write.
"""


def sql_text(*names: str) -> str:
    """Return the text of a file of this package. (`importlib.resources` would take longer to import than to read.)"""
    with open(os.path.join(HERE, *names), encoding="utf-8") as stream:
        return stream.read()


@cache
def statements(file: str) -> dict[str, str]:
    """Return the statements of a file of this package by their names."""
    return {name: _without_comments(part) for name, part in _parts(file).items()}


class Texts(dict[str, str]):
    """Statements by their names, each prepared for use at its first use: a program needs few of them.

    A file is read when a name is in none of the files before it.
    """

    def __init__(self, *files: str) -> None:
        super().__init__()
        self._files = files

    def __missing__(self, name: str) -> str:
        for file in self._files:
            if name in _parts(file):
                # Comments are for readers; a cached statement without them is found faster.
                ready = self[name] = _without_comments(_parts(file)[name])
                return ready
        raise KeyError(name)


@cache
def _parts(file: str) -> dict[str, str]:
    """Return the texts of a file by their names, each with its comments."""
    parts = sql_text(file).split("-- name: ")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def _without_comments(part: str) -> str:
    lines = (line.strip() for line in part.splitlines() if not line.lstrip().startswith("--"))
    return " ".join(line for line in lines if line).removesuffix(";")


_QUERIES: Final = Texts("queries.sql")


def query(name: str) -> str:
    """Return a statement by its name."""
    return _QUERIES[name]


def names() -> list[str]:
    """Return the names of all statements."""
    return list(_parts("queries.sql"))


@cache
def for_rows(name: str) -> dict[int, str]:
    """Return a statement by the number of rows of its parameters: `{rows:3}` becomes `(?,?,?),(?,?,?)…`.

    Of 1, 2, 4, 8, 16 or 32 rows: so there are few texts, all of them prepared once and kept by APSW.
    """
    texts = {}
    for count in (1 << power for power in range(ROWS_MAX.bit_length())):
        text, *others = query(name).split("{rows:")
        for other in others:
            width, _, rest = other.partition("}")
            text += ",".join(["(" + ",".join("?" * int(width)) + ")"] * count) + rest
        texts[count] = text
    return texts
