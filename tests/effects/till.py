"""A program that sells, in a process of its own: `python till.py PLAN`. Tests kill and stop it around its transaction.

The plan is a JSON file: `lives`, each with a store's `folder` and a `contract`. Started again, it goes on with the runs
it finds there, and leaves each run's status in `FOLDER/status`.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import everstep
from everstep import STORE, Fatal, transaction, workflow
from everstep.errors import RunHeld

LIFE: dict[str, Any] = {}
KILL = os.environ.get("TILL_KILL", "")


def die_if(place: str) -> None:
    if place == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"stop {place}" == KILL:
        signal.raise_signal(signal.SIGSTOP)  # this thread, and with it all others


def sell(connection: Any, item: str) -> str:
    die_if("in the body, before the effect")
    connection.execute("CREATE TABLE IF NOT EXISTS sales (key TEXT, item TEXT)")
    connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
    die_if("in the body, after the effect")
    if LIFE.get("fails_after_a_crash") and everstep.current().attempt > 1:
        raise Fatal("sold out")
    return f"sold {item}"


async def sell_slowly(connection: Any, item: str) -> str:
    await asyncio.sleep(0.001)
    return sell(connection, item)


def file_of(life: dict[str, Any]) -> str:
    return life["folder"] + "/shop.db"


@workflow
async def selling() -> str:
    step = transaction(file_of(LIFE), name="sell")(sell)
    return await asyncio.to_thread(step, "lamp")


@workflow
async def selling_slowly() -> str:
    return await transaction(file_of(LIFE), name="sell")(sell_slowly)("lamp")


@workflow
def selling_in_store() -> str:
    return transaction(STORE, name="sell")(sell)("lamp")


FLOWS: dict[str, Any] = {"atomic": selling, "atomic, async": selling_slowly, "atomic, store": selling_in_store}


async def live(life: dict[str, Any]) -> None:
    LIFE.clear()
    LIFE.update(life)
    folder = Path(life["folder"])
    async with everstep.open(str(folder / "runs.db"), lease=life.get("lease", 30)) as app:
        run = await app.start(FLOWS[life["contract"]], id="p")
        try:
            await run.result(timeout=60)
        except (RunHeld, Fatal):
            pass
        (folder / f"status-{os.getpid()}").write_text(await run.status())


async def main(plan: str) -> None:
    for life in json.loads(Path(plan).read_text()):
        await live(life)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
