"""Forks under kills: a process that dies in the middle of one leaves all of it or nothing, and no effect twice."""

from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Expected, Trial, all_of, told


def test_undisturbed_a_fork_does_only_what_came_after_its_event(forked: Expected) -> None:
    assert (forked.applied["pack"], forked.applied["remit"]) == (2, 3)
    assert forked.points["run.fork"] == forked.points["run.forked"] == 2
    assert forked.results["fork-1"] == forked.results["fork-2"]


@pytest.mark.parametrize("most", [PASSES, pytest.param(1000, marks=pytest.mark.soak)])
def test_forks_survive_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, forked: Expected, most: int
) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "forking", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return trial.finish(forked)

    problems = all_of(one, cases(forked.points, most))
    assert not problems, told(problems)


def test_a_process_that_dies_before_its_fork_is_durable_leaves_no_half_of_it(
    place: Path, ledger: Ledger, nursery: Nursery, forked: Expected
) -> None:
    trial = Trial.new(place, ledger, "forking", nursery=nursery)
    assert kill_at(trial, "run.fork", 1)
    assert {one.row.id for one in trial.histories(copied=True)} == {"fork-0"}
    assert kill_at(trial, "run.forked", 1)
    left = {one.row.id: one for one in trial.histories(copied=True)}
    assert left["fork-1"].row.head_seq == len(left["fork-1"].events) > 1
    trial.run_to_the_end()
    problems = trial.finish(forked)
    assert not problems, told(problems)
