"""What the tests of damage share: one file with the runs, made once, and copies of it."""

from pathlib import Path

import pytest

from tests.damage.subject import make_file


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_file(tmp_path_factory.mktemp("damage"))
