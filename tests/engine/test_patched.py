"""`patched`: a change of code that old runs do not see and new ones do, and each run remembers its answer."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse, RunHeld
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import NOTES


@step
async def do(text: str) -> str:
    NOTES.append(text)
    return text


def old() -> Any:
    @workflow(name="patched_flow")
    async def changing() -> str:
        first = await do("old")
        await everstep.receive("go")
        return first + await do("last")

    return changing


def new() -> Any:
    @workflow(name="patched_flow")
    async def changing() -> str:
        first = await do("new" if everstep.patched("better") else "old")
        await everstep.receive("go")
        return first + await do("last")

    return changing


def unguarded() -> Any:
    @workflow(name="patched_flow")
    async def changing() -> str:
        first = await do("new")
        await everstep.receive("go")
        return first + await do("last")

    return changing


async def go(app: Any, run: str) -> Any:
    await app.signal(run, "go")
    return await app.get(run).result(timeout=60)


async def started_then_killed(machine: Machine, code: Any, run: str = "r") -> None:
    app, _ = await machine.start(code(), id=run)
    await machine.rest(app)
    await machine.kill(app)
    NOTES.clear()


async def test_a_run_that_is_under_way_keeps_the_old_way_and_a_new_one_takes_the_new(machine: Machine) -> None:
    await started_then_killed(machine, old)
    new()
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "oldlast"
    fresh = await app.start("patched_flow", id="fresh")
    assert await go(app, "fresh") == "newlast"
    assert NOTES == ["last", "new", "last"]
    assert [(body.name, body.value) for body in machine.bodies("r", "patched")] == [("better", False)]
    assert [(body.name, body.value) for body in machine.bodies(fresh.id, "patched")] == [("better", True)]
    assert machine.replay("r").differences == machine.replay("fresh").differences == []


@pytest.mark.parametrize("first", [old, new])
async def test_the_answer_is_remembered_across_crashes_and_later_code(machine: Machine, first: Any) -> None:
    await started_then_killed(machine, first)
    for _ in range(2):
        new()
        app, _ = await machine.start("patched_flow", id="r")
        await machine.rest(app)
        await machine.kill(app)
    new()
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == f"{first.__name__}last"
    assert len(machine.bodies("r", "patched")) == 1


async def test_when_the_old_way_is_gone_a_run_that_needs_it_is_held(machine: Machine) -> None:
    await started_then_killed(machine, old)
    unguarded()
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "held")
    with pytest.raises(RunHeld, match="diverged"):
        await app.get("r").result()
    assert NOTES == []


async def test_a_run_that_took_the_new_way_needs_no_patch_any_more(machine: Machine) -> None:
    await started_then_killed(machine, new)
    unguarded()
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "newlast"


async def test_a_patch_that_the_code_reaches_only_now_is_taken_also_in_an_old_run(machine: Machine) -> None:
    await started_then_killed(machine, old)

    @workflow(name="patched_flow")
    async def changing() -> str:
        first = await do("old")
        await everstep.receive("go")
        return first + await do("better last" if everstep.patched("later") else "last")

    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == "oldbetter last"
    assert machine.replay("r").differences == []


async def test_the_same_answer_everywhere_in_one_run(machine: Machine) -> None:
    def looping(patched: bool) -> Any:
        @workflow(name="looping")
        async def flow() -> list[str]:
            done = []
            for number in range(4):
                better = everstep.patched("better") if patched else False
                done.append(await do(f"{number} {'new' if better else 'old'}"))
                await everstep.receive("go")
            return done

        return flow

    app, _ = await machine.start(looping(False), id="r")
    await machine.rest(app)
    await machine.kill(app)
    looping(True)
    app = await machine.worker()
    for _ in range(4):
        await app.signal("r", "go")
    await machine.until_status("r", "completed")
    assert await app.get("r").result() == [f"{number} old" for number in range(4)], "mid-flight, to the end"


async def test_concurrent_code_asks_once(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        async def one(name: str) -> str:
            return await do(f"{name} {everstep.patched('p')}")

        return list(await asyncio.gather(one("a"), one("b")))

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["a True", "b True"]
    assert len(machine.bodies("r", "patched")) == 1
    assert machine.replay("r").differences == []


def test_patched_is_for_workflow_code() -> None:
    with pytest.raises(Misuse, match="workflow"):
        everstep.patched("x")
