"""`everstep worker`: what others left behind goes on, and stopping loses nothing."""

import json
import signal
import subprocess
import sys

import pytest

import everstep
from tests.cli.conftest import Folder
from tests.forked import Program
from tests.waiting import wait_until

REPORT = ("run", "app.py:report", '"tides"', '{"name": "ann"}', "--id", "r-1")


def begun_and_killed(folder: Folder) -> None:
    folder.file("slow")
    process = folder.begin(*REPORT)
    folder.wait_for(lambda: any(line.startswith("send") for line in folder.effects()))
    folder.kill(process)


def test_a_worker_goes_on_with_what_a_killed_process_left(folder: Folder) -> None:
    begun_and_killed(folder)
    (folder.path / "slow").unlink()
    worker = folder.begin("worker", "app.py")
    folder.wait_for(lambda: folder.run_row("r-1")[0] == "completed")
    worker.send_signal(signal.SIGTERM)
    done = folder.finish(worker)
    assert done.status == 0
    assert f"from {folder.path / 'everstep.db'}" in done.out
    assert "took up" in done.out
    assert "r-1 (report)" in done.out
    assert "completed" in done.out
    assert "stopped" in done.out
    assert len(set(folder.effects())) == 3


def test_a_stopped_worker_lets_steps_end_and_gives_its_runs_back(folder: Folder) -> None:
    begun_and_killed(folder)
    worker = folder.begin("worker", "app.py", "--drain", "20", "--json")
    folder.wait_for(lambda: sum(line.startswith("send") for line in folder.effects()) == 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout is not None
    lines = []
    for line in worker.stdout:
        lines.append(json.loads(line))
        if lines[-1]["what"] == "stopping":
            break
    (folder.path / "slow").unlink()
    rest = folder.finish(worker)
    assert worker.returncode == 0
    assert json.loads(rest.out.splitlines()[-1])["what"] == "stopped"
    assert folder.run_row("r-1")[1] is None
    assert any(event["kind"] == "step_completed" and event["step"] == "send" for event in folder.json("history", "r-1"))
    assert folder.everstep(*REPORT).status == 0


def test_a_second_signal_stops_at_once(folder: Folder) -> None:
    begun_and_killed(folder)
    worker = folder.begin("worker", "app.py", "--drain", "1000")
    folder.wait_for(lambda: sum(line.startswith("send") for line in folder.effects()) == 2)
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout is not None
    for line in worker.stdout:
        if "stopping" in line:
            break
    worker.send_signal(signal.SIGTERM)
    assert folder.finish(worker).status == 128 + signal.SIGTERM
    (folder.path / "slow").unlink()
    assert folder.everstep(*REPORT).status == 0, "nothing was lost by that either"


def test_a_worker_tells_of_holds_and_leaves_foreign_workflows_alone(folder: Folder) -> None:
    folder.left_waiting("c-1", "app.py:changing", env={"QUESTION": "old"})
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    folder.everstep("signal", "c-1", "go", "true")
    folder.everstep("signal", "a-1", "approved", "true")
    worker = folder.begin("worker", "app.py:changing", "--json", env={"QUESTION": "new"})
    folder.wait_for(lambda: folder.run_row("c-1")[0] == "held")
    worker.send_signal(signal.SIGINT)
    told = [json.loads(line) for line in folder.finish(worker).out.splitlines()]
    held = next(one for one in told if one["what"] == "held")
    assert held["run"] == "c-1"
    assert "diverged" in held["detail"]
    assert folder.run_row("a-1")[0] == "waiting", "it serves only what it was given"


def test_a_worker_needs_a_file_with_workflows(folder: Folder) -> None:
    folder.file("empty.py", "")
    assert folder.everstep("worker").status == 2
    done = folder.everstep("worker", "empty.py")
    assert done.status == 2
    assert "declares no workflow" in done.err


def test_two_files_that_declare_one_name_are_refused(folder: Folder) -> None:
    text = "import everstep\n@everstep.workflow\nasync def same() -> None: ...\n"
    folder.file("one.py", text)
    folder.file("two.py", text)
    done = folder.everstep("worker", "one.py", "two.py")
    assert done.status == 2
    assert "Two workflows are named 'same'" in done.err


SPINS = """
from pathlib import Path

import everstep


@everstep.workflow
async def spins():
    while not Path("enough").exists():
        pass
    return "done"
"""


@pytest.fixture
def spinning(folder: Folder) -> Program:
    """A worker that logs into a file, and whose only run computes until there is a file."""
    folder.file("spinning.py", SPINS)
    with everstep.connect(str(folder.path / "everstep.db")) as client:
        client.start("spins", id="r")
    with (folder.path / "log").open("w") as log:
        worker = Program(
            [sys.executable, "-m", "everstep", "worker", "spinning.py"],
            cwd=folder.path,
            env=folder.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    folder.processes.append(worker)
    return worker


def test_a_worker_names_the_line_of_workflow_code_that_keeps_its_loop(folder: Folder, spinning: Program) -> None:
    log, named = folder.path / "log", "workflow code of run r (spins) is at spinning.py:"

    def logged(text: str, after: str) -> bool:
        assert spinning.poll() is None, log.read_text()
        return text in log.read_text().partition(after)[2]

    wait_until(lambda: logged(named, "The event loop of this process has not turned for"), log.read_text)
    folder.file("enough")
    wait_until(lambda: logged("The event loop of this process turns again", named), log.read_text)
    wait_until(lambda: folder.run_row("r")[0] == "completed", log.read_text)
    spinning.send_signal(signal.SIGTERM)
    assert folder.finish(spinning).status == 0
