"""Fixtures: every kind of store, and one in a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.kit import HARNESSES, Harness, SqliteHarness


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each store in turn."""
    made = HARNESSES[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteHarness]:
    """A store in a file."""
    made = SqliteHarness(tmp_path)
    yield made
    made.close()
