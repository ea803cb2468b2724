"""A program whose machine has another clock each time: `python clocked.py FOLDER LEDGER ENTRIES SHIFT [sleeper]`.

It has timers, a retry with back-off, a step in doubt and a child. It writes its result and the times that it saw into
FOLDER/result.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.stores.sqlite import SqliteStore
from everstep.testing.ledger import apply

LEDGER = ""
ENTRIES = Path()


@step(retry=Retry(attempts=4, first=0.1, factor=1.5, jitter=0.0))
async def note(number: int) -> str:
    return await asyncio.to_thread(apply, LEDGER, "note", everstep.key(), number)


def ask_ledger(key: str, number: int) -> Done | NotDone:
    lines = [json.loads(line) for line in ENTRIES.read_bytes().splitlines()] if ENTRIES.exists() else []
    applied = [line for line in lines if line["kind"] == "applied" and line["key"] == key]
    return Done(f"pay-{applied[0]['digest'][:12]}") if applied else NotDone()


@step(effect="once", probe=ask_ledger, settle=0.05)
def pay(number: int) -> str:
    return apply(LEDGER, "pay", everstep.key(), number)


@workflow
async def clocked_child(number: int) -> str:
    await asyncio.sleep(0.1)
    return await note(number)


@workflow
async def clocked() -> list[Any]:
    seen = [everstep.now()]
    done: list[Any] = []
    for round in range(3):
        await asyncio.sleep(0.15)
        seen.append(everstep.now())
        done += await asyncio.gather(note(round), asyncio.to_thread(pay, round))
        seen.append(everstep.now())
        done.append(await clocked_child(100 + round))
        try:
            await everstep.receive("never", str, timeout=0.1)
        except TimeoutError:
            done.append("waited")
        seen.append(everstep.now())
    assert seen == sorted(seen), "now() never goes backwards"
    return done


@workflow
async def sleeper(seconds: float) -> str:
    await asyncio.sleep(seconds)
    await note(7)
    return "awake"


FLOWS: dict[str, tuple[Any, ...]] = {"clocked": (clocked,), "sleeper": (sleeper, 5.0)}


async def main(folder: Path, shift: int, flow: str) -> None:
    def shifted() -> int:
        return time.time_ns() // 1000 + shift

    app = App(SqliteStore(folder / "runs.db", clock=shifted), recover=True, lease=3.0)
    await app.open()
    try:
        run = await app.start(*FLOWS[flow], id="r")
        (folder / "result").write_text(json.dumps(await run.result(timeout=40)))
    finally:
        await app.close()


if __name__ == "__main__":
    _, place, LEDGER, entries, offset, *flow = sys.argv
    ENTRIES = Path(entries)
    asyncio.run(main(Path(place), int(offset), *(flow or ["clocked"])))
