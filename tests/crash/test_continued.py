"""A run that goes on with a fresh history is killed at every named point: each generation is begun once, or not yet."""

import random
from collections import Counter
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Expected, Trial, all_of, told

AROUND = ("run.continue", "run.continued", "store.commit.before", "store.commit.written", "store.commit.after")


def test_undisturbed_each_generation_does_its_part_and_takes_its_signal(continued: Expected) -> None:
    assert (continued.applied["pack"], continued.applied["remit"]) == (6, 3), "a child packs as well"
    value, published = continued.results["on-1"]
    assert [word for word in value if word.startswith("word-")] == ["word-0", "word-1", "word-2"]
    assert published == {"left": 0}
    assert continued.points["run.continue"] == continued.points["run.continued"] == 2


def killed_at(
    place: Path, ledger: Ledger, nursery: Nursery, continued: Expected, chosen: "list[tuple[str, int]]"
) -> list[str]:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "continued", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return trial.finish(continued)

    return all_of(one, chosen)


def test_a_run_that_continues_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, continued: Expected
) -> None:
    problems = killed_at(place, ledger, nursery, continued, list(cases(continued.points, PASSES)))
    assert not problems, told(problems)


def test_a_run_that_continues_survives_a_kill_around_each_of_its_beginnings(
    place: Path, ledger: Ledger, nursery: Nursery, continued: Expected
) -> None:
    chosen = [(name, count) for name in AROUND[:2] for count in range(1, continued.points[name] + 1)]
    problems = killed_at(place, ledger, nursery, continued, chosen)
    assert not problems, told(problems)


@pytest.mark.soak
def test_a_run_that_continues_survives_many_kills_in_a_row(
    place: Path, ledger: Ledger, nursery: Nursery, continued: Expected
) -> None:
    chance = random.Random(11)
    points: Counter[str] = Counter({name: continued.points[name] for name in AROUND})
    choices = list(cases(points, 1000))

    def one(_: int) -> list[str]:
        trial = Trial.new(place, ledger, "continued", nursery=nursery)
        for _ in range(chance.randint(2, 6)):
            kill_at(trial, *chance.choice(choices))
        trial.run_to_the_end()
        return trial.finish(continued)

    problems = all_of(one, range(200))
    assert not problems, told(problems)
