"""The engine is killed at every named point, in the first run and during recovery."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.testing.ledger import Ledger
from tests.crash.figures import FIGURES
from tests.crash.nursery import Nursery
from tests.crash.trial import KILLED, Expected, Trial, all_of, told

FIRST_KILL = "store.commit.written:8"
"""Where the first process of a recovery is killed: in the middle of the run, with steps under way."""

CUT_OFF = "transaction.written:1"
"""Where a process is killed in the middle of an atomic step."""


PASSES = 2
"""How many passes of a point are tried in a push by workloads beside the reference; a soak tries all of them."""


def spread(passes: int, most: int) -> list[int]:
    """Return the first, the second, the last and some in between; of two: the first and the one in the middle."""
    if passes <= most:
        return list(range(1, passes + 1))
    if most <= 2:
        return [1, passes // 2 + 1][:most]
    middle = {round(1 + n * (passes - 1) / (most - 2)) for n in range(most - 1)}
    return sorted(middle | {2})


def cases(passed: Counter[str], most: int) -> Iterator[tuple[str, int]]:
    for name in sorted(passed):
        for occurrence in spread(passed[name], most):
            yield name, occurrence


def kill_at(trial: Trial, name: str, occurrence: int) -> bool:
    """Run armed. Two runs never commit in quite the same batches, so a late occurrence may be out of reach."""
    status = trial.run(at=f"{name}:{occurrence}")
    trial.faults.append(f"killed at {name}:{occurrence}")
    if status == KILLED:
        FIGURES.fired.add(name)
        trial.take_snapshot()
    elif status != 0:
        trial.problems.append(f"the armed process ended with {status}: {trial.output()[-2000:]}")
    return status == KILLED


@pytest.fixture(scope="module")
def recovering(place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected) -> Counter[str]:
    """The points that a recovery passes."""
    trial = Trial.new(place, ledger, nursery=nursery)
    assert kill_at(trial, *split(FIRST_KILL)), trial.output()
    trial.run_to_the_end()
    passed = trial.passed()
    problems = trial.finish(undisturbed)
    assert not problems, told(problems)
    return passed


def split(at: str) -> tuple[str, int]:
    name, _, occurrence = at.partition(":")
    return name, int(occurrence)


def kill_everywhere(place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected, most: int) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return trial.finish(undisturbed)

    FIGURES.points = set(POINTS)
    problems = all_of(one, cases(undisturbed.points, most))
    assert not problems, told(problems)


def test_a_run_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, undisturbed, most=4)


@pytest.mark.soak
def test_a_run_survives_a_kill_at_every_pass_of_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected
) -> None:
    for _ in range(10):
        kill_everywhere(place, ledger, nursery, undisturbed, most=1000)


def test_a_recovery_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, undisturbed: Expected, recovering: Counter[str], nursery: Nursery
) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, nursery=nursery)
        if not kill_at(trial, *split(FIRST_KILL)):
            return [f"{FIRST_KILL} did not fire"]
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire during recovery"]
        trial.run_to_the_end()
        return trial.finish(undisturbed)

    problems = all_of(one, cases(recovering, 1))
    assert not problems, told(problems)


@pytest.fixture(scope="module")
def refused(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """What becomes of an atomic step that was cut off, and fails when it is done again."""
    trial = Trial.new(place, ledger, "refused", nursery=nursery)
    assert kill_at(trial, *split(CUT_OFF)), trial.output()
    trial.run_to_the_end()
    expected = Expected(trial.results(), trial.applied(), trial.passed())
    assert not expected.applied
    problems = trial.finish(expected)
    assert not problems, told(problems)
    return expected


def test_a_step_that_is_ruled_out_survives_a_kill_at_every_point_of_that(
    place: Path, ledger: Ledger, nursery: Nursery, refused: Expected
) -> None:
    def one(name: str) -> list[str]:
        trial = Trial.new(place, ledger, "refused", nursery=nursery)
        if not kill_at(trial, *split(CUT_OFF)) or not kill_at(trial, name, 1):
            return [f"{name} did not fire"]
        trial.run_to_the_end()
        return trial.finish(refused)

    problems = all_of(one, sorted(name for name in refused.points if name.startswith("transaction.")))
    assert not problems, told(problems)


def test_every_crash_point_of_the_table_is_passed_by_a_workload(
    undisturbed: Expected,
    recovering: Counter[str],
    refused: Expected,
    looping: Expected,
    continued: Expected,
    forked: Expected,
    mending: Counter[str],
    undone: Expected,
    notified: Expected,
    spending: dict[str, Trial],
    exchanged: Expected,
    scheduling: Counter[str],
    moving: Counter[str],
) -> None:
    passed = set(undisturbed.points) | set(refused.points) | set(looping.points) | set(undone.points)
    passed |= set(exchanged.points) | set(forked.points) | set(continued.points)
    passed |= set(notified.points) | set(spending["fallback"].passed())
    passed |= set(scheduling) | set(moving)
    never = POINTS - passed - set(recovering) - set(mending)
    assert not never, f"no workload passes {sorted(never)}"


def kill_in_pairs(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected, recovering: Counter[str], pairs: int
) -> None:
    chance = random.Random(pairs)
    first, second = list(cases(undisturbed.points, 12)), list(cases(recovering, 12))
    nested: list[list[str]] = []

    def one(_: int) -> list[str]:
        if len(nested) >= pairs:
            return []
        trial = Trial.new(place, ledger, nursery=nursery)
        fired = [kill_at(trial, *chance.choice(choices)) for choices in (first, second)]
        if all(fired):
            nested.append(trial.faults)
        trial.run_to_the_end()
        return trial.finish(undisturbed)

    problems = all_of(one, range(2 * pairs))
    assert not problems, told(problems)
    assert len(nested) >= pairs, f"only {len(nested)} pairs of kills came about"


def test_a_run_survives_a_kill_and_another_one_during_its_recovery(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected, recovering: Counter[str]
) -> None:
    kill_in_pairs(place, ledger, nursery, undisturbed, recovering, pairs=50)


@pytest.mark.soak
def test_a_run_survives_thousands_of_pairs_of_kills(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected, recovering: Counter[str]
) -> None:
    kill_in_pairs(place, ledger, nursery, undisturbed, recovering, pairs=5000)
