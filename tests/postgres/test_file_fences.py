"""File effects of runs in PostgreSQL: the epoch is asked of the server, under the folder's lock."""

from pathlib import Path

import pytest

from tests.effects.test_file_fences import Life, points_of, stop_and_wake
from tests.postgres.server import Server


@pytest.mark.timeout(200)
@pytest.mark.parametrize("effect", ["write", "append"])
def test_a_process_that_has_lost_its_run_writes_nothing_when_it_wakes(
    tmp_path: Path, server: Server, effect: str
) -> None:
    """Stopped before the lock, between lock and proof, between proof and change, and before the rename."""
    points = points_of(tmp_path / "undisturbed", effect)
    lock = next(point.number for point in points if point.name == "flock")
    rename = next(point.number for point in points if point.name == "replace")
    for number in (lock, lock + 1, lock + 2, rename):
        schema = server.fresh_schema()
        life = Life(tmp_path / f"{number}", effect, server.url(schema))
        assert stop_and_wake(life, points[number - 1]) == ""
        server.drop(schema)
