"""Runs that go on with a fresh history and are undone, killed at every named point: each generation is undone once."""

import random
from collections import Counter
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.test_sagas import judged
from tests.crash.trial import Expected, Trial, all_of, told

AROUND = ("run.continue", "run.continued", "compensation.begin", "rollback.claimed", "body.after", "outcome.recorded")


def test_undisturbed_what_all_generations_did_is_undone_once_the_last_first(carried: Expected) -> None:
    once = {"take_seat": 5, "free_seat": 5, "pay": 5, "refund": 5, "label": 5, "label.compensate": 5}
    assert carried.applied == Counter(once)
    name, message, *words = carried.results["far-1"][0]
    assert (name, message) == ("LookupError", "no car")
    assert {"Compensated:", "label", "pay", "take_seat", "generation"} <= set(words)
    assert carried.points["run.continued"] == 3


def undone_at(
    place: Path, ledger: Ledger, nursery: Nursery, carried: Expected, chosen: "list[tuple[str, int]]"
) -> list[str]:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "carrying", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return judged(trial, carried)

    return all_of(one, chosen)


def test_undoing_older_generations_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, carried: Expected
) -> None:
    problems = undone_at(place, ledger, nursery, carried, list(cases(carried.points, PASSES)))
    assert not problems, told(problems)


@pytest.mark.soak
def test_undoing_older_generations_survives_many_kills_in_a_row(
    place: Path, ledger: Ledger, nursery: Nursery, carried: Expected
) -> None:
    chance = random.Random(25)
    points: Counter[str] = Counter({name: carried.points[name] for name in AROUND})
    choices = list(cases(points, 1000))

    def one(_: int) -> list[str]:
        trial = Trial.new(place, ledger, "carrying", nursery=nursery)
        for _ in range(chance.randint(2, 6)):
            kill_at(trial, *chance.choice(choices))
        trial.run_to_the_end()
        return judged(trial, carried)

    problems = all_of(one, range(100))
    assert not problems, told(problems)
