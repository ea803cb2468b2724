"""Strands killed at boundaries by `everstep crashtest`: what it proves is in its last line."""

from pathlib import Path

import pytest

from everstep.testing import crash_everywhere
from everstep.testing.crashtest import Report
from everstep.worker.loading import load_workflow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def killed(example: str, **options: object) -> Report:
    workflow = load_workflow(str(EXAMPLES / example))
    return crash_everywhere(workflow, "tides", **options)  # type: ignore[arg-type]


def test_a_graph_with_a_join_calls_its_models_again_only_if_they_were_under_way() -> None:
    report = killed("strands_graph.py", most=1, orders=0)
    assert report.holds, report.text()
    assert report.model_calls == 4
    kills = sum(1 for one in report.outcomes if one.sort == "kill")
    assert (
        report.text().splitlines()[-1].startswith(f"boundaries {kills} killed {kills} · model calls = undisturbed 4 +")
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "calls"), [("strands_agent.py", 3), ("strands_graph.py", 4), ("strands_swarm.py", 4)]
)
def test_an_agent_a_graph_and_a_swarm_keep_their_promises_at_every_boundary(example: str, calls: int) -> None:
    report = killed(example, files=("*.txt",))
    assert report.holds, report.text()
    assert report.model_calls == calls
    assert not report.notes
