"""The runs of the golden files: what any release since 0.1.0 can begin, and today's has to finish.

It uses nothing but what 0.1.0 had. A workflow here is never changed: a release that changes how it is replayed shows in
`test_golden.py`. Add another one for something new.
"""

import asyncio
import inspect
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everstep
from everstep import Retry, step, workflow
from everstep.testing import save_history

HERE = ""
"""In which run the process is to die in the middle of a body."""


@dataclass
class Order:
    name: str
    amounts: list[int]


@step
async def add(a: int, b: int) -> int:
    return a + b


@step
def shout(word: str) -> str:
    return word.upper()


@step(effect="read", retry=Retry(attempts=2, first=0.0))
async def look(word: str) -> str:
    raise ValueError(f"{word} is not there")


@step(effect="once")
async def pay(order: str) -> str:
    await _die("held")
    return f"paid {order}"


@step
async def work(order: str) -> str:
    await _die("half-done")
    return f"worked on {order}"


@step(key="mail:{to}")
async def mail(to: str) -> str:
    return f"mailed {to}"


async def unbook(outcome: str, place: str) -> None:
    pass


@step(compensate=unbook)
async def book(place: str) -> str:
    return f"booked {place}"


@workflow(name="golden.sum")
async def total(order: Order) -> dict[str, Any]:
    sums = await asyncio.gather(*(add(amount, 1) for amount in order.amounts))
    everstep.publish("sums", sums)
    everstep.stream("words").append(order.name)
    return {"name": await asyncio.to_thread(shout, order.name), "sum": sum(sums), "mail": await mail(order.name)}


@workflow(name="golden.fails")
async def fails(word: str) -> str:
    return await look(word)


@workflow(name="golden.waits")
async def waits(first: int) -> list[Any]:
    state = await everstep.checkpoint([first])
    number = await add(first, 1)
    answer = await everstep.receive("go", str)
    return [state, number, answer, await add(number, 1)]


@workflow(name="golden.approves")
async def approves(to: str) -> str:
    answer = await everstep.approval("ship", {"to": to}, answer=bool)
    return await asyncio.to_thread(shout, to) if answer else ""


@workflow(name="golden.pays")
async def pays(order: str) -> str:
    return await pay(order)


@workflow(name="golden.works")
async def works(order: str) -> list[str]:
    return [await book("seat 7"), await mail("known"), await work(order), await mail(order)]


@workflow(name="golden.parent")
async def parent(number: int) -> list[Any]:
    return [await add(number, 1), await waits(number)]


@workflow(name="golden.counts")
async def counts(number: int) -> int:
    if number < 3:
        everstep.continue_as(await add(number, 1))
    return number


@workflow(name="golden.undoes")
async def undoes(place: str) -> str:
    await book(place)
    return await everstep.receive("go", str)


async def _die(run: str) -> None:
    if run == HERE:
        await asyncio.sleep(0.5)  # what is under way is written
        os.kill(os.getpid(), signal.SIGKILL)


async def _until(app: Any, run: str, status: str) -> None:
    while await app.get(run).status() != status:
        await asyncio.sleep(0.01)


async def begin(url: str, folder: Path) -> None:
    """Start all of them, export some, and die in the body of a `once` step."""
    async with everstep.open(url, lease=1) as app:
        await app.run(total, Order("lamp", [1, 2, 3]), id="finished")
        await app.run(total, Order("known", [4]), id="known")
        await app.run(counts, 1, id="counted")
        failed = await app.start(fails, "shelf", id="failed")
        with suppress(ValueError):
            await failed.result()
        for id, flow, argument in (
            ("waiting", waits, 1),
            ("cancelled", waits, 2),
            ("approving", approves, "ann"),
            ("parent", parent, 3),
            ("undone", undoes, "seat 1"),
        ):
            await app.start(flow, argument, id=id)
            await _until(app, id, "waiting")
        await app.cancel("cancelled")
        await _until(app, "cancelled", "cancelled")
        await app.rollback("undone", "golden")
        await _until(app, "undone", "cancelled")
        await app.schedule(total, Order("daily", [1]), name="daily", cron="0 8 * * *")
        await app.get_schedule("daily").pause("golden")
        some = ["finished", "failed", "counted", "waiting", "approving"]
        await app.export(some, str(folder / "runs.everstep"), unfinished="leave")
        if "schedules" in inspect.signature(app.export).parameters:
            others: dict[str, Any] = {"schedules": ["daily"], "unfinished": "leave"}
            await app.export(["finished"], str(folder / "others.everstep"), **others)
        save_history(app, "finished", folder / "history.json", payloads=True)
        await (await app.start(pays, "golden", id="held")).result()


async def go_on(url: str) -> None:
    """Let the `once` step in doubt be held, and die in the body of another step."""
    async with everstep.open(url, lease=1, recover=True) as app:
        await _until(app, "held", "held")
        await (await app.start(works, "golden", id="half-done")).result()


if __name__ == "__main__":
    HERE = sys.argv[1]
    if HERE == "held":
        asyncio.run(begin(sys.argv[2], Path(sys.argv[3])))
    else:
        asyncio.run(go_on(sys.argv[2]))
