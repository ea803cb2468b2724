"""Fixtures: a store in a schema of its own, on this process's server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres.server import Server, server
from tests.stores.kit import PostgresHarness


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[PostgresHarness]:
    """A store whose workers a test can kill."""
    made = PostgresHarness(tmp_path, durability="power")
    yield made
    made.close()


@pytest.fixture
def schema() -> Iterator[str]:
    """The name of a schema that is dropped afterwards."""
    made = server().fresh_schema()
    yield made
    server().drop(made)


@pytest.fixture
def url(schema: str) -> str:
    """The URL of a store that is not there yet."""
    return server().url(schema)


@pytest.fixture(name="server")
def server_of_process() -> Server:
    """This process's server."""
    return server()
