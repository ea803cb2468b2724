"""A program that sells on PostgreSQL, in a process of its own: `python till.py PLAN`. Tests kill it around its COMMIT.

The plan is a JSON file with lives, each with a folder, a way, and the URLs of the shop and of the store. Started again,
it goes on with the runs it finds there, and leaves each run's status in `FOLDER/status-PID`.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import everstep
from everstep import Fatal
from everstep.errors import RunHeld

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.postgres.ways import WAYS, body_of, flow_of

KILL = os.environ.get("TILL_KILL", "")


def die_if(place: str) -> None:
    if place == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"stop {place}" == KILL:
        signal.raise_signal(signal.SIGSTOP)  # this thread, and with it all others


async def live(life: dict[str, Any]) -> None:
    folder, way = Path(life["folder"]), WAYS[life["contract"]]

    def after(_: Any) -> None:
        die_if("in the body, after the effect")
        if life.get("fails_after_a_crash") and everstep.current().attempt > 1:
            raise Fatal("sold out")

    body = body_of(way, lambda _: die_if("in the body, before the effect"), after)
    async with everstep.open(life["store"], lease=life.get("lease", 30)) as app:
        run = await app.start(flow_of(way, life["shop"], body), id="p")
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
