"""What the tests of checkpoints share: loops that count, and a judge of what they leave."""

from dataclasses import dataclass, field

import everstep
from everstep import step, workflow
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import act


@dataclass
class Sum:
    todo: list[int]
    total: int = 0
    seen: list[str] = field(default_factory=list)


@step
async def add(number: int) -> int:
    await act(f"add {number}")
    return number


@step(effect="read")
async def peek(number: int) -> int:
    await act(f"peek {number}")
    return number


@workflow
async def summing(numbers: list[int]) -> int:
    first = await peek(1000)
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        state.total += await add(state.todo.pop(0))
        state = await everstep.checkpoint(state)
    return state.total + first - 1000


def taken(machine: Machine, run: str = "r") -> list[int]:
    return [event.seq for event in machine.events(run) if event.kind == "checkpoint_taken"]
