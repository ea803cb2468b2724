"""The process is killed at the system calls with which it writes its store, wherever in SQLite or Python that is."""

import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.testing.ledger import Ledger
from tests.crash.figures import FIGURES
from tests.crash.nursery import Nursery
from tests.crash.trial import KILLED, Expected, Trial, all_of, told

WRITES = "write,pwrite64,fsync,fdatasync,ftruncate,unlink,openat"
RARE = "fsync,fdatasync,ftruncate,unlink"
PUSH_KILLS = 300
SOAK_KILLS = 20_000


def strace_works() -> bool:
    """Tell whether there is a strace here that may trace, and that kills where it is told."""
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "inject=getppid:signal=SIGKILL:when=2"]
    program = [sys.executable, "-c", "import os; os.getppid(); os.getppid(); os.getppid()"]
    return subprocess.run([*command, *program], capture_output=True).returncode in (KILLED, 128 - KILLED)


@pytest.fixture(scope="module", autouse=True)
def strace() -> None:
    if not strace_works():
        pytest.skip("strace is not installed or may not trace here, so no process is killed at its system calls")


def store_files(trial: Trial) -> list[str]:
    names = ("store.db", "store.db-wal", "store.db-journal", "store.db-shm", "store.db-live", "")
    names += ("shop.db", "shop.db-journal")
    return [part for name in names for part in ("-P", str(trial.folder / name))]


def tracing(trial: Trial, calls: str) -> list[str]:
    return [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-o",
        str(trial.folder / "trace"),
        "-e",
        f"trace={calls}",
        *store_files(trial),
    ]


def killing(trial: Trial, calls: str, number: int) -> list[str]:
    return [*tracing(trial, calls), "-e", f"inject={calls}:signal=SIGKILL:when={number}"]


def kill_at(trial: Trial, calls: str, number: int) -> bool:
    """Kill a process when one of its threads makes the n-th of these calls. False if none comes that far."""
    status = trial.run(traced_by=killing(trial, calls, number))
    trial.faults.append(f"killed at the {number}. of {calls}")
    if status == KILLED:
        trial.take_snapshot()
    elif status != 0:
        trial.problems.append(f"the traced process ended with {status}: {trial.output()[-2000:]}")
    return status == KILLED


def most_calls(trial: Trial, calls: str) -> int:
    """Return how many of these calls the busiest thread of an undisturbed process makes."""
    assert trial.run(traced_by=tracing(trial, calls)) == 0, trial.output()
    return max(Counter(line.split()[0] for line in (trial.folder / "trace").read_text().splitlines()).values())


def test_a_run_survives_a_kill_at_any_system_call_that_writes(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, undisturbed, PUSH_KILLS, random.Random(1))


@pytest.mark.soak
def test_a_run_survives_thousands_of_kills_at_system_calls(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected
) -> None:
    kill_everywhere(place, ledger, nursery, undisturbed, SOAK_KILLS, random.Random(2))


def kill_everywhere(
    place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Expected, kills: int, chance: random.Random
) -> None:
    """Kill at each number there is, in turn; of the rest, each hits a recovery, or one of the rarer calls."""

    def new_trial() -> Trial:
        return Trial.new(place, ledger, nursery=nursery)

    numbers = {calls: most_calls(new_trial(), calls) for calls in (WRITES, RARE)}
    everywhere = [(WRITES, number, 0) for number in range(1, numbers[WRITES] + 1)]
    rarely = [(RARE, number, 0) for number in range(1, numbers[RARE] + 1)]
    chosen = (everywhere + rarely)[:kills]
    while len(chosen) < kills:
        calls = chance.choice((WRITES, RARE))
        first, second = (chance.randint(1, numbers[calls]) for _ in range(2))
        chosen.append((calls, first, max(1, second // 3)))
    done = FIGURES.kills
    FIGURES.kills_wanted += kills

    def one(case: tuple[str, int, int]) -> list[str]:
        calls, number, again = case
        trial = new_trial()
        while not kill_at(trial, calls, number) and number > 1 and not trial.problems:
            # This process made fewer calls than the one that was counted; another trial comes a little earlier.
            shutil.rmtree(trial.folder)
            trial, number = new_trial(), number - max(1, number // 10)
        FIGURES.kills += bool(trial.snapshots)
        if again:
            kill_at(trial, calls, again)
        trial.run_to_the_end()
        return trial.finish(undisturbed)

    problems = all_of(one, chosen)
    assert not problems, told(problems)
    assert FIGURES.kills - done == kills


def test_every_write_that_is_made_durable_lies_between_two_crash_points(
    place: Path, ledger: Ledger, undisturbed: Expected
) -> None:
    """Each sync of the store has a point before it and one after it that belong together, on its own thread."""
    trial = Trial.new(place, ledger)
    assert trial.run(at="store.commit.written:8", traced_by=watching(trial)) == KILLED, trial.output()
    assert trial.run(traced_by=watching(trial)) == 0, trial.output()
    for number, least in ((1, 8), (2, 12)):
        outside, inside = bracketed((trial.folder / f"trace-{number}").read_text(), trial.folder)
        assert not outside, "\n".join(outside)
        assert inside >= least


def watching(trial: Trial) -> list[str]:
    number = len(list(trial.folder.glob("trace-*"))) + 1
    trace = str(trial.folder / f"trace-{number}")
    return ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-o", trace, "-e", "trace=write,fsync,fdatasync"]


def bracketed(trace: str, folder: Path) -> tuple[list[str], int]:
    """Return the syncs of the store that do not lie between two points of one write, and how many do."""
    passed: dict[str, str] = {}
    waiting: dict[str, list[tuple[str, str]]] = {}
    outside: list[str] = []
    inside = 0
    for line in trace.splitlines():
        thread = line.split()[0]
        if match := re.search(r'write\(\d+<[^>]*/points>, "([\w.]+)\\n"', line):
            point = match.group(1)
            assert point in POINTS, point
            for text, before in waiting.pop(thread, []):
                write = before.removesuffix(".before").removesuffix(".written")
                if before != write and point.startswith(f"{write}."):
                    inside += 1
                else:
                    outside.append(f"{text}: after {before or 'no point'}, before {point}")
            passed[thread] = point
        elif re.search(rf"f(data)?sync\(\d+<{re.escape(str(folder))}[/>]", line):
            waiting.setdefault(thread, []).append((line, passed.get(thread, "")))
    killed = "+++ killed by SIGKILL +++" in trace
    rest = [] if killed else [one for several in waiting.values() for one in several]
    outside += [f"{text}: after {before}, and no point follows" for text, before in rest]
    return outside, inside


def test_a_sync_outside_the_crash_points_is_found() -> None:
    def trace(*points: str) -> str:
        lines = [
            f'7 write(3</t/points>, "{point}\\n", 9) = 9' if point else "7 fsync(4</t/store.db>) = 0"
            for point in points
        ]
        return "\n".join(lines)

    good = trace("store.commit.before", "store.commit.written", "", "store.commit.after")
    assert bracketed(good, Path("/t")) == ([], 1)
    for bad in (
        trace("", "store.commit.before"),
        trace("store.commit.after", "", "store.commit.before"),
        trace("store.commit.written", "", "store.renew.after"),
        trace("store.commit.written", ""),
    ):
        assert len(bracketed(bad, Path("/t"))[0]) == 1
