"""What the tests of keys share: steps whose key is a part of their arguments."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.errors import RunHeld
from everstep.stores.protocol import RunFilter
from everstep.stores.rows.keys import EffectRow
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine, declared
from tests.worlds.ledger import GATES, NOTES, pass_gate

ERRORS: list[BaseException] = []
"""What the next bodies of `charge` raise, one after the other."""


K = "invoice:7"


async def perform(invoice: int, amount: int) -> str:
    run = everstep.current().run
    NOTES.append(f"{run} {everstep.key()}")
    await pass_gate(run)
    if ERRORS:
        raise ERRORS.pop(0)
    return f"paid {amount} by {run}"


charge = step(perform, name="charge", effect="once", key="invoice:{invoice}")


ship = step(perform, name="ship", effect="repeat", key="invoice:{invoice}")


@workflow
async def charging(invoice: int, amount: int = 5) -> str:
    return await charge(invoice, amount)


@workflow
async def shipping(invoice: int, amount: int = 5) -> str:
    return await ship(invoice, amount)


FLOWS = {"once": charging, "repeat": shipping}


def gate(run: str) -> Gate:
    GATES[run] = Gate()
    return GATES[run]


def runs_that_ran() -> list[str]:
    return [note.partition(" ")[0] for note in NOTES]


def keys_presented() -> set[str]:
    return {note.partition(" ")[2] for note in NOTES}


def effect(machine: Machine, key: str = K) -> EffectRow:
    row = machine.store.effect(key)
    assert row is not None
    return row


def arguments(flow: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args or ((7,) if declared(flow).signature.least else ())


async def begun(app: App, flow: Any, run: str, *args: Any) -> Any:
    """Start a run whose body waits at its gate, and wait until it is there."""
    there = gate(run)
    handle = await app.start(flow, *arguments(flow, args), id=run)
    await asyncio.wait_for(there.reached.wait(), 60)
    return handle


async def waiting(machine: Machine, app: App, flow: Any, run: str, *args: Any) -> Any:
    """Start a run that waits for a key, and wait until it rests."""
    handle = await app.start(flow, *arguments(flow, args), id=run)
    await machine.until(lambda: machine.store.run(run) is not None and machine.status(run) == "waiting")
    return handle


async def held(machine: Machine, run: Any) -> Any:
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    return machine.hold(run.id)


def sound(machine: Machine) -> None:
    """Every rule holds, and every history replays."""
    assert check(export_histories(machine.store), settled=False) == []
    for run in machine.store.runs(RunFilter(limit=1000)):
        assert not machine.replay(run.id).differences, run.id
