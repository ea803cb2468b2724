"""Several processes share the runs of one store; they are killed, stopped, woken and replaced."""

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger
from tests.crash.nursery import Nursery
from tests.crash.trial import Expected, Trial, all_of, told
from tests.forked import Program

RUNS = 30
ROLLING_RUNS = 60
TERMINATED = (0, 143, -signal.SIGTERM)
"""How a process ends that is told to: with all results, in order, or on its last lines, when it listens no more."""


@pytest.fixture(scope="module")
def fleets(place: Path, ledger: Ledger, nursery: Nursery) -> dict[int, Expected]:
    return {count: Expected.of(Trial.new(place, ledger, "fleet", count, nursery)) for count in (RUNS, ROLLING_RUNS)}


def wait_for_all(trial: Trial, processes: list[Program], fine: tuple[int, ...] = (0,)) -> None:
    for process in processes:
        try:
            status = process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            trial.problems.append("a process did not end in 40 s")
        else:
            if status not in fine:
                trial.problems.append(f"a process ended with {status}: {trial.output()[-1500:]}")


def wait_until_begun(trial: Trial, process: Program) -> None:
    """Wait until a process has asked for its first run."""
    until = time.monotonic() + 60
    while all(line["pid"] != process.pid for line in trial.journal()) and time.monotonic() < until:
        time.sleep(0.01)


def test_processes_on_one_file_finish_the_runs_of_one_that_is_killed(
    place: Path, ledger: Ledger, fleets: dict[int, Expected]
) -> None:
    kill_one_of_a_fleet(place, ledger, fleets, trials=6)


@pytest.mark.soak
def test_processes_on_one_file_finish_the_runs_of_hundreds_that_are_killed(
    place: Path, ledger: Ledger, fleets: dict[int, Expected]
) -> None:
    kill_one_of_a_fleet(place, ledger, fleets, trials=500)


def kill_one_of_a_fleet(place: Path, ledger: Ledger, fleets: dict[int, Expected], trials: int) -> None:
    chance = random.Random(trials)
    cases = [(2 + number % 2, chance.uniform(0.0, 0.4)) for number in range(trials)]

    def one(case: tuple[int, float]) -> list[str]:
        count, seconds = case
        trial = Trial.new(place, ledger, "fleet", RUNS)
        processes = [trial.spawn() for _ in range(count)]
        wait_until_begun(trial, processes[0])
        time.sleep(seconds)
        processes[0].kill()
        trial.faults.append(f"one of {count} killed after {seconds:.3f} s")
        processes[0].wait()
        wait_for_all(trial, processes[1:])
        return trial.finish(fleets[RUNS])

    problems = all_of(one, cases)
    assert not problems, told(problems)


def test_old_and_new_processes_overlap_in_a_rolling_restart(
    place: Path, ledger: Ledger, fleets: dict[int, Expected]
) -> None:
    trial = Trial.new(place, ledger, "fleet", ROLLING_RUNS)
    old = trial.spawn()
    for _ in range(10):
        wait_until_begun(trial, old)
        new = trial.spawn()
        time.sleep(0.1)
        old.send_signal(signal.SIGTERM)
        wait_for_all(trial, [old], fine=TERMINATED)
        old = new
    trial.faults.append("replaced ten times")
    wait_for_all(trial, [old])
    problems = trial.finish(fleets[ROLLING_RUNS])
    assert not problems, told(problems)


PATIENCE_SECONDS = 6.0


