"""Graphs on the command line: run, shown with what happened, drawn, compared with new code, served by a worker."""

import signal
import xml.etree.ElementTree as ET

import pytest

from tests.cli.conftest import Folder

APP = """
import os
from dataclasses import dataclass

import everstep
from everstep import step

LAST = os.environ.get("LAST", "wait")


@dataclass
class State:
    topic: str
    laps: int = 0


@step
async def lap(state: State) -> dict[str, int]:
    if state.topic == "broken":
        raise ValueError("out of breath")
    return {"laps": state.laps + 1}


async def wait(state: State) -> None:
    await everstep.receive("go")


graph = everstep.Graph("laps", state=State)
graph.node(lap, retry=everstep.Retry(attempts=2, first=0.01))
graph.node(wait, name=LAST)
graph.edge(graph.start, "lap")
graph.edge("lap", "lap", when=lambda s: s.laps < 2)
graph.edge("lap", LAST, when=lambda s: s.laps >= 2)
"""
GO = ("run", "laps.py:graph", '{"topic": "tides"}', "--id", "g-1")


@pytest.fixture
def waiting(folder: Folder) -> Folder:
    """A run of a graph that waits, after two laps."""
    (folder.path / "laps.py").write_text(APP)
    process = folder.begin(*GO)
    folder.wait_for(lambda: folder.run_row("g-1")[0] == "waiting")
    folder.kill(process)
    return folder


def test_show_draws_the_graph_with_visits_edges_and_where_it_is(waiting: Folder) -> None:
    shown = waiting.everstep("show", "g-1").out
    assert "graph laps" in shown
    (lap,) = [line for line in shown.splitlines() if "lap if" in line]
    assert lap.split() == ["✓", "→", "lap", "repeat", "2", "lap", "if,", "wait", "if"]
    (wait,) = [line for line in shown.splitlines() if "wait waits" in line]
    assert wait.split()[:3] == ["▸", "wait", "code"]
    facts = waiting.json("show", "g-1")["graph"]
    assert facts["under_way"] == ["wait"]
    assert [(one["name"], one["state"], one["visits"]) for one in facts["nodes"]] == [
        ("lap", "done", 2),
        ("wait", "running", 1),
    ]
    assert waiting.json("show", "g-1")["status"] == "waiting"


def test_show_writes_a_picture_of_what_happened(waiting: Folder) -> None:
    assert waiting.everstep("show", "g-1", "--svg", str(waiting.path / "g.svg")).status == 0
    picture = (waiting.path / "g.svg").read_text()
    ET.fromstring(picture)
    assert 'class="box done"' in picture
    assert 'class="box running"' in picture
    assert "2 visits" in picture


def test_history_tells_moves_in_words(waiting: Folder) -> None:
    told = waiting.everstep("history", "g-1").out
    assert "took start → lap  begins lap" in told
    assert "after=lap  took lap → lap  begins lap#2" in told
    assert "after=lap#2  took lap → wait  begins wait" in told


def test_replay_says_which_runs_a_changed_graph_would_not_continue_and_the_run_is_held(waiting: Folder) -> None:
    (found,) = waiting.json("replay", "laps.py")["runs"]
    assert found["verdict"] == "goes on"
    (found,) = waiting.json("replay", "laps.py", env={"LAST": "rest"})["runs"]
    assert found["verdict"] == "diverged"
    assert found["differences"][0]["what"] == "definition"
    waiting.everstep("signal", "g-1", "go", "true")
    held = waiting.everstep(*GO, env={"LAST": "rest"})
    assert held.status == 3
    assert "wait is gone; rest is new" in " ".join((held.out + held.err).split())
    assert waiting.everstep(*GO).status == 0, "with the old code it goes on"


def test_a_worker_goes_on_with_a_graph(waiting: Folder) -> None:
    worker = waiting.begin("worker", "laps.py")
    waiting.everstep("signal", "g-1", "go", "true")
    waiting.wait_for(lambda: waiting.run_row("g-1")[0] == "completed")
    worker.send_signal(signal.SIGTERM)
    assert waiting.finish(worker).status == 0


def test_a_failed_node_is_shown_as_failed(folder: Folder) -> None:
    (folder.path / "laps.py").write_text(APP)
    assert folder.everstep("run", "laps.py:graph", '{"topic": "broken"}', "--id", "g-2").status == 1
    shown = folder.everstep("show", "g-2").out
    (lap,) = [line for line in shown.splitlines() if "2 failed" in line]
    assert lap.split()[0] == "✗"
    assert "lap failed" in lap


def test_a_run_that_is_no_graph_cannot_be_drawn(folder: Folder) -> None:
    folder.left_waiting("r-1", "app.py:rounds", "5")
    refused = folder.everstep("show", "r-1", "--svg", "x.svg")
    assert refused.status == 2
    assert "is not a run of a graph" in refused.err
