"""A loop with checkpoints is killed at every named point, in its first run and in recoveries that find some damaged."""

import random
import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from everstep.engine.code.recovery_point import damaged_checkpoints
from everstep.engine.history.verify import load_verified
from everstep.errors import StoreUnusable
from everstep.stores.sqlite import SqliteStore
from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Expected, Trial, all_of, told

RUN = "loop-1"


def kept_with_their_events(trial: Trial) -> list[str]:
    """Return what is wrong with the checkpoints that a kill has left behind: none is there without its event, or with
    another one, and the newest three events have theirs."""
    with TemporaryDirectory(dir=trial.folder) as folder:
        for name in ("store.db", "store.db-wal"):
            if (trial.folder / name).exists():
                shutil.copy(trial.folder / name, folder)
        try:
            store = SqliteStore(Path(folder) / "store.db", create=False)
        except StoreUnusable:
            return []
        try:
            row = store.run(RUN)
            found = damaged_checkpoints(store, row, load_verified(store, row)) if row is not None else []
            return [f"the checkpoint at event {one.seq}: {one.why}" for one in found]
        finally:
            store.close()


def test_a_loop_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, looping: Expected
) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "loop", nursery=nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.problems += kept_with_their_events(trial)
        trial.run_to_the_end()
        return trial.finish(looping)

    assert looping.points["checkpoint.recorded"] == 8
    problems = all_of(one, cases(looping.points, PASSES))
    assert not problems, told(problems)


def test_a_loop_survives_a_kill_around_each_of_its_checkpoints(
    place: Path, ledger: Ledger, nursery: Nursery, looping: Expected
) -> None:
    """Before its commit, in it and after it: a checkpoint is there with its event, or neither is."""

    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "loop", nursery=nursery)
        kill_at(trial, *case)
        trial.problems += kept_with_their_events(trial)
        trial.run_to_the_end()
        return trial.finish(looping)

    points = ("checkpoint.recorded", "store.commit.written")
    problems = all_of(one, [(name, count) for name in points for count in range(1, looping.points[name] + 1)])
    assert not problems, told(problems)


@pytest.mark.parametrize("damages", [1, 2, 3])
def test_a_recovery_that_finds_checkpoints_damaged_survives_a_kill_at_every_crash_point(
    place: Path, ledger: Ledger, nursery: Nursery, looping: Expected, mending: Counter[str], damages: int
) -> None:
    """Each process that goes on finds the newest ones damaged, until none is left and all is replayed."""

    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "loop", nursery=nursery)
        if not kill_at(trial, "checkpoint.recorded", 6):
            return ["checkpoint.recorded did not fire"]
        trial.damages = damages
        if not kill_at(trial, *case) and case[1] == 1 and damages == 1:
            return [f"{case[0]} did not fire during recovery"]
        trial.run_to_the_end()
        return trial.finish(looping)

    assert mending["checkpoint.archived"] == 1
    chosen = [case for case in cases(mending, 1 if damages > 1 else PASSES) if damages == 1 or "store" not in case[0]]
    problems = all_of(one, [*chosen, *[("checkpoint.archived", count) for count in range(2, damages + 1)]])
    assert not problems, told(problems)


@pytest.mark.soak
def test_a_loop_survives_thousands_of_pairs_of_kills(
    place: Path, ledger: Ledger, nursery: Nursery, looping: Expected, mending: Counter[str]
) -> None:
    chance = random.Random(2000)
    first, second = list(cases(looping.points, 100)), list(cases(mending, 100))

    def one(number: int) -> list[str]:
        trial = Trial.new(place, ledger, "loop", nursery=nursery)
        kill_at(trial, *chance.choice(first))
        trial.problems += kept_with_their_events(trial)
        trial.damages = number % 4
        kill_at(trial, *chance.choice(second))
        trial.run_to_the_end()
        return trial.finish(looping)

    problems = all_of(one, range(2000))
    assert not problems, told(problems)