def stopped(process: Program, seconds: float = 20.0) -> bool:
    """Wait until a process has stopped itself; False if it ends before, or takes too long."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return True
        time.sleep(0.01)
    return False


def ends_within(process: Program, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def zombie_at(place: Path, ledger: Ledger, expected: Expected, at: str) -> tuple[list[str], bool]:
    """Stop a process at a point, let another one finish, wake it.

    Returns what is wrong, and whether the other one finished first. It cannot when the process was stopped in the
    middle of a transaction: then the file is locked until it goes on, and both go on from there.
    """
    trial = Trial.new(place, ledger)
    zombie = trial.spawn(at=f"{at}:stop", lease=1.0)
    if not stopped(zombie):
        return trial.finish(expected), False
    trial.faults += [f"stopped at {at}", "zombie"]
    other = trial.spawn(lease=1.0)
    in_transaction = at.partition(":")[0].endswith(".written")
    other_finished = ends_within(other, 1.5 if in_transaction else PATIENCE_SECONDS)
    if other_finished:
        trial.snapshots.append(trial.histories(copied=True))
    zombie.send_signal(signal.SIGCONT)
    wait_for_all(trial, [zombie, other])
    if other_finished and [h.events for h in trial.histories()] != [h.events for h in trial.snapshots[0]]:
        trial.problems.append("the process that woke up wrote into a history")
    return trial.finish(expected), other_finished


def zombie_cases(undisturbed: Expected, *, all_passes: bool = False) -> Iterator[str]:
    """Yield each point in the middle of its passes (or at each of them), from when there is a run."""
    for name, passes in sorted(undisturbed.points.items()):
        if not name.startswith(("store.create", "store.switch", "store.migrate")):
            for number in range(1, passes + 1) if all_passes else [passes // 2 + 1]:
                yield f"{name}:{number}"


def test_a_process_that_wakes_after_its_lease_lapsed_writes_nothing(
    place: Path, ledger: Ledger, undisturbed: Expected
) -> None:
    wake_all(place, ledger, undisturbed, list(zombie_cases(undisturbed)))


@pytest.mark.soak
def test_a_process_that_wakes_writes_nothing_wherever_it_was_stopped(
    place: Path, ledger: Ledger, undisturbed: Expected
) -> None:
    wake_all(place, ledger, undisturbed, list(zombie_cases(undisturbed, all_passes=True)))


def wake_all(place: Path, ledger: Ledger, undisturbed: Expected, cases: list[str]) -> None:
    woken: list[str] = []

    def one(at: str) -> list[str]:
        problems, other_finished = zombie_at(place, ledger, undisturbed, at)
        if other_finished:
            woken.append(at)
        return problems

    problems = all_of(one, cases, in_parallel=6)
    assert not problems, told(problems)
    assert len(woken) > len(cases) // 2, f"only {len(woken)} of {len(cases)} woke up when another had finished"


def two_stopped(place: Path, ledger: Ledger, at: str) -> tuple[Trial, Program, Program]:
    """Stop a process at a point, and then one that has just claimed its run.

    If the first one happens to be stopped in the middle of a transaction, on another thread, it is tried again.
    """
    for _ in range(5):
        trial = Trial.new(place, ledger)
        old = trial.spawn(at=f"{at}:stop", lease=1.0)
        assert stopped(old), trial.output()
        new = trial.spawn(at="run.claimed:1:stop")
        if stopped(new, 5.0):
            return trial, old, new
        for process in (old, new):
            process.kill()
            process.wait()
    raise AssertionError(f"a process that stops at {at} is always in the middle of a transaction")


@pytest.mark.parametrize("at", ["outcome.recorded:2", "body.after:4", "delivery.taken:1"])
def test_a_process_whose_run_was_claimed_writes_nothing_although_the_new_owner_has_not_begun(
    place: Path, ledger: Ledger, undisturbed: Expected, at: str
) -> None:
    """Here only the epoch fences: the head of the history is still the one that the old owner expects."""
    trial, old, new = two_stopped(place, ledger, at)
    trial.faults += [f"stopped at {at}", "the new owner stopped as well", "zombie"]
    claimed = [history.events for history in trial.histories(copied=True)]
    old.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    if [history.events for history in trial.histories(copied=True)] != claimed:
        trial.problems.append("the old owner wrote after the claim")
    new.send_signal(signal.SIGCONT)
    wait_for_all(trial, [new, old])
    problems = trial.finish(undisturbed)
    assert not problems, told(problems)
