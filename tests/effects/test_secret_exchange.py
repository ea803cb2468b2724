"""Secret steps with streams and requests: what they write and raise reaches who reads and asks, and is never shown."""

import asyncio

import pytest
from click.testing import CliRunner

import everstep
from everstep import step, workflow
from everstep.cli import main
from tests.effects.shown import MARK, everything_shown, shown_to_programs
from tests.engine.resume_helpers import Machine


@step(effect="read", secret=True)
async def whisper() -> int:
    everstep.stream("tokens").append(f"word {MARK}")
    return 1


@step(effect="read", secret=True)
async def fail() -> None:
    raise ValueError(MARK)


@workflow(name="secret_exchange")
async def exchange() -> int:
    await whisper()
    everstep.stream("tokens").append("open")
    async for request in everstep.requests("do", int):
        try:
            await fail()
        except ValueError as error:
            request.refuse(error)
        if request.value == 0:
            break
    return 1


async def test_what_a_secret_step_streams_and_refuses_with_is_never_shown(machine: Machine) -> None:
    app, run = await machine.start(exchange, id="r")
    with pytest.raises(ValueError, match=MARK):
        await run.ask("do", 0)
    await run.result()
    entries = [entry async for entry in run.stream("tokens")]
    assert [entry.value for entry in entries] == [f"word {MARK}", "open"], "who reads it gets it whole"
    assert [entry.secret for entry in entries] == [True, False]
    assert MARK not in repr(entries)
    assert MARK not in await shown_to_programs(app, "r")
    await machine.stop(app)
    shown = everything_shown(machine.path, "r")
    assert "secret_exchange" in shown
    for words in ([], ["--json"], ["--text"], ["--follow"]):
        command = ["stream", "r", "tokens", "--url", str(machine.path), *words]
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert done.exit_code == 0
        assert "open" in done.stdout
        assert "(secret)" in done.stdout
        shown += done.stdout + done.stderr
    assert MARK not in shown
