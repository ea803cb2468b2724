"""A worker whose run says where it is all the time, until it is killed: `failing_worker.py FOLDER`.

`failing_worker.py FOLDER start` starts the run. Workers of one machine can see that one of them is gone; here each says
that it is on another one, as they usually are.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from place import POSTGRES

import everstep
from everstep.stores.postgres import workers

SAID = Path(sys.argv[1]) / "said"
workers.machine = lambda: f"machine {os.getpid()}"  # type: ignore[assignment]


@everstep.step
async def say(number: int) -> None:
    with SAID.open("a") as file:
        file.write(f"{os.getpid()} {time.time_ns()}\n")
    await asyncio.sleep(0.02)


@everstep.workflow
async def saying() -> None:
    for number in range(1_000_000):
        await say(number)


async def main() -> None:
    if sys.argv[2:] == ["start"]:
        async with everstep.connect(POSTGRES) as client:
            await client.start("saying", id="saying")
        return
    async with everstep.open(POSTGRES, recover=True):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
