"""A program that pays, in a process of its own: `python payments.py PLAN`. Tests kill it around the effect.

The plan is a JSON file: `lives`, each with a store's `folder`, the `contract`, and the ledger's `url` and `entries`.
Started again, it goes on with the runs it finds there, and leaves each run's status in `FOLDER/status`.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.errors import RunHeld
from everstep.testing.ledger import apply

LIFE: dict[str, Any] = {}
KILL = os.environ.get("PAYMENTS_KILL", "")


def die_if(place: str, how: signal.Signals = signal.SIGKILL) -> None:
    if place == KILL:
        os.kill(os.getpid(), how)


def pay(amount: int) -> str:
    die_if("in the body, before the effect")
    if KILL == "stop":  # a worker that is stopped just before it sends
        signal.raise_signal(signal.SIGSTOP)  # this thread, and with it all others
    value = apply(LIFE["url"], everstep.current().step, everstep.key(), amount)
    die_if("in the body, after the effect")
    return value


def ask_ledger(key: str, amount: int) -> Done | NotDone:
    """The ledger's own account: every effect that it has applied, by key."""
    path = Path(LIFE["entries"])
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if line["kind"] == "applied" and line["key"] == key and line["arguments"] == amount:
            return Done(f"{line['effect']}-{line['digest'][:12]}")
    return NotDone()


pay_repeat = step(pay, name="pay_repeat", effect="repeat")
pay_forgotten = step(pay, name="pay_forgotten", effect="repeat")
pay_once = step(pay, name="pay_once", effect="once")
pay_probed = step(pay, name="pay_probed", effect="once", probe=ask_ledger)


@workflow
async def repeating(amount: int) -> str:
    return await asyncio.to_thread(pay_repeat, amount)


@workflow
async def repeating_forgotten(amount: int) -> str:
    return await asyncio.to_thread(pay_forgotten, amount)


@workflow
async def paying(amount: int) -> str:
    return await asyncio.to_thread(pay_once, amount)


@workflow
async def paying_probed(amount: int) -> str:
    return await asyncio.to_thread(pay_probed, amount)


FLOWS: dict[str, Any] = {
    "repeat": repeating,
    "repeat, keys forgotten": repeating_forgotten,
    "once": paying,
    "once, probed": paying_probed,
}


async def live(life: dict[str, Any]) -> None:
    LIFE.update(life)
    folder = Path(life["folder"])
    async with everstep.open(str(folder / "runs.db"), lease=life.get("lease", 30)) as app:
        run = await app.start(FLOWS[life["contract"]], 5, id="p")
        try:
            await run.result(timeout=60)
        except RunHeld:
            pass
        (folder / "status").write_text(await run.status())


async def main(plan: str) -> None:
    for life in json.loads(Path(plan).read_text()):
        await live(life)
    for thread in threading.enumerate():
        if thread.name.startswith("everstep-step"):
            thread.join()  # what was stopped and woken gets to its effect before the process ends


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
