"""A process with a wall clock of its own: `python clocks_apart.py URL FOLDER ROLE SHIFT RATE`.

The owner starts five runs with a `once` step and five with a `repeat` step, and says `begun` when all of them act. A
worker says `ready`, and takes up what is free until a file `over` is in the folder. Each body notes in the folder that
it has begun. SHIFT is in microseconds; with RATE the clock runs as many times as fast.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.stores.opening import open_store

LEASE_SECONDS = 4.0
BODY_SECONDS = 5.0
RUNS = 5
_, URL, FOLDER, ROLE, SHIFT, RATE = sys.argv
BEGAN = time.time_ns() // 1000


def wall() -> int:
    return BEGAN + round((time.time_ns() // 1000 - BEGAN) * float(RATE)) + int(SHIFT)


async def act(name: str) -> str:
    with Path(FOLDER, "bodies").open("a") as file:
        file.write(f"{name} {ROLE}\n")
    await asyncio.sleep(BODY_SECONDS)
    return name


@step(effect="once")
async def act_once(name: str) -> str:
    return await act(name)


@step(effect="repeat")
async def act_again(name: str) -> str:
    return await act(name)


@workflow
async def acting_once(name: str) -> str:
    return await act_once(name)


@workflow
async def acting_again(name: str) -> str:
    return await act_again(name)


def bodies() -> list[str]:
    path = Path(FOLDER, "bodies")
    return path.read_text().splitlines() if path.exists() else []


async def own(app: App) -> None:
    runs = [await app.start(acting_once, f"once-{n}", id=f"once-{n}") for n in range(RUNS)]
    runs += [await app.start(acting_again, f"repeat-{n}", id=f"repeat-{n}") for n in range(RUNS)]
    while len(bodies()) < len(runs):
        await asyncio.sleep(0.02)
    print("begun", os.getpid(), flush=True)
    for run in runs:
        await run.result()


async def work() -> None:
    print("ready", os.getpid(), flush=True)
    while not Path(FOLDER, "over").exists():
        await asyncio.sleep(0.05)


async def main() -> None:
    app = App(open_store(URL, clock=wall), recover=True, lease=LEASE_SECONDS)
    await app.open()
    try:
        await (own(app) if ROLE == "owner" else work())
    finally:
        await app.close()


asyncio.run(main())
