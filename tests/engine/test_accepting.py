"""Other arguments are accepted of what is finished, and of nothing else: an unfinished step may have acted.

Each run is left in one state by a process that is killed. Then code comes that asks for the same with other arguments.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import everstep
from everstep import step, workflow
from everstep.cli import main
from everstep.engine.app.app import App
from everstep.errors import HoldConflict
from everstep.stores.protocol import HoldRow
from tests.engine.resume_helpers import Machine

APPLIED: list[tuple[str, int]] = []
"""What the outside was given: the key that came with it, and the amount."""


class Gate:
    """Where a body waits, and says that it does."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await asyncio.Event().wait()


Make = Callable[[int, Gate | None], Any]
"""Declares a workflow: with an amount, and with a gate in the life that is killed."""


def single(effect: Any) -> Make:
    def make(amount: int, gate: Gate | None) -> Any:
        @step(name="add", effect=effect)
        async def add(amount: int) -> int:
            APPLIED.append((everstep.key(), amount))
            if gate is not None:
                await gate.wait()
            return amount

        @workflow(name="flow")
        async def flow() -> int:
            return await add(amount)

        return flow

    return make


def beside_finished_ones(amount: int, gate: Gate | None) -> Any:
    """A fan-out in which two have finished and the third is under way."""

    @step(name="add")
    async def add(place: int, amount: int) -> int:
        if place == 3:
            APPLIED.append((everstep.key(), amount))
            if gate is not None:
                await gate.wait()
        return amount

    @workflow(name="flow")
    async def flow() -> int:
        return sum(await asyncio.gather(*(add(place, amount if place == 3 else 1) for place in (1, 2, 3))))

    return flow


def in_a_child(amount: int, gate: Gate | None) -> Any:
    """The child's own step is under way; the parent asks for the child with another argument."""

    @step(name="add")
    async def add(amount: int) -> int:
        APPLIED.append((everstep.key(), amount))
        if gate is not None:
            await gate.wait()
        return amount

    @workflow(name="child")
    async def child(amount: int) -> int:
        return await add(amount)

    @workflow(name="flow")
    async def flow() -> int:
        return await child(amount)

    return flow


def compensable(amount: int, gate: Gate | None) -> Any:
    async def undo(outcome: int, amount: int) -> None:
        raise AssertionError("it has no outcome, so nothing is undone")

    @step(name="add", compensate=undo)
    async def add(amount: int) -> int:
        APPLIED.append((everstep.key(), amount))
        if gate is not None:
            await gate.wait()
        return amount

    @workflow(name="flow")
    async def flow() -> int:
        return await add(amount)

    return flow


def after_a_checkpoint(amount: int, gate: Gate | None) -> Any:
    @step(name="add")
    async def add(turn: int, amount: int) -> int:
        if turn == 4:
            APPLIED.append((everstep.key(), amount))
            if gate is not None:
                await gate.wait()
        return amount

    @workflow(name="flow")
    async def flow() -> int:
        turn = 0
        while turn < 5:
            turn = await everstep.checkpoint(turn, every=1)
            turn += 1
            await add(turn, amount if turn == 4 else 1)
        return turn

    return flow


UNFINISHED: dict[str, Make] = {
    "read": single("read"),
    "repeat": single("repeat"),
    "once": single("once"),
    "fan-out": beside_finished_ones,
    "child": in_a_child,
    "compensable": compensable,
    "checkpoint": after_a_checkpoint,
}


async def left_behind(machine: Machine, make: Make) -> None:
    """Leave a run behind whose step was begun with 100, and was killed before its outcome."""
    APPLIED.clear()
    gate = Gate()
    app, _ = await machine.start(make(100, gate), id="r")
    await gate.reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)


async def held(machine: Machine, make: Make) -> App:
    make(200, None)
    app = await machine.worker()
    while machine.status("r") != "held":
        await machine.advance(5)  # a parent is taken up when its child has ended
    return app


@pytest.mark.parametrize("kind", UNFINISHED)
async def test_other_arguments_of_an_unfinished_step_are_not_accepted(machine: Machine, kind: str) -> None:
    make = UNFINISHED[kind]
    await left_behind(machine, make)
    before = list(APPLIED)
    app = await held(machine, make)
    hold = machine.hold("r")
    assert hold.reason == "diverged"
    assert hold.resolutions == ["retry", "cancel"]
    assert "has no outcome, so this cannot be accepted" in hold.summary
    for named in (None, hold.id):
        with pytest.raises(HoldConflict, match=r"has none: it may have acted.*as recorded"):
            await app.resolve("r", "accept", hold=named)
    assert machine.status("r") == "held"
    assert {amount for _, amount in APPLIED} <= {amount for _, amount in before}, "nothing is done with 200"


