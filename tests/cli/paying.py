"""A program whose step has a key. It is copied into the folder of the tests that need it."""

import asyncio
from pathlib import Path

import everstep
from everstep import step, workflow


@step(effect="once", key="invoice:{number}")
async def pay(number: int) -> str:
    with Path("effects.txt").open("a") as file:
        file.write(f"pay {number} {everstep.key()}\n")
    if Path("reset").exists():
        raise ConnectionResetError("reset")
    while Path("slow").exists():
        await asyncio.sleep(0.02)
    return f"paid {number}"


@workflow
async def paying(number: int) -> str:
    return await pay(number)
