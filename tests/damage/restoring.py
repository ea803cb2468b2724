"""A program with many effects, in a process of its own: `python restoring.py FOLDER LEDGER ENTRIES KIND`.

It goes on with the run in FOLDER until that waits for its last signal, writes `rest` into FOLDER, and waits there to be
killed. Started again it goes on. A held run ends it with 3.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.testing.ledger import apply

LEDGER = ""
ENTRIES = Path()
GATE = Path()
ROUNDS = 14


@step(effect="read")
async def look(number: int) -> int:
    return number


@step(retry=Retry(attempts=3, first=0.01))
async def note(number: int) -> str:
    """The ledger honours the keys of this one."""
    return await asyncio.to_thread(apply, LEDGER, "note", everstep.key(), number)


def ask_ledger(key: str, number: int) -> Done | NotDone:
    lines = [json.loads(line) for line in ENTRIES.read_bytes().splitlines()] if ENTRIES.exists() else []
    applied = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done(f"pay-{applied[0]['digest'][:12]}") if applied else NotDone()


@step(effect="once", probe=ask_ledger)
def pay(number: int) -> str:
    """The ledger forgets the keys of this one: what is sent twice is applied twice."""
    return apply(LEDGER, "pay", everstep.key(), number)


@step(effect="once")
def send(number: int) -> str:
    """No probe answers for this one. From the third on it waits while a test keeps the gate closed."""
    while number >= 2 and GATE.exists():
        time.sleep(0.01)
    return apply(LEDGER, "send", everstep.key(), number)


@workflow
async def restoring_child(number: int) -> list[str]:
    return [await note(number), await asyncio.to_thread(pay, number)]


@workflow
async def probed(number: int) -> list[Any]:
    done: list[Any] = []
    for round in range(ROUNDS):
        done.append(await look(round))
        done += await asyncio.gather(note(round), asyncio.to_thread(pay, round))
        await asyncio.sleep(0.01)
        done.append(await restoring_child(1000 + round))
        everstep.publish("rounds", round + 1)
    done.append(await everstep.receive("end", str))
    return done


@workflow
async def unprobed(number: int) -> list[str]:
    done = [await note(1)]
    done += [await asyncio.to_thread(send, round) for round in range(4)]
    return [*done, await everstep.receive("end", str)]


async def main(folder: Path, kind: str) -> int:
    flow: Any = {"probed": probed, "unprobed": unprobed}[kind]
    async with everstep.open(str(folder / "runs.db"), recover=True) as app:
        run = await app.start(flow, 1, id="r")
        while True:
            status = await run.status()
            if status in ("held", "completed"):
                (folder / "status").write_text(status)
                return 3 if status == "held" else 0
            if status == "waiting" and "signal_awaited" in [event.kind for event in await run.history()]:
                (folder / "rest").write_text("all is done but the end")
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    _, place, LEDGER, entries, kind = sys.argv
    ENTRIES, GATE = Path(entries), Path(place, "gate")
    sys.exit(asyncio.run(main(Path(place), kind)))
