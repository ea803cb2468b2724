"""The examples keep their promises wherever they are killed."""

import re
from pathlib import Path
from typing import Any

import pytest

import everstep.cli.demo.agent as demo_agent
from tests.crash.test_system_calls import strace_works
from tests.crashtest import kit

CASES = {
    "approval": ["approval.py", '"chair"', "--signal", "approved=true", "--files", "*.txt"],
    "approval without an answer": ["approval.py", '"desk"'],  # nobody answers for a week, which takes no time
    "crawler": ["crawler.py", '"/"'],
    "graph": ["graph_review.py", '{"topic": "tides"}', "--approve", "approve=true", "--files", "*.md"],
    "langgraph in a workflow": ["langgraph_workflow.py", '"Lisbon"', "--files", "*.txt"],
    "order": ["order.py", '"lamp"', '"ann"', "120"],
    "order that is refunded": ["order.py", '"piano"', '"ann"', "120"],
    "strands agent": ["strands_agent.py", '"tides"', "--files", "*.txt"],
    "strands graph": ["strands_graph.py", '"tides"'],
    "strands swarm": ["strands_swarm.py", '"tides"', "--files", "*.txt"],
    "three steps": ["three_steps.py", '"numbers.csv"', "--given", "given", "--files", "*.txt"],
    "tool loop": ["tool_loop.py", '"tides"', "--files", "*.txt"],
    "trip": ["trip.py", '"Oslo"'],
    "trip that is undone": ["trip.py", '"Venice"'],
}
FEW = ["--most", "1", "--orders", "0"]  # nothing is concurrent in these


def run(folder: Path, name: str, *more: str, traced_by: tuple[str, ...] = ()) -> dict[str, Any]:
    (folder / "given").mkdir()
    (folder / "given" / "summary-service-is-up").touch()
    file, *arguments = CASES[name]
    return kit.crashtest(folder, str(kit.EXAMPLES / file), *arguments, *more, expect=0, traced_by=traced_by)


def test_every_example_has_a_case() -> None:
    elsewhere = {"langgraph_agent.py"}  # it has no workflow: tests/integrations/test_langgraph_example.py kills it
    assert {path.name for path in kit.EXAMPLES.glob("*.py")} - elsewhere == {case[0] for case in CASES.values()}


@pytest.mark.parametrize("name", ["approval", pytest.param("trip that is undone", marks=pytest.mark.soak)])
def test_an_example_keeps_its_promises_where_a_few_boundaries_are_tried(tmp_path: Path, name: str) -> None:
    facts = run(tmp_path, name, *FEW)
    trials = facts["trials"]
    assert isinstance(trials, dict)
    assert trials["broken"] == 0
    assert trials["kept"] >= 30
    assert not facts["notes"]


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_example_keeps_its_promises_at_every_boundary(tmp_path: Path, name: str) -> None:
    facts = run(tmp_path, name)
    trials = facts["trials"]
    assert isinstance(trials, dict)
    assert trials["kept"] + trials["held"] > 60


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_agent_of_the_demo_keeps_its_promises_at_every_boundary(tmp_path: Path) -> None:
    file = str(demo_agent.__file__)
    facts = kit.crashtest(
        tmp_path, file, '"tides"', "--signal", "approved=true", "--files", "report.md", "--seconds", "60", expect=0
    )
    assert facts["holds"]


# -- the kernel's count ------------------------------------------------------------------------------------------------
NOT_TRANSACTIONS = 2
"""Syncs of a new log beside those of transactions: that of its header, and the one with which a store is closed."""


@pytest.mark.skipif(not strace_works(), reason="strace is not installed or may not trace here")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "order" else pytest.mark.soak) for name in sorted(CASES)]
)
def test_the_durable_writes_that_are_counted_are_those_that_the_kernel_sees(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    tracing = ("strace", "-f", "--seccomp-bpf", "-qq", "-y", "-o", str(trace), "-e", "trace=fsync,fdatasync")
    facts = run(tmp_path, name, *FEW, traced_by=tracing)
    undisturbed = re.findall(r"fdatasync\(\d+<[^>]*/trial-1/[^>]*-wal>\)", trace.read_text())
    assert facts["writes"] == len(undisturbed) - NOT_TRANSACTIONS > 5
