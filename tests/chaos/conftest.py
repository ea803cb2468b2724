"""What the chaos tests share: a server of their own, and where workers come from."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosServer, chaos_server
from tests.chaos.nursery import Nursery
from tests.chaos.trial import Trial


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="session")
def nursery(place: Path) -> Iterator[Nursery]:
    made = Nursery(place)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ChaosServer]:
    with chaos_server() as made:
        yield made


@pytest.fixture
def new_trial(tmp_path: Path, server: ChaosServer, nursery: Nursery) -> Iterator[Callable[..., Trial]]:
    """Make trials whose processes are ended afterwards."""
    made: list[Trial] = []

    def new(**options: float) -> Trial:
        made.append(Trial(tmp_path / f"trial-{len(made)}", server, nursery, **options))
        return made[-1]

    yield new
    for trial in made:
        trial.close()
