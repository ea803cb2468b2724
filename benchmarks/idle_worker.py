"""What a worker costs that has nothing to do, in a store with and without runs that wait.

`idle_worker.py fill FOLDER` puts 100,000 waiting runs into a store, half of them for a signal and half for a timer;
`idle_worker.py idle FOLDER` is a worker on that store, which looks after all of them.
"""

import asyncio
import resource
import sys
import time
from pathlib import Path

from measuring import Figures, main

import everstep

WAITING_RUNS = 100_000
TOGETHER = 250
SETTLE_SECONDS = 2.0
IDLE_SECONDS = 10.0
DAY_SECONDS = 86_400.0


@everstep.workflow
async def waiting_for_word() -> str:
    return await everstep.receive("word", str)


@everstep.workflow
async def waiting_for_tomorrow() -> None:
    await asyncio.sleep(DAY_SECONDS)


async def fill(folder: Path) -> Figures:
    """Start the runs. Each is in the store, and soon not in memory any more."""
    began = time.perf_counter()
    async with everstep.open(url_of(folder)) as app:
        for first in range(0, WAITING_RUNS, TOGETHER):
            await asyncio.gather(
                *(
                    app.start(waiting_for_word if number % 2 else waiting_for_tomorrow, id=f"waiting-{number}")
                    for number in range(first, first + TOGETHER)
                )
            )
            await app.committer.drained()
    return {"seconds": time.perf_counter() - began}


async def idle(folder: Path) -> Figures:
    """Be a worker for a while, and return what that took."""
    async with everstep.open(url_of(folder), recover=True) as app:
        await asyncio.sleep(SETTLE_SECONDS)
        cpu = time.process_time()
        await asyncio.sleep(IDLE_SECONDS)
        cpu = time.process_time() - cpu
        counts = app.store.counts()
        return {"megabytes": resident_bytes() / 1e6, "cpu_seconds": cpu, "waiting": counts.get("waiting", 0)}


def resident_bytes() -> int:
    """Return the memory that this process has in use."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder}/everstep.db"


if __name__ == "__main__":
    main({"fill": lambda folder: asyncio.run(fill(folder)), "idle": lambda folder: asyncio.run(idle(folder))})
