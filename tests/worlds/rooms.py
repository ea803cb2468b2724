"""What the tests of rollback share: rooms that are booked and given back."""

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.errors import (
    RunCancelled,
)
from tests.engine.resume_helpers import Machine
from tests.worlds.judging import sound
from tests.worlds.ledger import NOTES, pass_gate


def notes() -> list[str]:
    """Return what was done so far."""
    return list(NOTES)


def unbook(booking: str, city: str) -> None:
    NOTES.append(f"unbook {city}")


@step(compensate=unbook)
async def book(city: str) -> str:
    NOTES.append(f"book {city}")
    await pass_gate(city)
    return f"b-{city}"


@step
async def look(city: str) -> str:
    NOTES.append(f"look {city}")
    await pass_gate(city)
    return city


@step(effect="once")
async def mail(text: str) -> str:
    NOTES.append(f"mail {text}")
    await pass_gate(text)
    return text


@workflow
async def rollback_trip(last: str = "wait") -> str:
    try:
        await book("Oslo")
        await book("Rome")
        if last == "look":
            await look("Wien")
        elif last == "book":
            await book("Wien")
        elif last == "mail":
            await mail("Wien")
        if last in ("return", "mail"):
            return "home"
        return await everstep.receive("word", str)
    except BaseException:
        await look("the exit")
        raise


async def rolled_back(machine: Machine, app: App, run: str = "r") -> None:
    """Wait until a run is undone, and see that all agree about it."""
    with pytest.raises(RunCancelled):
        await app.get(run).result(timeout=60)
    assert machine.kinds(run)[-1] == "run_cancelled"
    assert machine.bodies(run, "run_cancelled")[-1].rolled_back
    assert machine.replay(run).differences == []
    sound(machine)


BOOKED = ["book Oslo", "book Rome"]


UNBOOKED = ["unbook Rome", "unbook Oslo"]
