"""Graphs on PostgreSQL: killed in a node, they go on there."""

from pathlib import Path

import pytest

from tests.graphs import kit
from tests.graphs.kit import Trial

CASES = {
    "joining": ("r", ["r", "j"]),
    "looping": ("lap#2", ["lap#2", "check#2", "lap#3", "check#3"]),
    "nesting": ("second", ["second", "after"]),
    "approving": ("act", []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_graph_killed_at_its_point_goes_on_there(case: str, url: str, tmp_path: Path) -> None:
    expected = kit.undisturbed(case, tmp_path / "undisturbed")
    visit, rest = CASES[case]
    trial = Trial(case, tmp_path, {"STORE_URL": url})
    problems = kit.killed_and_resumed(trial, expected, KILL_IN=visit)
    assert not problems, problems
    begun = trial.visits()
    assert sorted(begun[begun.index(visit) + 1 :]) == sorted(rest)


@pytest.mark.parametrize("at", ["graph.moved:3", "checkpoint.recorded:2", "store.commit.after:4"])
def test_a_graph_killed_between_its_nodes_goes_on_there(at: str, url: str, tmp_path: Path) -> None:
    expected = kit.undisturbed("looping", tmp_path / "undisturbed")
    problems = kit.killed_and_resumed(Trial("looping", tmp_path, {"STORE_URL": url}), expected, EVERSTEP_CRASH_AT=at)
    assert not problems, problems
