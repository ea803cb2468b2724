"""Races have the same winners in processes with other hash seeds and other memory addresses."""

import ast
from pathlib import Path

from tests.engine.processes import notes, run
from tests.engine.programs import RACES_TELL


def test_races_replay_with_the_same_winners_under_every_hash_seed(tmp_path: Path) -> None:
    for seed in ("1", "4242"):
        status, output = run("race", tmp_path, PYTHONHASHSEED=seed)
        assert status == 9, output  # it killed itself when the run waited for its next signal
    status, output = run("race", tmp_path, PYTHONHASHSEED="77")
    assert status == 0, output
    first, second, third = (ast.literal_eval(line) for line in notes(tmp_path))
    assert len(first) == RACES_TELL + 1
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert third[RACES_TELL:] == ["seed 1", "seed 4242", "seed 77"]
