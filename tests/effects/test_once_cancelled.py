"""Once steps under way: cancels and timeouts wait for their end, and replay."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.errors import RunCancelled, RunHeld
from tests.engine.lives import prove_life
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import held
from tests.worlds.ledger import NOTES


# -- cancels and timeouts wait ----------------------------------------------------------------------------------------
def slow_pay(gate: Gate) -> Any:
    @step(effect="once")
    async def pay() -> str:
        NOTES.append("begun")
        await gate.wait()
        NOTES.append("sent")
        return "paid"

    return pay


def by_timeout(pay: Any) -> Any:
    @workflow
    async def flow() -> str:
        try:
            async with asyncio.timeout(5):
                await pay()
        except TimeoutError:
            return "too late"
        return "in time"

    return flow


def by_wait_for(pay: Any) -> Any:
    @workflow
    async def flow() -> str:
        try:
            await asyncio.wait_for(pay(), 5)
        except TimeoutError:
            return "too late"
        return "in time"

    return flow


def by_cancel(pay: Any) -> Any:
    @workflow
    async def flow() -> str:
        task = asyncio.create_task(pay())
        await asyncio.sleep(5)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "too late"
        return "in time"

    return flow


def by_group(pay: Any) -> Any:
    @workflow
    async def flow() -> str:
        async def failing() -> None:
            await asyncio.sleep(5)
            raise KeyError("now")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pay())
                group.create_task(failing())
        except* KeyError:
            NOTES.append("left")
        return "too late"

    return flow


@pytest.mark.parametrize("made", [by_timeout, by_wait_for, by_cancel, by_group])
@pytest.mark.parametrize("crash", [False, True])
async def test_a_timeout_reaches_the_code_only_after_the_step_is_settled(
    machine: Machine, made: Callable[[Any], Any], crash: bool
) -> None:
    gate = Gate()
    flow = made(slow_pay(gate))
    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    machine.clock.advance(6)
    await machine.until(lambda: "timer_fired" in machine.kinds("r"))
    await asyncio.sleep(0.05)
    assert machine.status("r") == "running", "the code is not told yet"
    assert "step_cancelled" not in machine.kinds("r")
    if crash:
        await machine.kill(app)
        app, run = await machine.start(flow, id="r")
        await held(machine, run, "in-doubt")
        await app.resolve("r", "done", value="paid")
    else:
        gate.opened.set()
    assert await run.result(timeout=60) == "too late"
    assert NOTES[:2] == (["begun", "left"] if made is by_group and crash else ["begun", "sent"][: 1 if crash else 2])
    assert machine.kinds("r").index("step_completed") > machine.kinds("r").index("timer_fired")
    assert not machine.replay("r").differences


async def test_a_step_that_is_cancelled_before_it_began_does_not_begin(machine: Machine) -> None:
    @step(effect="once")
    async def pay() -> str:
        NOTES.append("pay")
        return "paid"

    @workflow
    async def flow() -> str:
        task = asyncio.create_task(pay())
        await asyncio.sleep(0)
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "not begun"

    app = await machine.boot()
    assert await app.run(flow, id="r") == "not begun"
    assert NOTES == []
    assert not machine.replay("r").differences


async def test_a_run_that_is_cancelled_within_its_grace_waits_for_the_step(machine: Machine) -> None:
    gate = Gate()
    pay = slow_pay(gate)

    @workflow
    async def flow() -> str:
        try:
            return str(await pay())
        finally:
            NOTES.append("finally")

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.cancel(grace=30)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    assert NOTES == ["begun"]
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["begun", "sent", "finally"]
    assert not machine.replay("r").differences


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["quick", "expensive"])
@pytest.mark.parametrize("now", [True, False], ids=["now", "grace-over"])
async def test_a_run_that_is_ended_without_its_code_waits_for_a_body_that_must_not_be_cut_off(
    machine: Machine, now: bool, seconds: float
) -> None:
    gate = Gate()
    pay = slow_pay(gate)

    @workflow
    async def flow() -> str:
        paid = str(await pay())
        await everstep.receive("never")
        return paid

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await asyncio.sleep(seconds)
    await run.cancel(now=now, grace=5)
    if not now:
        await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
        machine.clock.advance(6)
    await asyncio.sleep(0.05)
    assert machine.status("r") == "running"
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["begun", "sent"]
    assert machine.status("r") == "cancelled"
    assert "step_completed" in machine.kinds("r"), "what happened is in the history"
    assert not machine.replay("r").differences


async def test_a_run_that_is_ended_without_its_code_is_held_if_its_step_comes_into_doubt(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once")
    async def pay() -> str:
        await gate.wait()
        raise OSError("reset")

    @workflow
    async def flow() -> str:
        return await pay()

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.cancel(now=True)
    gate.opened.set()
    await held(machine, run, "in-doubt")
    await app.resolve("r", "done", value="paid")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)


async def test_an_app_that_stops_starts_what_it_has_announced_and_leaves_no_doubt(machine: Machine) -> None:
    @step(effect="once")
    async def pay() -> str:
        NOTES.append("pay")
        return "paid"

    @workflow
    async def announced() -> str:
        return await pay()

    app, _ = await machine.start(announced, id="r")
    while not any(driver.attempts.starting for driver in app.drivers.values()):
        await asyncio.sleep(0)
    assert NOTES == []
    await machine.stop(app)
    assert NOTES == ["pay"]
    assert machine.kinds("r")[:3] == ["run_started", "step_started", "step_completed"]
    again = await machine.boot()
    assert await (await again.start(announced, id="r")).result(timeout=60) == "paid"
    assert NOTES == ["pay"]


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["quick", "expensive"])
async def test_a_hold_waits_for_a_body_that_must_not_be_cut_off(machine: Machine, seconds: float) -> None:
    gate = Gate()
    pay = slow_pay(gate)

    @step(effect="once")
    async def doubtful() -> str:
        await gate.reached.wait()
        raise OSError("reset")

    @step(effect="once")
    async def after() -> str:
        NOTES.append("after")
        return "after"

    @workflow
    async def flow() -> list[str]:
        async def two() -> str:
            return str(await pay()) + " " + await after()

        return list(await asyncio.gather(doubtful(), two()))

    app, run = await machine.start(flow, id="r")
    await machine.until(lambda: "step_doubted" in machine.kinds("r"))
    await asyncio.sleep(seconds)
    assert machine.status("r") == "running", "the hold is wanted, and the other body is not cut off"
    gate.opened.set()
    hold = await held(machine, run, "in-doubt")
    assert hold.step.endswith("doubtful")
    assert NOTES == ["begun", "sent"], "nothing more begins"
    assert len(machine.bodies("r", "step_completed")) == 1
    await app.resolve("r", "done", value="D")
    assert await run.result(timeout=60) == ["D", "paid after"], "what was not begun is not in doubt"
    assert NOTES == ["begun", "sent", "after"]
    assert not machine.replay("r").differences


async def test_a_hold_that_a_person_asks_for_waits_too(machine: Machine) -> None:
    gate = Gate()
    pay = slow_pay(gate)

    @workflow
    async def flow() -> str:
        return str(await pay()) + str(await everstep.receive("word"))

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await app.hold("r", "look at it")
    assert machine.status("r") == "running"
    gate.opened.set()
    with pytest.raises(RunHeld, match="look at it"):
        await run.result(timeout=60)
    await app.signal("r", "word", "!")
    await app.resolve("r", "retry")
    assert await run.result(timeout=60) == "paid!"
    assert NOTES == ["begun", "sent"]


# -- replay -----------------------------------------------------------------------------------------------------------
def test_every_prefix_of_a_history_with_once_steps_leads_to_the_same_end() -> None:
    """The outside keeps what the first life did, so later lives find it there: under the same keys, and no others."""
    done: list[str] = []

    def account(key: str, name: str) -> Any:
        return Done(name.upper()) if key in done else NotDone()

    failures = {"c"}

    @step(effect="once", probe=account, retry=Retry(attempts=2, first=1.0))
    async def pay(name: str) -> str:
        key = everstep.key()
        if name in failures:
            failures.discard(name)
            raise NotDone("not this time")
        if key not in done:
            done.append(key)
        if name == "b":
            raise OSError("the answer was lost")
        return name.upper()

    @workflow
    async def flow() -> list[str]:
        told = [await pay("a")]
        told += await asyncio.gather(pay("b"), pay("c"))
        try:
            async with asyncio.timeout(1):
                await everstep.receive("never")
        except TimeoutError:
            told.append(await pay("d"))
        return told

    life = prove_life(flow)
    assert life.value == ["A", "B", "C", "D"]
    assert len(done) == 4, "a step has the same key in all its lives"


def test_closing_an_app_waits_for_a_once_body_that_runs(tmp_path: Path) -> None:
    url = str(tmp_path / "store.db")

    @step(effect="once")
    async def pay(gate: everstep.Live[Any]) -> str:
        gate.reached.set()
        await asyncio.sleep(0.1)
        NOTES.append("paid")
        return "paid"

    gate = SimpleNamespace(reached=asyncio.Event())

    @workflow
    async def flow() -> str:
        return await pay(gate)

    async def main() -> str:
        async with everstep.open(url) as app:
            await app.start(flow, id="f")
            await gate.reached.wait()
        async with everstep.open(url) as app:
            run = await app.start(flow, id="f")
            return await run.result(timeout=60)

    assert asyncio.run(main()) == "paid"
    assert NOTES == ["paid"]
