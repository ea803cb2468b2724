"""Which releases can use a store: one that is older than its newest migration may, if that migration only adds."""

from collections.abc import Sequence
from typing import Final

COMPATIBLE: Final = "-- Compatible with the version before."
"""What a migration says that only adds: tables, indexes, columns that may be empty or have a default. A release can use
a store that is one version newer than it knows, if that version's migration says so."""


def is_compatible(migration: str) -> bool:
    """Tell whether a release that does not know a migration may go on with the store all the same."""
    return any(line.strip() == COMPATIBLE for line in migration.splitlines())


def works_with(migrations: Sequence[str], version: int) -> int:
    """Return the version that a release has to know at least, to use a store of this version."""
    return max((number for number in range(1, version + 1) if not is_compatible(migrations[number - 1])), default=1)
