"""The same with DBOS: `half_dbos.py FOLDER MARK [async]`. When launched it takes up what was left behind."""

import asyncio
import sys
import time
from pathlib import Path

from dbos import DBOS, DBOSConfig, SetWorkflowID
from halving import HalfWay, all_are_done
from measuring import HALF_RUN_STEPS, HALF_RUNS
from place import POSTGRES, is_empty, url_of

FOLDER, MARK = Path(sys.argv[1]), Path(sys.argv[2])
HALF_WAY = HalfWay(FOLDER, MARK)
COMPLETED = f"SELECT count(*) FROM {'dbos.' if POSTGRES else ''}workflow_status WHERE status = 'SUCCESS'"


@DBOS.step()
def act(x: int) -> int:
    if HALF_WAY.is_here(x):
        time.sleep(600)
    return x + 1


@DBOS.step()
async def act_async(x: int) -> int:
    if HALF_WAY.is_here(x):
        await asyncio.sleep(600)
    return x + 1


@DBOS.workflow()
def acting() -> int:
    x = 0
    while x < HALF_RUN_STEPS:
        x = act(x)
    return x


@DBOS.workflow()
async def acting_async() -> int:
    x = 0
    while x < HALF_RUN_STEPS:
        x = await act_async(x)
    return x


async def main(is_async: bool) -> None:
    is_new = is_empty(FOLDER)
    settings: DBOSConfig = {"name": "bench", "system_database_url": url_of(FOLDER, "dbos"), "log_level": "ERROR"}
    if is_new:
        settings["max_executor_threads"] = HALF_RUNS + 100  # so that all runs come half-way; later it is the default
    DBOS(config=settings)
    DBOS.launch()
    for number in range(HALF_RUNS if is_new else 0):
        with SetWorkflowID(f"run-{number}"):
            if is_async:
                await DBOS.start_workflow_async(acting_async)
            else:
                await asyncio.to_thread(DBOS.start_workflow, acting)
    await all_are_done(FOLDER, "dbos", COMPLETED, MARK)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[3:] == ["async"]))
