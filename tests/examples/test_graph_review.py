"""The graph: killed in its second lap or while it waits, it goes on there; what is approved is written once."""

from pathlib import Path

import pytest

import everstep
from tests.examples import kit
from tests.waiting import wait_until

RUN = "review-1"
WRITTEN = "published tides.md after 2 drafts\n"


def is_waiting(folder: Path) -> bool:
    """Tell whether the run waits for a person."""
    if not (folder / "everstep.db").exists():
        return False
    with everstep.open(str(folder / "everstep.db")) as app:
        return bool(app.list()) and bool(app.approvals(RUN))


def finish(folder: Path, answer: str = "yes") -> str:
    """Let it run, answer when it asks, and return what it printed."""
    process = kit.begin("graph_review", folder)
    wait_until(lambda: is_waiting(folder), "the question")
    assert kit.run("graph_review", folder, answer) == "sent\n"
    printed, complaints = process.communicate(timeout=kit.PATIENCE_SECONDS)
    assert process.returncode == 0, complaints
    return printed


def test_what_a_person_approves_is_written_and_what_not_is_not(tmp_path: Path) -> None:
    for answer, printed in (("yes", WRITTEN), ("no", "not published\n")):
        folder = tmp_path / answer
        folder.mkdir()
        assert finish(folder, answer) == printed
        assert (folder / "tides.md").exists() == (answer == "yes")


@pytest.mark.parametrize("at", ["body.after:3", "graph.moved:6", "checkpoint.recorded:3"])
def test_killed_at_any_place_it_goes_on_there(tmp_path: Path, at: str) -> None:
    kit.run_into_crash("graph_review", tmp_path, at=at)
    done = {event.step for event in kit.history(tmp_path, RUN) if event.kind == "step_completed"}
    assert finish(tmp_path) == WRITTEN
    events = kit.history(tmp_path, RUN)
    for step in done:
        assert sum(event.kind == "step_started" and event.step == step for event in events) == 1, step
    begun = [visit for event in events if event.kind == "graph_moved" for visit in event.body.get("begins", [])]
    assert len(begun) == len(set(begun))
    assert begun.count("draft#2") == 1
    assert (tmp_path / "tides.md").read_text().endswith("It was revised.\n")


def test_an_answer_that_was_given_is_acted_on_once_after_a_crash(tmp_path: Path) -> None:
    process = kit.begin("graph_review", tmp_path)
    wait_until(lambda: is_waiting(tmp_path), "the question")
    kit.kill(process)
    assert kit.run("graph_review", tmp_path, "yes") == "sent\n"
    kit.run_into_crash("graph_review", tmp_path, at="body.after:1")
    assert kit.run("graph_review", tmp_path) == WRITTEN
    events = kit.history(tmp_path, RUN)
    assert sum(event.kind == "approval_asked" for event in events) == 1
    assert sum(event.kind == "step_completed" and event.step.startswith("files.") for event in events) == 1
