"""How long nobody drives a run whose worker was killed, on PostgreSQL: until another one takes the next step.

    python benchmarks/failover.py URL [TRIALS]

Two workers look after one run that takes step after step. In each trial the one that drives it is killed, at a
moment that has nothing to do with what the other one is just doing; a third takes its place. Prints one line of JSON.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import everstep

TRIALS = 20
STEP_SECONDS = 0.01
PAUSE_SECONDS = 2.0
"""A worker that has just begun is given so long, and up to a second more."""
SECONDS_MAX = 30.0


@everstep.step(effect="repeat")
async def tick(place: int) -> int:
    """Note who took this step, and when. The clock is the machine's, so all processes share it."""
    with open(os.environ["TICKS"], "a") as stream:
        stream.write(f"{os.getpid()} {time.monotonic()}\n")
    await asyncio.sleep(STEP_SECONDS)
    return place


@everstep.workflow
async def ticking(places: int) -> int:
    """Take step after step, for as long as the trials last."""
    for place in range(places):
        await tick(place)
        if place % 200 == 199:
            await everstep.continue_as(places - place)
    return places


async def work(url: str) -> None:
    """Be a worker."""
    async with everstep.open(url, recover=True):
        await asyncio.sleep(3600)


class Trials:
    """The workers and what they note."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._ticks = folder / "ticks"
        self._ticks.touch()
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start a worker."""
        environment = {**os.environ, "TICKS": str(self._ticks)}
        process = subprocess.Popen([sys.executable, __file__, "--work", self._url], env=environment)
        self._workers[process.pid] = process

    def last(self) -> tuple[int, float]:
        """Return who took the newest step, and when."""
        lines = self._ticks.read_text().splitlines()
        pid, at = lines[-1].split() if lines else ("0", "0")
        return int(pid), float(at)

    def one(self, randomness: random.Random) -> float:
        """Kill the worker that drives the run, and return after how many seconds another one took a step."""
        time.sleep(PAUSE_SECONDS + randomness.random())
        pid, _ = self.last()
        self._workers[pid].send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        self._workers.pop(pid).wait()
        wait_for(lambda: self.last()[0] != pid)
        took = self._first_of(self.last()[0], killed_at) - killed_at
        self.begin()
        return took

    def _first_of(self, pid: int, after: float) -> float:
        lines = (line.split() for line in self._ticks.read_text().splitlines())
        return min(float(at) for who, at in lines if int(who) == pid and float(at) > after)

    def close(self) -> None:
        """End all workers."""
        for process in self._workers.values():
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait, and say so if it takes too long."""
    until = time.monotonic() + SECONDS_MAX
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("no other worker took over")
        time.sleep(0.005)


def measure(url: str, trials: int) -> list[float]:
    """Return how long each takeover took, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        made = Trials(url, Path(folder))
        try:
            with everstep.connect(url) as client:
                client.start("ticking", 1_000_000, id=f"failover-{os.getpid()}")
            made.begin()
            made.begin()
            wait_for(lambda: made.last()[0] != 0)
            randomness = random.Random(1)
            return [made.one(randomness) for _ in range(trials)]
        finally:
            made.close()


def main() -> None:
    """Measure, and print the figures."""
    if sys.argv[1] == "--work":
        asyncio.run(work(sys.argv[2]))
        return
    took = measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else TRIALS)
    figures = {"median": statistics.median(took), "least": min(took), "most": max(took), "trials": len(took)}
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
