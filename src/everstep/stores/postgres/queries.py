"""The named statements of this package's .sql files, for a schema."""

import os
import re
from functools import cache
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_SCHEMA: Final = re.compile(r"\beverstep(?=\.)|(?<=SCHEMA IF NOT EXISTS )everstep\b|(?<=SCHEMA )everstep\b")

HERE: Final = os.path.dirname(__file__)


def sql_text(schema: str, *names: str) -> str:
    """Return the text of a file of this package for another schema than `everstep`."""
    with open(os.path.join(HERE, *names), encoding="utf-8") as stream:
        return _SCHEMA.sub(f'"{schema}"', stream.read())


@cache
def statements(schema: str) -> dict[str, str]:
    """Return all statements by their names."""
    found: dict[str, str] = {}
    for file in ("queries.sql", "moving.sql", "queues.sql", "heads.sql", "saved.sql"):
        parts = _NAME.split(sql_text(schema, file))[1:]
        found |= {name: _without_comments(part) for name, part in zip(parts[::2], parts[1::2], strict=True)}
    return found


def _without_comments(part: str) -> str:
    lines = (line.strip() for line in part.splitlines() if not line.lstrip().startswith("--"))
    return " ".join(line for line in lines if line).removesuffix(";")
