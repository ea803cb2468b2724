"""What the tests of sagas share: a trip whose rooms and seats are given back."""

from typing import Any

import everstep
from everstep import step, workflow
from tests.engine.resume_helpers import Gate
from tests.worlds.ledger import KEYS, NOTES


def note(what: str) -> None:
    NOTES.append(what)
    KEYS.append((everstep.current().step, everstep.key()))


def cancel_room(booking: str, city: str) -> None:
    note(f"cancel {booking} in {city}")


@step(compensate=cancel_room)
async def book_room(city: str) -> str:
    note(f"room in {city}")
    return f"r-{city}"


@step
async def plain(name: str) -> str:
    note(name)
    return name


@step(effect="read")
async def fail(text: str = "no car") -> None:
    raise ValueError(text)


def slow_compensation(gate: Gate, **options: Any) -> Any:
    async def undo(outcome: str, city: str) -> None:
        note(f"undo {city}")
        await gate.wait()

    @step(compensate=undo)
    async def do(city: str) -> str:
        return f"r-{city}"

    @workflow(**options)
    async def trip() -> None:
        await book_room("Oslo")
        await do("Rome")
        await fail()

    return trip
