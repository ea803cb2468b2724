"""Two releases of a workflow side by side: each worker continues what is its own, and nothing is held in between."""

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Folder, stop_between_transactions

CODE = """
import everstep

@everstep.step(effect="read")
async def ask(question: str) -> str:
    return question

@everstep.workflow(version="{version}")
async def report(name: str) -> str:
    first = await ask("{question}")
    await everstep.receive("go", bool)
    return first + name
"""


@pytest.fixture
def releases(folder: Folder) -> Folder:
    for version, question in {"old": "what was", "new": "what is"}.items():
        (folder.path / version).mkdir()
        (folder.path / version / "reports.py").write_text(CODE.format(version=version, question=question))
    return folder


def left_by(folder: Folder, version: str, run: str) -> None:
    folder.left_waiting(run, f"{version}/reports.py", '"x"')


def go(folder: Folder, *runs: str) -> None:
    for run in runs:
        assert folder.everstep("signal", run, "go", "true").status == 0


def served(folder: Folder, count: int) -> None:
    folder.wait_for(lambda: len(folder.json("worker", "ls")) == count)


def status(folder: Folder, *runs: str) -> set[str]:
    return {folder.run_row(run)[0] for run in runs}


def test_runs_of_two_releases_go_on_where_their_code_is(releases: Folder) -> None:
    for number in range(3):
        left_by(releases, "old", f"old-{number}")
        left_by(releases, "new", f"new-{number}")
    runs = [f"{version}-{number}" for version in ("old", "new") for number in range(3)]
    workers = [releases.begin("worker", f"{version}/reports.py") for version in ("old", "new")]
    served(releases, 2)
    stop_between_transactions(releases, workers[0])  # so that the other one looks at all runs first
    go(releases, *runs)
    releases.wait_for(lambda: [one for one in releases.json("worker", "ls") if one["left"]])
    workers[0].send_signal(signal.SIGCONT)
    releases.wait_for(lambda: status(releases, *runs) == {"completed"})
    assert releases.json("holds", "--all") == []
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert "is left for another worker" in "".join(releases.finish(worker).out for worker in workers)


def test_a_run_is_held_when_no_other_worker_has_its_code(releases: Folder) -> None:
    left_by(releases, "old", "r")
    third = Path(releases.path / "third")
    third.mkdir()
    (third / "reports.py").write_text(CODE.format(version="third", question="what will be"))
    for version in ("new", "third"):
        releases.begin("worker", f"{version}/reports.py")
    served(releases, 2)
    go(releases, "r")
    releases.wait_for(lambda: status(releases, "r") == {"held"})
    (hold,) = releases.json("holds")
    assert hold["reason"] == "diverged", "both have looked at it, and neither left it to the other for good"


def test_a_run_that_was_left_for_a_worker_which_then_dies_is_held(releases: Folder) -> None:
    left_by(releases, "old", "r")
    old = releases.begin("worker", "old/reports.py")
    releases.begin("worker", "new/reports.py")
    served(releases, 2)
    stop_between_transactions(releases, old)
    go(releases, "r")
    releases.wait_for(lambda: [one for one in releases.json("worker", "ls") if one["left"]])
    assert status(releases, "r") == {"waiting"}
    releases.kill(old)
    releases.wait_for(lambda: status(releases, "r") == {"held"})
