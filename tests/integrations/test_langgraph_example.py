"""The example with LangGraph: killed wherever it acts, it asks its model no more than it must, and books once."""

import signal
from pathlib import Path

import pytest

from tests.crash.figures import FIGURES
from tests.integrations.nursery import Nursery

EXAMPLE = "tests.integrations.example"
ASKS = "Book {'hotel': 'Aurora', 'nights': 2}? Answer with: python langgraph_agent.py yes\n"
ANSWER = "You have a room in the Aurora.\n"
MODEL_CALLS = 3


def run(nursery: Nursery, folder: Path, *answers: str) -> str:
    status, said = nursery.run(EXAMPLE, str(folder), *answers)
    assert status == 0, said
    return said


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_an_undisturbed_agent_asks_a_person_and_books(tmp_path: Path, nursery: Nursery) -> None:
    assert run(nursery, tmp_path) == ASKS
    assert lines(tmp_path / "bookings.log") == []
    assert run(nursery, tmp_path) == ASKS
    assert run(nursery, tmp_path, "yes") == ANSWER
    assert run(nursery, tmp_path) == ANSWER
    assert lines(tmp_path / "bookings.log") == ["Aurora, 2 nights"]
    assert len(lines(tmp_path / "model.log")) == MODEL_CALLS


@pytest.mark.parametrize("is_answered", [False, True])
def test_an_agent_that_is_killed_goes_on_and_books_once(is_answered: bool, tmp_path: Path, nursery: Nursery) -> None:
    killed = 0
    for point in ("body.before", "body.after", "outcome.recorded", "unit.durable"):
        for count in (1, 2):
            folder = tmp_path / f"{point}-{count}"
            folder.mkdir()
            if is_answered:
                run(nursery, folder)
            answers = ["yes"] if is_answered else []
            at = f"{point}:{count}"
            status, said = nursery.run(EXAMPLE, str(folder), *answers, EVERSTEP_CRASH_AT=at)
            assert status in (0, -signal.SIGKILL), said
            killed += status != 0
            said = run(nursery, folder)
            assert (said if said != ASKS else run(nursery, folder, "yes")) == ANSWER, at
            # One that was killed after it booked and before it said so is found by the probe.
            assert lines(folder / "bookings.log") == ["Aurora, 2 nights"], at
            assert MODEL_CALLS <= len(lines(folder / "model.log")) <= MODEL_CALLS + 1, at
    assert killed > 4
    FIGURES.trials += killed