async def test_in_bulk_what_is_unfinished_is_refused_and_told(machine: Machine) -> None:
    await left_behind(machine, UNFINISHED["repeat"])
    await machine.stop(await held(machine, UNFINISHED["repeat"]))
    line = ["resolve", "--reason", "diverged", "--accept", "--yes", "--json", "--url", str(machine.path)]
    done = await asyncio.to_thread(CliRunner().invoke, main, line)
    answer = msgspec.json.decode(done.output)
    assert answer["resolved"] == []
    assert "add (event 2) has none" in answer["refused"][0]["error"]["message"]
    assert done.exit_code != 0
    assert machine.status("r") == "held"


async def test_a_failed_step_that_a_retry_opened_again_is_unfinished(machine: Machine) -> None:
    def make(amount: int) -> Any:
        @step(name="add")
        async def add(amount: int) -> int:
            APPLIED.append((everstep.key(), amount))
            raise ValueError(amount)

        @workflow(name="flow")
        async def flow() -> int:
            return await add(amount)

        return flow

    APPLIED.clear()
    app = await machine.boot()
    with pytest.raises(ValueError):
        await (await app.start(make(100), id="r")).result(timeout=60)
    make(200)
    await app.retry("r")
    await machine.until_status("r", "held")
    assert machine.hold("r").resolutions == ["retry", "cancel"]
    assert [amount for _, amount in APPLIED] == [100]


async def test_a_finished_step_whose_code_was_cancelled_is_accepted(machine: Machine) -> None:
    """No attempt at it is made any more, whatever its arguments are now."""

    def make(amount: int) -> Any:
        @step(name="add")
        async def add(amount: int) -> int:
            APPLIED.append((everstep.key(), amount))
            await asyncio.Event().wait()
            return amount

        @workflow(name="flow")
        async def flow() -> str:
            try:
                async with asyncio.timeout(5):
                    await add(amount)
            except TimeoutError:
                pass
            return await everstep.receive("go", str)

        return flow

    APPLIED.clear()
    first, _ = await machine.start(make(100), id="r")
    await machine.until(lambda: bool(APPLIED))
    await machine.until(lambda: "timer_started" in machine.kinds("r"))
    await machine.advance(5)
    await machine.until_status("r", "waiting")
    await machine.kill(first)
    make(200)
    app = await machine.worker()
    await app.signal("r", "go", "on")
    await machine.until_status("r", "held")
    await app.resolve("r", "accept")
    assert await app.get("r").result(timeout=60) == "on"
    assert [amount for _, amount in APPLIED] == [100]


def offer_accept(machine: Machine, hold: HoldRow) -> None:
    """Rewrite a hold as the release before this one wrote it: it offers to accept what is unfinished."""
    report = msgspec.json.decode(hold.report)
    del report["unfinished"]
    report["accepted"] = {"2": "00" * 16}
    report["consequences"]["accept"] = "keep the recorded outcomes"
    encoded = msgspec.json.encode(report)
    offered = '["retry","accept","cancel"]'
    machine.sql("UPDATE holds SET report = ?, resolutions = ? WHERE id = ?", encoded, offered, hold.id)


async def test_what_a_hold_of_an_older_release_offers_is_refused_all_the_same(machine: Machine) -> None:
    await left_behind(machine, UNFINISHED["repeat"])
    app = await held(machine, UNFINISHED["repeat"])
    await machine.stop(app)
    offer_accept(machine, machine.hold("r"))
    assert "accept" in machine.hold("r").resolutions
    app = await machine.boot()
    with pytest.raises(HoldConflict, match=r"add \(event 2\) has none"):
        await app.resolve("r", "accept")
    assert machine.status("r") == "held"
    assert [amount for _, amount in APPLIED] == [100]
    UNFINISHED["repeat"](100, None)
    await app.resolve("r", "retry")
    assert await app.get("r").result(timeout=60) == 100
    assert len(set(APPLIED)) == 1, "one key, one amount"
