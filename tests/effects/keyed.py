"""A program whose steps have keys, in a process of its own. Tests let several of them race, and kill them.

    python keyed.py one FOLDER LEDGER ENTRIES RUN CONTRACT [RESOLUTION]     one run; leaves its end in FOLDER/RUN.end
    python keyed.py race FOLDER LEDGER ENTRIES NAME COUNT                   a run for each of so many keys

Started again it goes on.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.errors import RunHeld
from everstep.testing.ledger import apply

KILL = os.environ.get("KEYED_KILL", "")
LEDGER = ENTRIES = ""
LANES = 4


def pay(number: int) -> str:
    if KILL == "before the effect":
        os.kill(os.getpid(), signal.SIGKILL)
    value = apply(LEDGER, everstep.current().step, everstep.key(), number)
    if KILL == "after the effect":
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def ask_ledger(key: str, number: int) -> Done | NotDone:
    """The ledger's own account: every effect that it has applied, by key."""
    path = Path(ENTRIES)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if line["kind"] == "applied" and line["key"] == key and line["arguments"] == number:
            return Done(f"{line['effect']}-{line['digest'][:12]}")
    return NotDone()


pay_repeat = step(pay, name="pay_forgotten", effect="repeat", key="invoice:{number}")
pay_once = step(pay, name="pay_once", effect="once", key="invoice:{number}")
pay_probed = step(pay, name="pay_probed", effect="once", probe=ask_ledger, key="invoice:{number}")


@workflow
async def keyed_repeat(number: int) -> str:
    return await asyncio.to_thread(pay_repeat, number)


@workflow
async def keyed_once(number: int) -> str:
    return await asyncio.to_thread(pay_once, number)


@workflow
async def keyed_probed(number: int) -> str:
    return await asyncio.to_thread(pay_probed, number)


FLOWS: dict[str, Any] = {"repeat": keyed_repeat, "once": keyed_once, "once, probed": keyed_probed}


async def one(app: everstep.App, folder: Path, run: str, contract: str, resolution: str = "") -> None:
    handle = await app.start(FLOWS[contract], 5, id=run)
    if resolution:
        await app.resolve(run, resolution, value="by hand" if resolution == "done" else None)
    try:
        end = await handle.result(timeout=40)
    except RunHeld:
        end = "held"
    (folder / f"{run}.end").write_text(end)


async def race(app: everstep.App, folder: Path, name: str, count: str) -> None:
    (folder / f"{name}.ready").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.001)

    values: dict[int, str] = {}

    async def lane(first: int) -> None:
        """One after the other, and both processes meet before each key: on a busy machine one would be far ahead."""
        other = {"left": "right", "right": "left"}[name]
        for number in range(first, int(count), LANES):
            (folder / f"{name}.{number}").touch()
            while not (folder / f"{other}.{number}").exists():
                await asyncio.sleep(0.001)
            run = await app.start(keyed_once, number, id=f"{name}-{number}")
            values[number] = await run.result(timeout=100)

    await asyncio.gather(*(lane(first) for first in range(LANES)))
    (folder / f"{name}.end").write_text(json.dumps(dict(sorted(values.items()))))


async def main(work: str, folder: str, *more: str) -> None:
    async with everstep.open(os.path.join(folder, "runs.db")) as app:
        await {"one": one, "race": race}[work](app, Path(folder), *more)


if __name__ == "__main__":
    _, work, folder, LEDGER, ENTRIES, *more = sys.argv
    asyncio.run(main(work, folder, *more))
