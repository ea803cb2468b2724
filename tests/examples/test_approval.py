"""The approval: a wait that survives its process, answered from another one."""

import subprocess
from pathlib import Path

import pytest

from tests.examples import kit

QUESTION = "May we buy a chair for 180? Answer with: python approval.py yes\n"


def begin_and_wait_for_question(folder: Path, **settings: str) -> subprocess.Popen[str]:
    process = kit.begin("approval", folder, **settings)
    assert process.stdout is not None
    assert process.stdout.readline() == QUESTION
    return process


def finish(process: subprocess.Popen[str]) -> str:
    printed, complaints = process.communicate(timeout=kit.PATIENCE_SECONDS)
    assert process.returncode == 0, complaints
    return printed


@pytest.mark.parametrize(("answer", "outcome"), [("yes", "bought: order-"), ("no", "declined\n")])
def test_an_answer_from_another_process_is_taken_up(tmp_path: Path, answer: str, outcome: str) -> None:
    process = begin_and_wait_for_question(tmp_path)
    assert kit.run("approval", tmp_path, answer) == "sent\n"
    assert finish(process).startswith(outcome)


def test_an_answer_that_comes_while_nobody_runs_is_kept(tmp_path: Path) -> None:
    kit.kill(begin_and_wait_for_question(tmp_path))
    assert kit.run("approval", tmp_path, "yes") == "sent\n"
    assert kit.run("approval", tmp_path, "yes") == "sent\n"  # sent again: delivered once
    assert "bought: order-" in kit.run("approval", tmp_path)
    assert len(list(tmp_path.glob("order-*.txt"))) == 1
    kinds = [event.kind for event in kit.history(tmp_path, "expense-17")]
    assert kinds.count("signal_received") == 1


def test_without_an_answer_the_request_is_declined_and_a_restart_does_not_prolong_it(tmp_path: Path) -> None:
    kit.kill(begin_and_wait_for_question(tmp_path, PATIENCE="0.5"))
    assert kit.run("approval", tmp_path, PATIENCE="0.5").endswith("declined: nobody answered\n")
    events = kit.history(tmp_path, "expense-17")
    deadlines = [event.body["deadline"] for event in events if event.kind == "timer_started"]
    assert len(deadlines) == 1
    (fired,) = [event.at for event in events if event.kind == "timer_fired"]
    assert fired >= deadlines[0]
