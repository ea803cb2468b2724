"""Rollback meets holds, ends, other verbs and other processes."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.engine.code import loop
from everstep.engine.verbs import runs
from everstep.errors import (
    CompensationBegun,
    HoldConflict,
    RunActive,
    RunEnded,
    RunHeld,
)
from tests.engine.resume_helpers import Gate, Machine, freeze
from tests.worlds.ledger import GATES, NOTES
from tests.worlds.rooms import BOOKED, UNBOOKED, book, look, notes, rollback_trip, rolled_back, sound, unbook


# -- holds ------------------------------------------------------------------------------------------------------------
async def test_a_held_run_is_rolled_back_by_the_verb_and_by_the_resolution(machine: Machine) -> None:
    for name, verb in (("a", "rollback"), ("b", "resolve")):
        NOTES.clear()
        app, _ = await machine.start(rollback_trip, id=name)
        await machine.until_status(name, "waiting")
        await app.hold(name)
        if verb == "rollback":
            await app.rollback(name, "why not", by="ann")
        else:
            await app.resolve(name, "rollback", note="why not", by="ann")
        await rolled_back(machine, app, name)
        assert notes() == BOOKED + UNBOOKED
        (resolved,) = machine.bodies(name, "run_resolved")
        assert (resolved.resolution, resolved.note, resolved.by) == ("rollback", "why not", "ann")


async def test_a_run_whose_step_is_exhausted_is_rolled_back(machine: Machine) -> None:
    @step(retry=Retry(attempts=1, then="hold"), compensate=unbook)
    async def full(city: str) -> str:
        raise ConnectionError(city)

    @workflow
    async def tour() -> None:
        await book("Oslo")
        await full("Rome")

    app, run = await machine.start(tour, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    await app.resolve("r", "rollback")
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "unbook Oslo"], "what failed is not undone"


async def test_a_run_that_is_stuck_or_drifted_is_rolled_back(machine: Machine) -> None:
    world = {"schema": 1}

    @workflow
    async def stuck() -> None:
        await book("Oslo")
        await asyncio.Event().wait()

    @workflow
    async def drifts() -> None:
        await everstep.expect(everstep.witness.value("schema", lambda: world["schema"]))
        await book("Oslo")
        await everstep.receive("word", str)

    first = await machine.boot()
    with pytest.raises(RunHeld):
        await first.run(stuck, id="stuck")
    await first.start(drifts, id="drift")
    await machine.until_status("drift", "waiting")
    await machine.kill(first)
    world["schema"] = 2
    app, _ = await machine.start(drifts, id="drift")
    await machine.until_status("drift", "held")
    for run in ("stuck", "drift"):
        assert machine.hold(run).reason == run
        NOTES.clear()
        await app.resolve(run, "rollback")
        await rolled_back(machine, app, run)
        assert notes() == ["unbook Oslo"]


async def test_code_that_spins_offers_no_rollback_for_it_would_spin_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def spins() -> None:
        await book("Oslo")
        while True:
            await asyncio.sleep(0)

    app = await machine.boot()
    monkeypatch.setattr(loop, "TURNS_MAX", 1000)
    run = await app.start(spins, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").resolutions == ["retry", "cancel"]


async def test_a_run_whose_code_diverged_is_rolled_back_when_the_right_code_is_there(machine: Machine) -> None:
    def version(city: str) -> Any:
        @workflow(name="rollback_versioned")
        async def versioned() -> str:
            return await book(city) + await look(city) if city == "Oslo" else await look(city)

        return versioned

    app = await machine.boot()
    await app.run(version("Oslo"), id="r")
    version("Rome")
    await app.rollback("r")
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert (hold.reason, "rollback" in hold.resolutions) == ("diverged", False)
    with pytest.raises(HoldConflict):
        await app.rollback("r")
    assert notes() == ["book Oslo", "look Oslo"]
    version("Oslo")
    await app.holding.retry_diverged("r")
    await rolled_back(machine, app)
    assert notes() == ["book Oslo", "look Oslo", "unbook Oslo"]


# -- races ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("last", ["return", "raise", "mail"])
async def test_a_rollback_that_meets_the_end_takes_effect(machine: Machine, last: str) -> None:
    """The code has finished and its end is refused, because the request came first."""
    GATES["Rome"] = Gate()

    @workflow
    async def short(last: str) -> str:
        await book("Oslo")
        await book("Rome")
        if last == "raise":
            raise ValueError
        return "home"

    owner, stranger = await machine.boot(), await machine.boot()
    await owner.start(short, last, id="r")
    await GATES["Rome"].reached.wait()
    freeze(owner)  # so that it does not see the request before its end is refused
    await stranger.rollback("r", allow_uncompensated=last == "mail")
    GATES["Rome"].opened.set()
    if last == "raise":  # what it did is being undone already, and it has failed
        with pytest.raises(ValueError):
            await owner.get("r").result(timeout=60)
        sound(machine)
    else:
        await rolled_back(machine, owner)
    assert notes() == BOOKED + UNBOOKED
    assert [one.state for one in machine.store.signals("r")] == ["consumed"]


async def test_what_is_rolled_back_cannot_be_rolled_back_or_retried_again(machine: Machine) -> None:
    gate = Gate()

    async def undo_slowly(outcome: str) -> None:
        await gate.wait()
        NOTES.append("undone")

    @step(compensate=undo_slowly)
    async def do() -> str:
        return "x"

    @workflow
    async def flow() -> str:
        return await do()

    app = await machine.boot()
    await app.run(flow, id="r")
    await app.rollback("r")
    await gate.reached.wait()
    with pytest.raises(CompensationBegun, match="being undone"):
        await app.rollback("r")
    with pytest.raises(RunActive):
        await app.retry("r")
    gate.opened.set()
    await rolled_back(machine, app)
    with pytest.raises(CompensationBegun, match="has been undone"):
        await app.rollback("r")
    with pytest.raises(RunEnded):
        await app.cancel("r")
    assert notes() == ["undone"]


async def test_two_rollbacks_at_once_are_one(machine: Machine) -> None:
    one, other = await machine.boot(), await machine.boot()
    await one.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await asyncio.gather(one.rollback("r"), other.rollback("r"), return_exceptions=True)
    await rolled_back(machine, one)
    assert notes() == BOOKED + UNBOOKED
    assert machine.kinds("r").count("rollback_requested") == 1


async def test_a_cancel_now_does_not_swallow_a_rollback_that_waits_in_the_inbox(machine: Machine) -> None:
    """They are taken in the order of their arrival; what the cancel leaves, a later rollback undoes."""
    first, _ = await machine.start(rollback_trip, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(first)
    stranger = await machine.boot()
    await runs.rollback(stranger, "r", "", by="", uncompensated=False)
    await stranger.cancel("r", now=True)
    assert machine.status("r") == "waiting"
    app = await machine.worker()
    await machine.until_status("r", "cancelled")
    assert machine.kinds("r").index("rollback_requested") < machine.kinds("r").index("cancel_requested")
    assert notes() == [*BOOKED, "unbook Rome"], "what was under way is settled, and no more"
    await app.rollback("r")
    await rolled_back(machine, app)
    assert notes() == BOOKED + UNBOOKED


async def test_a_rollback_after_a_cancel_takes_the_cancel_s_place(machine: Machine) -> None:
    GATES["Wien"] = Gate()
    app, _ = await machine.start(rollback_trip, "book", id="r")
    await GATES["Wien"].reached.wait()
    await app.cancel("r", now=True)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    await app.rollback("r")
    await machine.until(lambda: "rollback_requested" in machine.kinds("r"))
    GATES["Wien"].opened.set()
    await rolled_back(machine, app)
    assert notes() == [*BOOKED, "book Wien", "unbook Wien", *UNBOOKED]


async def test_children_are_asked_to_stop_and_an_ended_child_is_left_alone(machine: Machine) -> None:
    @workflow
    async def waits() -> None:
        await everstep.receive("never", str)

    @workflow(on_parent_end="wait")
    async def awaited() -> None:
        await everstep.receive("never", str)

    @workflow
    async def parent() -> None:
        await everstep.start(waits, id="child")
        await everstep.start(awaited, id="awaited")
        await book("Oslo")
        await everstep.receive("never", str)

    app, _ = await machine.start(parent, id="r")
    await machine.until_status("r", "waiting")
    await machine.until_status("child", "waiting")
    await machine.until_status("awaited", "waiting")
    await app.rollback("r")
    await rolled_back(machine, app)
    await machine.until_status("child", "cancelled")
    await machine.until_status("awaited", "cancelled")
    sound(machine)
