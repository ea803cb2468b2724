"""The workflows that the worker of this folder serves. Put yours here."""

import asyncio

import everstep
from everstep import step, workflow


@step
async def greet(name: str) -> str:
    await asyncio.sleep(1)
    return f"Hello {name}, with the key {everstep.key()[:8]}"


@workflow
async def hello(name: str) -> str:
    await asyncio.sleep(5)  # a durable timer: stop the containers now, and start them again
    return await greet(name)
