"""Secret steps with keys, compensations, markers and groups of errors: what is secret stays so wherever it goes."""

import asyncio
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import everstep
from everstep import step, workflow
from everstep.cli import main
from everstep.errors import RunHeld
from everstep.stores.protocol import HoldRow
from tests.effects.shown import MARK, everything_shown, shown_to_programs
from tests.engine.resume_helpers import Gate, Machine, declared
from tests.waiting import open_sqlite

GATES: list[Gate] = []
BROKEN: list[str] = []


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    GATES.clear()
    BROKEN.clear()


async def _make(number: int, hint: str) -> str:
    if GATES:
        await GATES[0].wait()
    return f"token {MARK}"


secret_make = step(_make, name="make_token", effect="once", key="token:{number}", secret=True)
open_make = step(_make, name="make_token", effect="once", key="token:{number}")


@workflow(name="secret_making")
async def making(number: int) -> int:
    return len(await secret_make(number, MARK))


@workflow(name="open_making")
async def making_openly(number: int) -> int:
    return len(await open_make(number, MARK))


def keys_shown(path: Path) -> str:
    runner = CliRunner(env={"EVERSTEP_URL": str(path), "COLUMNS": "200"})
    return "".join(runner.invoke(main, ["effects", *more]).output for more in ([], ["--json"]))


