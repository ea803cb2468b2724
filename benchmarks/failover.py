"""From the kill of a worker until another one does the next step of its run."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measuring import HERE, Failed, environment

TRIALS = 20
SECONDS_MAX = 10.0
PACE_SECONDS = 1.2
"""A worker is not killed before the one beside it has been there for a while."""

Worker = subprocess.Popen[str]


def failovers(folder: Path, trials: int = TRIALS, **variables: str) -> Iterator[float]:
    """Kill the worker that drives the run again and again, and give the seconds until another one goes on with it."""
    chance = random.Random(1)
    started = command_of(folder, "start")
    subprocess.run(started, env=environment(**variables), check=True, timeout=60)
    with two_workers(folder, variables) as workers:
        for _ in range(trials):
            time.sleep(PACE_SECONDS + chance.random())
            pid, _ = last_said(folder)
            killed = next(worker for worker in workers if worker.pid == pid)
            workers.remove(killed)
            at = time.time_ns()
            killed.kill()
            killed.wait()
            workers.append(new_worker(folder, variables))
            yield (first_of_another(folder, pid) - at) / 1e9


@contextmanager
def two_workers(folder: Path, variables: dict[str, str]) -> Iterator[list[Worker]]:
    workers = [new_worker(folder, variables), new_worker(folder, variables)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def new_worker(folder: Path, variables: dict[str, str]) -> Worker:
    return subprocess.Popen(command_of(folder), env=environment(**variables), stdout=subprocess.DEVNULL, text=True)


def command_of(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(HERE / "failing_worker.py"), str(folder), *more]


def first_of_another(folder: Path, pid: int) -> int:
    """Wait until another process than that says something, and return when it did."""
    until = time.monotonic() + SECONDS_MAX
    while time.monotonic() < until:
        said = [line.split() for line in lines_of(folder)]
        after = next(number for number in range(len(said), 0, -1) if int(said[number - 1][0]) == pid)
        if after < len(said):
            return int(said[after][1])
        time.sleep(0.01)
    raise Failed(f"nobody has gone on with the run within {SECONDS_MAX:.0f} s")


def last_said(folder: Path) -> tuple[int, int]:
    """Return who has said something last, and when."""
    until = time.monotonic() + SECONDS_MAX
    while time.monotonic() < until:
        if said := lines_of(folder):
            pid, at = said[-1].split()
            return int(pid), int(at)
        time.sleep(0.05)
    raise Failed("no worker has begun")


def lines_of(folder: Path) -> list[str]:
    file = folder / "said"
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
