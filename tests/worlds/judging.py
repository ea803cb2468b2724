"""What tests ask of a machine when something has happened: that its histories are sound, and what holds a run."""

from typing import Any

import pytest

from everstep.engine.app.app import App
from everstep.errors import RunHeld
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import BROKEN, GATES, NOTES


def sound(machine: Machine, *runs: str, settled: bool = True) -> None:
    """Every history agrees with the rules of the checker, and these runs replay as they were recorded."""
    found = check(export_histories(machine.store), settled=settled)
    assert not found, found
    for run in runs:
        assert not machine.replay(run).differences, run


async def held(machine: Machine, run: Any, reason: str) -> Any:
    """Return the one hold in which a run ends up."""
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold(run.id)
    assert hold.reason == reason
    return hold


async def killed_at(machine: Machine, gate: str, code: Any, *args: Any, run: str = "r") -> None:
    """Start a run and kill its process while a body is at a gate."""
    GATES[gate] = Gate()
    app, _ = await machine.start(code, *args, id=run)
    await GATES[gate].reached.wait()
    await machine.until(lambda: all(one.writer.all_is_durable for one in app.drivers.values()))
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()


async def failed(machine: Machine, flow: Any, *broken: str) -> App:
    """Start a process in which these are broken, and the run `r`, which fails with the name of the first."""
    BROKEN.update(broken)
    app = await machine.boot()
    with pytest.raises(ValueError, match=broken[0]):
        await app.run(flow, id="r")
    return app