async def test_an_outcome_that_is_shared_under_a_key_is_shown_to_nobody(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor to whoever declares the same step without the word."""
    caplog.set_level(logging.DEBUG)
    GATES.append(Gate())
    app, owner = await machine.start(making, 7, id="owner")
    await machine.until(lambda: "step_started" in machine.kinds("owner"))
    waiting = await app.start(making, 7, id="waiting")
    await machine.until(lambda: "key_taken" in machine.kinds("waiting"))
    shown = everything_shown(machine.path, "waiting") + await shown_to_programs(app, "waiting")
    GATES.pop().opened.set()
    assert await owner.result(timeout=60) == await waiting.result(timeout=60) == len(f"token {MARK}")
    for run in ("owner", "waiting"):
        shown += everything_shown(machine.path, run) + await shown_to_programs(app, run)
    shown += keys_shown(machine.path) + repr(await app.effects()) + caplog.text
    assert MARK not in shown
    row = machine.store.effect("token:7")
    assert row is not None
    assert row.secret
    assert row.outcome is not None
    assert MARK.encode() in row.outcome, "it is stored"
    assert await app.run(making_openly, 7, id="open") == len(f"token {MARK}")
    (shared,) = machine.bodies("open", "step_shared")
    assert shared.secret, "what is shared is as secret as it was where it was made"


async def test_an_outcome_under_a_key_that_a_person_gives_is_as_secret_as_the_step(machine: Machine) -> None:
    GATES.append(Gate())
    app, _ = await machine.start(making, 7, id="owner")
    await machine.until(lambda: "step_started" in machine.kinds("owner"))
    await machine.kill(app)
    worker = await machine.worker()
    await machine.until_status("owner", "held")
    await worker.resolve("owner", "done", value=f"token {MARK}")
    assert await worker.get("owner").result(timeout=60) == len(f"token {MARK}")
    assert MARK not in keys_shown(machine.path) + repr(await worker.effects())


# -- compensations -----------------------------------------------------------------------------------------------------
async def take_back(token: str, hint: str) -> None:
    assert MARK in token
    if BROKEN:
        raise ValueError(f"{token} cannot be taken back")


take_back_step = step(take_back, name="take_back")


def saga_of(compensation: Any) -> Any:
    @step(name="lend", effect="once", secret=True, compensate=compensation)
    async def lend(hint: str) -> str:
        return f"token {MARK}"

    @step(name="break", effect="read", secret=True)
    async def break_it(hint: str) -> None:
        raise KeyError(f"{hint} is broken")

    @workflow(name="lending")
    async def lending() -> int:
        token = await lend(MARK)
        await break_it(MARK)
        return len(token)

    return declared(lending)


@pytest.mark.parametrize("compensation", [take_back, take_back_step])
async def test_the_compensation_of_a_secret_step_is_secret_as_well(
    machine: Machine, compensation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given the outcome; and the error for whose sake it happens may be secret too."""
    caplog.set_level(logging.DEBUG)
    app = await machine.boot()
    with pytest.raises(KeyError) as raised:
        await app.run(saga_of(compensation), id="r")
    assert MARK in str(raised.value)
    assert "compensation_started" in machine.kinds("r")
    assert [body.secret for body in machine.bodies("r", "step_started")] == [True, True, True]
    assert machine.bodies("r", "compensation_started")[0].secret
    shown = everything_shown(machine.path, "r") + await shown_to_programs(app, "r") + caplog.text
    assert MARK not in shown
    assert "KeyError" in shown


async def test_a_compensation_of_a_secret_step_that_fails_is_held_without_showing_it(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    BROKEN.append("yes")
    held: list[HoldRow] = []
    app = await machine.boot(on_hold=held.append)
    run = await app.start(saga_of(take_back_step), id="r")
    with pytest.raises(RunHeld) as error:
        await run.result(timeout=60)
    shown = everything_shown(machine.path, "r") + await shown_to_programs(app, "r") + caplog.text + str(error.value)
    assert MARK not in shown + held[0].report.decode()
    BROKEN.clear()
    await machine.kill(app)
    worker = await machine.worker()
    await worker.resolve("r", "retry")
    with pytest.raises(KeyError):
        await worker.get("r").result(timeout=60)
    assert machine.bodies("r", "run_failed")[0].secret
    assert MARK not in everything_shown(machine.path, "r")


# -- atomic steps ------------------------------------------------------------------------------------------------------
async def test_the_outcome_of_a_secret_atomic_step_is_never_shown(machine: Machine) -> None:
    where = machine.path.with_name("vault.db")
    with open_sqlite(where) as connection:
        connection.execute("CREATE TABLE tokens (token TEXT)")

    @everstep.transaction(where, name="keep", secret=True)
    def keep(connection: sqlite3.Connection, token: str) -> str:
        connection.execute("INSERT INTO tokens VALUES (?)", (token,))
        if BROKEN:
            raise ValueError(f"{token} was refused")
        return f"kept {token}"

    @workflow(name="keeping")
    async def keeping() -> int:
        return len(await asyncio.to_thread(keep, MARK))

    app = await machine.boot()
    assert await app.run(declared(keeping), id="r") == len(f"kept {MARK}")
    BROKEN.append("yes")
    with pytest.raises(ValueError, match="refused"):
        await app.run(keeping, id="s")
    for run in ("r", "s"):
        assert MARK not in everything_shown(machine.path, run) + await shown_to_programs(app, run)


# -- errors ------------------------------------------------------------------------------------------------------------
@step(name="open_failing", effect="read")
async def fail_openly() -> None:
    raise LookupError("this may be seen")


@step(name="secret_failing", effect="read", secret=True)
async def fail_secretly() -> None:
    raise ValueError(MARK)


@workflow(name="failing_in_a_group")
async def failing_in_a_group(secret_first: bool) -> None:
    steps = [fail_secretly, fail_openly] if secret_first else [fail_openly, fail_secretly]
    outcomes = await asyncio.gather(*(one() for one in steps), return_exceptions=True)
    raise ExceptionGroup("both", [one for one in outcomes if isinstance(one, Exception)])


@pytest.mark.parametrize("secret_first", [True, False])
async def test_a_group_of_errors_with_a_secret_one_is_secret(machine: Machine, secret_first: bool) -> None:
    app = await machine.boot()
    with pytest.raises(ExceptionGroup):
        await app.run(failing_in_a_group, secret_first, id="r")
    assert machine.bodies("r", "run_failed")[0].secret
    assert MARK not in everything_shown(machine.path, "r") + await shown_to_programs(app, "r")
