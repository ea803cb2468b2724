"""Real processes, killed at every named point while a run fails and is undone, and while one is rolled back."""

import random
from collections import Counter
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at, split
from tests.crash.trial import Expected, Trial, all_of, told

UNDOES = {"free_seat": "take_seat", "refund": "pay", "label.compensate": "label"}
FIRST_KILLS = ("body.after:8", "compensation.begin:2")
"""Where the first process is killed before another is killed during its recovery: in the middle of undoing."""
MORE_FIRST_KILLS = ("compensation.begin:1", "rollback.claimed:1", "outcome.recorded:12", "store.commit.written:20")


def judged(trial: Trial, expected: Expected) -> list[str]:
    """Judge the end as always; and no compensation stands in the ledger before the effect that it undoes."""
    seen: Counter[str] = Counter()
    for entry in trial.book.entries():
        if entry["kind"] != "applied":
            continue
        seen[entry["effect"]] += 1
        undone = UNDOES.get(entry["effect"])
        if undone is not None and seen[undone] < seen[entry["effect"]]:
            trial.problems.append(f"{entry['effect']} was applied before {undone} was")
    return trial.finish(expected)


def test_undisturbed_each_effect_is_undone_once(undone: Expected) -> None:
    """The ledger loses answers on the way, so most of them were asked for more than once."""
    once = {"take_seat": 4, "free_seat": 4, "pay": 2, "refund": 2, "label": 2, "label.compensate": 2}
    assert undone.applied == Counter(once)
    names = ["Compensated:", "label", "pay", "take_seat", "take_seat#2"]
    assert undone.results["trip-1"][0] == ["LookupError", "no car", *names]
    assert undone.results["trip-2"][0][0] == "RunCancelled"
    assert {"compensation.begin", "rollback.claimed"} <= set(undone.points)


def kill_everywhere(place: Path, ledger: Ledger, nursery: Nursery, undone: Expected, most: int) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "saga", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return judged(trial, undone)

    problems = all_of(one, cases(undone.points, most))
    assert not problems, told(problems)


def test_undoing_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undone: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, undone, most=PASSES)


@pytest.mark.soak
def test_undoing_survives_a_kill_at_every_pass_of_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undone: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, undone, most=1000)


def recovering(place: Path, ledger: Ledger, nursery: Nursery, undone: Expected, first: str) -> Counter[str]:
    """Return the points that a recovery from this kill passes."""
    trial = Trial.new(place, ledger, "saga", nursery=nursery)
    assert kill_at(trial, *split(first)), trial.output()
    trial.run_to_the_end()
    passed = trial.passed()
    problems = judged(trial, undone)
    assert not problems, told(problems)
    return passed


def kill_recovery(place: Path, ledger: Ledger, nursery: Nursery, undone: Expected, first: str, most: int) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "saga", nursery=nursery)
        if not kill_at(trial, *split(first)):
            return [f"{first} did not fire"]
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire during recovery"]
        trial.run_to_the_end()
        return judged(trial, undone)

    problems = all_of(one, cases(recovering(place, ledger, nursery, undone, first), most))
    assert not problems, told(problems)


@pytest.mark.parametrize("first", FIRST_KILLS)
def test_the_recovery_of_an_undoing_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undone: Expected, first: str
) -> None:
    kill_recovery(place, ledger, nursery, undone, first, most=1)


@pytest.mark.soak
@pytest.mark.parametrize("first", FIRST_KILLS + MORE_FIRST_KILLS)
def test_the_recovery_of_an_undoing_survives_a_kill_at_every_pass_of_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undone: Expected, first: str
) -> None:
    kill_recovery(place, ledger, nursery, undone, first, most=1000)


@pytest.mark.soak
def test_undoing_survives_thousands_of_kills_in_a_row(
    place: Path, ledger: Ledger, nursery: Nursery, undone: Expected
) -> None:
    chance = random.Random(7)
    choices = list(cases(undone.points, 1000))

    def one(_: int) -> list[str]:
        trial = Trial.new(place, ledger, "saga", nursery=nursery)
        for _ in range(chance.randint(2, 6)):
            kill_at(trial, *chance.choice(choices))
        trial.run_to_the_end()
        return judged(trial, undone)

    problems = all_of(one, range(2000))
    assert not problems, told(problems)
