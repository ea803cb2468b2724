"""Runs of queues that write down when they are at work."""

import asyncio
import os
import time

import everstep

SECONDS = float(os.environ.get("BODY_SECONDS", "0.05"))


def note(sign: str, name: str) -> None:
    line = f"{sign} {name} {os.getpid()} {time.monotonic_ns()}\n"
    descriptor = os.open("effects.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@everstep.step(effect="repeat")
async def work(name: str) -> None:
    note("+", name)
    await asyncio.sleep(SECONDS)
    note("-", name)


@everstep.workflow(queue="mail")
async def letter(name: str) -> str:
    await work(name)
    return name


@everstep.step(effect="once")
async def charge(name: str, number: int) -> None:
    note("+", f"{name}/{number}")
    await asyncio.sleep(SECONDS)
    note("-", f"{name}/{number}")


@everstep.workflow(queue="money")
async def charges(name: str, count: int) -> str:
    for number in range(count):
        await charge(name, number)
    return name


@everstep.step(effect="once", limit="api")
async def ask(name: str) -> None:
    note("+", name)
    await asyncio.sleep(SECONDS)
    note("-", name)


@everstep.workflow
async def questions(name: str, count: int) -> None:
    await asyncio.gather(*(ask(f"{name}/{number}") for number in range(count)))
