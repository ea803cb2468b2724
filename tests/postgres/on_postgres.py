"""A plugin of pytest that lets tests which use the store in memory use one on PostgreSQL instead.

    pytest -p tests.postgres.on_postgres tests/engine/test_signals.py

Tests that look into the store in memory itself cannot be run in this way.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everstep.stores import opening
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Store
from tests import lasting
from tests.postgres.server import server

_made: list["LastingStore"] = []
_opened = opening._opened


class LastingStore(PostgresStore):
    """A store that tests may go on reading when an app has closed it, as they may that of tests/lasting.py."""

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(server().url(server().fresh_schema()), durability="process", clock=clock)
        _made.append(self)

    def close(self) -> None:
        """Do nothing yet."""

    def end(self) -> None:
        """Close it, and drop its schema."""
        super().close()
        server().drop(self.schema)

    def go_on_from(self, other: "LastingStore") -> None:
        """Be no other store: the same one after a crash."""
        life = other.life().partition(".")[0]
        server().ask(f"INSERT INTO \"{self.schema}\".meta (name, value) VALUES ('life', %s)", life)


def _open(url: str, **options: Any) -> Store:
    return LastingStore(clock=options["clock"]) if url == "memory:" else _opened(url, **options)


opening._opened = _open
lasting.LastingStore = LastingStore  # type: ignore[assignment,misc]  # for tests that make one themselves


@pytest.fixture(autouse=True)
def _end_stores() -> Iterator[None]:
    yield
    while _made:
        _made.pop().end()
