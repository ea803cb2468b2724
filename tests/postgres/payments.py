"""A program whose steps must not happen twice: each writes a line to a ledger that no database knows of."""

import asyncio
import os
import sys

import everstep
from everstep import step, workflow


@step(effect="once")
async def pay(name: str, amount: int, seconds: float) -> int:
    """Write a line, after a while."""
    await asyncio.sleep(seconds)
    with open(os.environ["NOTES"], "a") as stream:
        stream.write(f"{name} {amount}\n")
    return amount


@step(effect="repeat")
async def note(name: str, place: int) -> int:
    """Write a line that may be written twice."""
    with open(os.environ["NOTES"], "a") as stream:
        stream.write(f"note {name} {place} {os.getpid()}\n")
    await asyncio.sleep(0.02)
    return place


@workflow
async def order(name: str) -> int:
    """Pay three times; somebody says when."""
    total = 0
    for amount in (1, 2, 3):
        seconds = await everstep.receive("go", float)
        total += await pay(name, amount, seconds)
    return total


@workflow
async def ticking(name: str, places: int) -> int:
    """Take step after step."""
    for place in range(places):
        await note(name, place)
    return places


async def drive(url: str) -> None:
    """Drive whatever is there, until somebody kills this."""
    async with everstep.open(url, recover=True, lease=float(os.environ.get("LEASE", "30"))):
        print("driving", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(drive(sys.argv[1]))
