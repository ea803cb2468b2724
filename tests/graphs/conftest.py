"""What tests of graphs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from everstep.engine.app.blocking import BlockingApp


@pytest.fixture
def app(tmp_path: Path) -> Iterator[BlockingApp]:
    """An app on a file that need not survive the machine."""
    with everstep.open(str(tmp_path / "graphs.db"), durability="process") as app:
        yield app
