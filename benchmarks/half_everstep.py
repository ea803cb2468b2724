"""Many runs of Everstep that are killed half-way and started again: `half_everstep.py FOLDER MARK`.

The first start and the start after the kill are the same command: what exists is taken up, what is missing is started.
"""

import asyncio
import sys
from pathlib import Path

from halving import HalfWay, all_are_done
from measuring import HALF_RUN_STEPS, HALF_RUNS
from place import POSTGRES, url_of

import everstep

FOLDER, MARK = Path(sys.argv[1]), Path(sys.argv[2])
HALF_WAY = HalfWay(FOLDER, MARK)
COMPLETED = f"SELECT count(*) FROM {'everstep.' if POSTGRES else ''}runs WHERE status = 'completed'"


@everstep.step
async def act(x: int) -> int:
    if HALF_WAY.is_here(x):
        await asyncio.sleep(600)
    return x + 1


@everstep.workflow
async def acting() -> int:
    x = 0
    while x < HALF_RUN_STEPS:
        x = await act(x)
    return x


async def main() -> None:
    async with everstep.open(url_of(FOLDER, "everstep")) as app:
        await asyncio.gather(*(app.start(acting, id=f"run-{number}") for number in range(HALF_RUNS)))
        await all_are_done(FOLDER, "everstep", COMPLETED, MARK)


if __name__ == "__main__":
    asyncio.run(main())
