"""Which releases can use a store: an older release can if the newest migration only adds."""

from collections.abc import Sequence
from typing import Final

COMPATIBLE: Final = "-- Compatible with the version before."
"""The comment in a migration that only adds: tables, indexes, columns that may be empty or have a default. A release
can use a store that is one version newer than it knows, if that version's migration has this comment.
"""


def is_compatible(migration: str) -> bool:
    """Return True if a release that does not know a migration may still use the store."""
    return any(line.strip() == COMPATIBLE for line in migration.splitlines())


def works_with(migrations: Sequence[str], version: int) -> int:
    """Return the version that a release must know, at least, to use a store of this version."""
    return max((number for number in range(1, version + 1) if not is_compatible(migrations[number - 1])), default=1)
