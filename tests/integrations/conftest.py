"""Fixtures: the URL of a fresh store, of each kind that lasts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres.server import server


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store in a file, and one in a schema of its own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/everstep.db"
        return
    schema = server().fresh_schema()
    yield server().url(schema)
    server().drop(schema)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A store in a file."""
    return f"sqlite:///{tmp_path}/everstep.db"
