"""A program that is killed in the middle: each step writes a line, so that one can see what was done how often."""

import asyncio
import os
import sys

import everstep
from everstep import step, workflow


@step(effect="repeat")
async def note(place: int) -> int:
    """Write a line, after a little while."""
    await asyncio.sleep(0.05)
    with open(os.environ["NOTES"], "a") as stream:
        stream.write(f"{place} {os.getpid()}\n")
    return place


@step(effect="once")
async def pay(amount: int) -> int:
    """Write a line that must not be written twice."""
    with open(os.environ["NOTES"], "a") as stream:
        stream.write(f"paid {amount}\n")
    return amount


@workflow
async def journey(steps: int) -> int:
    """Take so many steps."""
    paid = await pay(7)
    done = [await note(place) for place in range(steps)]
    return len(done) + paid


@workflow
async def walk(steps: int) -> int:
    """Take so many steps that may be taken twice, two at a time."""
    for place in range(0, steps, 2):
        await asyncio.gather(note(place), note(place + 1))
    return steps


@workflow
async def greeting() -> str:
    """Wait for a name."""
    name: str = await everstep.receive("name", str)
    return f"hello {name}"


async def _drive(url: str) -> None:
    async with everstep.open(url, recover=True) as app:
        print("driving", flush=True)
        while app.store.counts().get("completed", 0) < int(sys.argv[3]):
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        print(everstep.run(journey, int(sys.argv[3]), id="j", url=sys.argv[2]))
    elif sys.argv[1] == "walk":
        with everstep.open(sys.argv[2], lease=float(os.environ.get("LEASE", "30"))) as app:
            print(app.run(walk, int(sys.argv[3]), id="w"))
    elif sys.argv[1] == "greet":
        print(everstep.run(greeting, id="g", url=sys.argv[2]))
    else:
        asyncio.run(_drive(sys.argv[2]))
