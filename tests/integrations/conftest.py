"""Fixtures: the URL of a fresh store, of each kind that lasts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.integrations.langgraph import EverstepSaver
from everstep.testing.ledger import Ledger
from tests.integrations.nursery import AHEAD_FOR_STRANDS, Nursery
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


@pytest.fixture
def saver(file_url: str) -> Iterator[EverstepSaver]:
    """A saver on a file."""
    with EverstepSaver(file_url) as made:
        yield made


@pytest.fixture(scope="module")
def postgres_saver() -> Iterator[EverstepSaver]:
    """A saver on PostgreSQL."""
    schema = server().fresh_schema()
    with EverstepSaver(server().url(schema)) as made:
        yield made
    server().drop(schema)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Processes that run agents."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def strands_nursery() -> Iterator[Nursery]:
    """Processes that run agents of Strands."""
    made = Nursery(*AHEAD_FOR_STRANDS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """The outside world."""
    with Ledger.start(tmp_path_factory.mktemp("ledger")) as made:
        yield made
