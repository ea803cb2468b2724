"""The program that the tests of the command line run. It is copied into each test's folder."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import everstep
from everstep import step, workflow

HOSTILE = "\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]markup[/bold] \u202eevil"


@dataclass
class Reader:
    name: str
    age: int = 30


def note(text: str) -> None:
    with Path("effects.txt").open("a") as file:
        file.write(text + "\n")


@step(effect="read")
async def ask(question: str) -> str:
    note(f"ask {question}")
    return f"answer to {question}"


@step
async def send(to: str) -> str:
    note(f"send {to} {everstep.key()}")
    while Path("slow").exists():
        await asyncio.sleep(0.02)
    return f"sent to {to}"


@workflow
async def report(topic: str, reader: Reader) -> dict[str, str]:
    answers = await asyncio.gather(ask(topic), ask("why"))
    print("printed by the workflow")
    everstep.publish("progress", {"answers": len(answers)})
    return {"answers": "; ".join(answers), "sent": await send(reader.name), "type": type(reader).__name__}


@workflow
async def approval(question: str) -> bool:
    await ask(question)
    return await everstep.receive("approved", bool)


@workflow
async def introduced() -> list[str]:
    reader = await everstep.receive("reader", Reader)
    other = await everstep.approval("other", None, answer=Reader)
    return [reader.name, other.name]


@step
async def break_down() -> None:
    if not Path("repaired").exists():
        raise RuntimeError(f"broken {HOSTILE}")


@workflow
async def failing() -> str:
    await ask("first")
    await break_down()
    return "fine"


@step(retry=everstep.Retry(attempts=2, first=0.01, then="hold"))
async def never_works() -> int:
    raise ValueError("no")


@workflow
async def exhausted() -> int:
    return await never_works() + 1


@workflow
async def hostile(text: str) -> str:
    everstep.publish("said", HOSTILE)
    await ask(HOSTILE)
    return HOSTILE


@workflow
async def changing() -> bool:
    await ask(os.environ.get("QUESTION", "old"))
    if os.environ.get("PATCHED") and everstep.patched("louder"):
        await ask("louder")
    return await everstep.receive("go", bool)


@workflow
async def rounds(count: int) -> list[str]:
    state: list[str] = []
    while len(state) < count:
        state = await everstep.checkpoint(state)
        if len(state) == count - 1:
            await everstep.receive("go", bool)
        state.append(await send(os.environ.get("READER", "ann")))
    return state


@step
async def cancel_room(booking: str, city: str) -> None:
    note(f"cancel {booking}")
    if Path("hotel is closed").exists():
        raise ConnectionError("nobody answers")


@step(compensate=cancel_room)
async def book_room(city: str) -> str:
    note(f"book {city}")
    return f"room in {city}"


@step(effect="once")
async def send_card(city: str) -> None:
    note(f"card from {city}")


@workflow
async def trip(fails: bool, writes: bool = False) -> str:
    await book_room("Oslo")
    await book_room("Rome")
    if writes:
        await send_card("Rome")
    if fails:
        raise RuntimeError("no car")
    return "home"
