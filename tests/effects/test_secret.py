"""What is secret is stored and never shown: by no command, in no history, hold, log or error text of ours."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import workflow
from everstep.errors import RunHeld
from everstep.stores.protocol import HoldRow
from tests.effects.secretive import FAILING, doubtful, losing_token, parent_of_losing_token, read_token, secretive
from tests.effects.shown import MARK, everything_shown, shown_to_programs
from tests.engine.resume_helpers import Machine


@pytest.fixture(autouse=True)
def nothing_fails() -> None:
    FAILING.clear()


async def test_the_outcome_of_a_secret_step_is_never_shown(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    FAILING.add("once")
    app, run = await machine.start(secretive, id="r")
    await machine.until(lambda: "signal_awaited" in machine.kinds("r"))
    await machine.rest(app)
    assert {"heartbeat", "attempt_failed", "step_completed"} <= set(machine.kinds("r"))
    shown = everything_shown(machine.path, "r") + await shown_to_programs(app, "r") + caplog.text
    assert MARK not in shown
    assert "(secret)" in shown
    assert "ConnectionError" in shown, "the type of an error is shown"
    assert any(MARK in event.body.decode() for event in machine.events("r")), "it is stored"
    await run.signal("go", True)
    assert await run.result(timeout=60) == len(f"token {MARK}"), "and the code has it"


async def test_after_a_crash_the_code_has_it_again(machine: Machine) -> None:
    app, _ = await machine.start(secretive, id="r")
    await machine.rest(app)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("r", "go", True)
    assert await worker.get("r").result(timeout=60) == len(f"token {MARK}")


@pytest.mark.parametrize("flow", [losing_token, parent_of_losing_token])
async def test_an_error_of_a_secret_step_is_shown_by_its_type_only_wherever_it_goes(
    machine: Machine, flow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also as the cause of the run's own error, and of its parent's."""
    caplog.set_level(logging.DEBUG)
    FAILING.add("always")
    app = await machine.boot()
    with pytest.raises(RuntimeError) as raised:
        await app.run(flow, id="r")
    assert MARK in str(raised.value.__cause__), "whoever waits for the result gets the error itself"
    for run in ("r", "r.1") if flow is parent_of_losing_token else ("r",):
        shown = everything_shown(machine.path, run) + await shown_to_programs(app, run)
        assert MARK not in shown
        assert "RuntimeError" in shown
    assert MARK not in caplog.text


async def test_a_hold_about_a_secret_step_does_not_show_it(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    held: list[HoldRow] = []
    app = await machine.boot(on_hold=held.append)
    run = await app.start(doubtful, id="r")
    with pytest.raises(RunHeld) as error:
        await run.result(timeout=60)
    shown = everything_shown(machine.path, "r") + await shown_to_programs(app, "r") + caplog.text + str(error.value)
    assert MARK not in shown
    assert MARK.encode() not in held[0].report
    assert "probe_answered" in machine.kinds("r")
    await app.resolve("r", "done", value=f"{MARK}: it was done")
    assert await run.result(timeout=60) == f"{MARK}: it was done"
    without_result = everything_shown(machine.path, "r").replace(f"{MARK}: it was done", "", 8)
    (completed,) = machine.bodies("r", "step_completed")
    assert completed.secret
    assert "step_completed" in without_result


async def test_changed_arguments_of_a_secret_step_are_not_shown(machine: Machine) -> None:
    hint = ["first"]

    @workflow(name="changing")
    async def changing() -> str:
        token = await read_token(f"{MARK} {hint[0]}")
        await everstep.receive("go", bool)
        return token[:1]

    app, _ = await machine.start(changing, id="r")
    await machine.rest(app)
    await machine.kill(app)
    hint[0] = "second"
    worker = await machine.worker()
    await worker.signal("r", "go", True)
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert MARK not in everything_shown(machine.path, "r") + machine.hold("r").report.decode()
    await worker.resolve("r", "accept")
    assert await worker.get("r").result(timeout=60) == "t"


def test_a_command_that_drives_the_run_does_not_show_it_either(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from everstep import step, workflow\n"
        "@step(effect='read', secret=True)\n"
        f"async def read_token(hint: str) -> str:\n    return 'token {MARK}'\n"
        "@step(effect='read', secret=True)\n"
        f"async def lose_token(hint: str) -> str:\n    raise ValueError('{MARK}')\n"
        f"@workflow\nasync def good() -> int:\n    return len(await read_token('{MARK}'))\n"
        f"@workflow\nasync def bad() -> int:\n    return len(await lose_token('{MARK}'))\n"
    )
    for flow, status in (("good", 0), ("bad", 1)):
        for more in ([], ["--json"]):
            done = subprocess.run(
                [sys.executable, "-m", "everstep", "run", f"app.py:{flow}", "--id", flow + "".join(more), *more],
                cwd=tmp_path,
                env=dict(os.environ),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == status, done.stderr
            assert MARK not in done.stdout + done.stderr
            if more and flow == "bad":
                assert json.loads(done.stdout)["error"]["type"] == "ValueError"


def test_what_a_workflow_does_with_a_secret_is_its_own_affair(tmp_path: Path) -> None:
    """Said in the documentation: the result of a run is not secret, whatever it is made of."""

    @workflow(name="telling")
    async def telling() -> str:
        return await read_token("x")

    async def go() -> None:
        async with everstep.open(str(tmp_path / "runs.db")) as app:
            assert MARK in await app.run(telling, id="r")

    asyncio.run(go())
    assert MARK in everything_shown(tmp_path / "runs.db", "r")
