"""The trip: what was booked is cancelled when there is no car, each once, however often the process dies."""

from pathlib import Path

import pytest

from everstep.cli import main
from tests.examples import kit
from tests.waiting import open_sqlite

BOOKED = ["flight to Oslo", "2 nights in Oslo", "car in Oslo"]
UNDONE = ["return deposit for a car in Oslo", "cancel 2 nights in Oslo", "cancel flight to Oslo"]
NO_CAR = ["flight to Venice", "2 nights in Venice", "cancel 2 nights in Venice", "cancel flight to Venice"]


def done(folder: Path) -> list[str]:
    """Return what the services did, in order."""
    database = open_sqlite(folder / "services.db")
    found = [what for (what,) in database.execute("select what from done order by rowid")]
    database.close()
    return found


def test_a_trip_is_booked(tmp_path: Path) -> None:
    assert kit.run("trip", tmp_path, "Oslo").startswith("booked: flight-")
    assert done(tmp_path) == BOOKED


# Each dies after the service has acted and before anybody knows; or when the undoing is about to begin, or the end.
POINTS = ["body.after:2", "body.after:4", "body.after:5", "compensation.begin:1", "outcome.applied:4", "run.end:1"]


@pytest.mark.parametrize("at", POINTS)
def test_without_a_car_what_was_booked_is_cancelled_once_and_in_reverse(tmp_path: Path, at: str) -> None:
    kit.run_into_crash("trip", tmp_path, "Venice", at=at)
    printed = kit.run("trip", tmp_path, "Venice")
    assert printed == "no trip: there are no cars in Venice. Compensated: book_room, book_flight.\n"
    assert done(tmp_path) == NO_CAR
    assert kit.history(tmp_path, "trip-Venice")[-1].kind == "run_failed"


@pytest.mark.parametrize(
    "at", ["run.claimed:1", "compensation.begin:1", "body.before:1", "body.after:1", "body.after:3"]
)
def test_a_trip_that_is_rolled_back_is_cancelled_once_and_in_reverse(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run("trip", tmp_path, "Oslo")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["rollback", "trip-Oslo"])
    assert exited.value.code == 0
    kit.run_into_crash("trip", tmp_path, "Oslo", at=at)
    assert kit.run("trip", tmp_path, "Oslo") == "rolled back: everything is cancelled\n"
    assert done(tmp_path) == BOOKED + UNDONE
