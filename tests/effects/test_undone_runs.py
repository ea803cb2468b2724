"""Runs that were undone or are being undone: what may follow, their children, and changed code."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Done, step, workflow
from everstep.errors import CompensationBegun, HoldConflict, RunTimedOut
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import held, sound
from tests.worlds.ledger import KEYS, NOTES
from tests.worlds.trip import book_room, fail, note, plain, slow_compensation


# -- afterwards -------------------------------------------------------------------------------------------------------
async def test_begun_compensation_rules_out_a_retry(machine: Machine) -> None:
    @workflow
    async def trip() -> None:
        await book_room("Oslo")
        await fail()

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(trip, id="r")
    before = machine.dump()["events"]
    with pytest.raises(CompensationBegun, match="cannot be retried"):
        await app.retry("r")
    with pytest.raises(CompensationBegun):
        await app.start(trip, id="r", on_existing="retry")
    assert machine.dump()["events"] == before
    with pytest.raises(ValueError):
        await (await app.start(trip, id="r", on_existing="restart")).result()
    assert machine.row("r").generation == 2
    assert NOTES == ["room in Oslo", "cancel r-Oslo in Oslo"] * 2
    assert len(set(KEYS)) == 4, "a new generation has new keys"
    sound(machine)


async def test_a_failed_run_without_anything_to_compensate_can_be_retried(machine: Machine) -> None:
    errors = [ValueError("first")]

    @step(effect="read")
    async def shaky() -> None:
        if errors:
            raise errors.pop()

    @workflow
    async def trip() -> str:
        await shaky()
        return await book_room("Oslo")

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(trip, id="r")
    await app.retry("r")
    assert await app.get("r").result() == "r-Oslo"


# -- children ---------------------------------------------------------------------------------------------------------
@workflow
async def child_trip(fails: bool) -> str:
    room = await book_room("Oslo")
    if fails:
        await fail()
    return room


async def test_a_child_compensates_itself_and_its_parent_does_not_compensate_it(machine: Machine) -> None:
    @workflow
    async def parent() -> None:
        await child_trip(False)
        await book_room("Rome")
        try:
            await child_trip(True)
        except ValueError as error:
            NOTES.append(error.__notes__[0])
        raise LookupError

    app = await machine.boot()
    with pytest.raises(LookupError):
        await app.run(parent, id="r")
    assert NOTES[:3] == ["room in Oslo", "room in Rome", "room in Oslo"]
    assert NOTES[3:] == ["cancel r-Oslo in Oslo", "Compensated: book_room.", "cancel r-Rome in Rome"]
    sound(machine)


async def test_a_parent_whose_child_was_compensated_cannot_be_retried(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await child_trip(True)

    app = await machine.boot()
    with pytest.raises(ValueError):
        await app.run(parent, id="r")
    (child,) = machine.store.children("r")
    with pytest.raises(CompensationBegun, match=child.id):
        await app.retry("r")
    assert machine.status("r") == "failed"


async def test_children_that_end_with_the_run_are_asked_to_stop_before_it_is_undone(machine: Machine) -> None:
    gate = Gate()

    @workflow
    async def waits() -> None:
        await everstep.receive("never", str)

    async def undo(outcome: str) -> None:
        await gate.wait()

    @step(compensate=undo)
    async def do() -> str:
        return "x"

    @workflow
    async def parent() -> None:
        await everstep.start(waits, id="child")
        await do()
        await fail()

    _, run = await machine.start(parent, id="r")
    await gate.reached.wait()
    await machine.until_status("child", "cancelled")
    assert machine.status("r") == "running"
    gate.opened.set()
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    sound(machine)


# -- changed code -----------------------------------------------------------------------------------------------------
def version_of(argument: str = "Oslo", **options: Any) -> Any:
    """Return one version of a workflow; all have the same names."""

    @step(name="do", **options)
    async def do(city: str) -> str:
        note(f"do {city}")
        return f"r-{city}"

    @workflow(name="saga_versioned")
    async def versioned() -> None:
        await do(argument)
        await everstep.receive("go", str)
        raise ValueError("end")

    return versioned


def undo(outcome: str, city: str) -> None:
    note(f"undo {outcome} {city}")


def undo_better(outcome: str, city: str) -> None:
    note(f"undo better {outcome} {city}")


async def begun(machine: Machine, flow: Any) -> None:
    app, _ = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)


async def test_a_compensation_that_was_added_later_is_used(machine: Machine) -> None:
    await begun(machine, version_of())
    version_of(compensate=undo)
    app = await machine.worker()
    await app.signal("r", "go", "!")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo r-Oslo Oslo"]


async def test_a_compensation_that_was_replaced_is_used(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of(compensate=undo_better)
    app = await machine.worker()
    await app.signal("r", "go", "!")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo better r-Oslo Oslo"]


async def test_a_compensation_that_was_removed_is_a_divergence_until_somebody_accepts_it(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of()
    app = await machine.worker()
    await machine.until_status("r", "waiting", "held")
    await app.signal("r", "go", "!")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert "(compensation)" in machine.hold("r").summary
    assert "rollback" not in machine.hold("r").resolutions
    await app.resolve("r", "accept")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo"]


async def test_after_other_arguments_were_accepted_the_recorded_ones_are_undone(machine: Machine) -> None:
    await begun(machine, version_of(compensate=undo))
    version_of(compensate=undo, argument="Rome")
    app = await machine.worker()
    await app.signal("r", "go", "!")
    await machine.until_status("r", "held")
    await app.resolve("r", "accept")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "undo r-Oslo Oslo"]


async def test_other_arguments_of_a_once_step_in_doubt_are_not_accepted_and_it_keeps_its_key(machine: Machine) -> None:
    gate = Gate()
    asked: list[Any] = []

    def version(amount: int) -> Any:
        @step(name="pay", effect="once", probe=lambda key, amount: asked.append((key, amount)) or Done("paid"))
        async def pay(amount: int) -> str:
            note(f"pay {amount}")
            await gate.wait()
            return ""

        @workflow(name="saga_versioned")
        async def versioned() -> str:
            return await pay(amount)

        return versioned

    first, _ = await machine.start(version(5), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    version(6)
    app = await machine.worker()
    await machine.until_status("r", "held")
    assert "accept" not in machine.hold("r").resolutions
    version(5)
    await app.resolve("r", "retry")
    assert await app.get("r").result(timeout=60) == "paid"
    assert asked == [(KEYS[0][1], 5)]


async def test_code_that_changed_in_the_middle_of_a_compensation_is_verified(machine: Machine) -> None:
    gate = Gate()

    async def slow_undo(outcome: str, city: str) -> None:
        note("slow undo")
        await gate.wait()

    first, _ = await machine.start(version_of(compensate=slow_undo), id="r")
    await machine.until_status("r", "waiting")
    await first.signal("r", "go", "!")
    await gate.reached.wait()
    await machine.kill(first)

    renamed = step(slow_undo, name="another")
    version_of(compensate=renamed)
    app = await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert NOTES == ["do Oslo", "slow undo"]

    version_of(compensate=slow_undo)
    gate.opened.set()
    await app.holding.retry_diverged("r")
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["do Oslo", "slow undo", "slow undo"]
    sound(machine)


async def test_what_is_undone_is_decided_when_that_begins(machine: Machine) -> None:
    """A compensation that is added to another step in the middle of undoing comes too late."""
    gate = Gate()

    async def slow_undo(outcome: str) -> None:
        note("slow undo")
        await gate.wait()

    def version(**options: Any) -> Any:
        @step(name="first", **options)
        async def first() -> str:
            return "1"

        @step(name="second", compensate=slow_undo)
        async def second() -> str:
            return "2"

        @workflow(name="saga_versioned")
        async def versioned() -> None:
            await first()
            await second()
            raise ValueError

        return versioned

    before, _ = await machine.start(version(), id="r")
    await gate.reached.wait()
    await machine.kill(before)
    gate.opened.set()
    version(compensate=lambda outcome: note("too late"))
    app = await machine.worker()
    with pytest.raises(ValueError):
        await app.get("r").result(timeout=60)
    assert NOTES == ["slow undo", "slow undo"]
    sound(machine)


async def test_code_that_no_longer_fails_does_not_match_a_begun_compensation(machine: Machine) -> None:
    gate = Gate()

    async def slow_undo(outcome: str) -> None:
        await gate.wait()

    def version(*, fails: bool) -> Any:
        @step(name="do", compensate=slow_undo)
        async def do() -> str:
            return "x"

        @workflow(name="saga_versioned")
        async def versioned() -> str:
            await do()
            if fails:
                raise ValueError
            return "fine"

        return versioned

    first, _ = await machine.start(version(fails=True), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    version(fails=False)
    await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert "raise an error, and compensate" in machine.hold("r").summary


# -- while it is undone -----------------------------------------------------------------------------------------------
async def test_a_signal_during_a_compensation_moves_nothing(machine: Machine) -> None:
    gate = Gate()

    async def undo_slowly(outcome: str) -> None:
        await gate.wait()

    @step(compensate=undo_slowly)
    async def do() -> str:
        return "x"

    @workflow
    async def trip() -> None:
        async def listen() -> None:
            await plain(await everstep.receive("word", str))

        listening = asyncio.create_task(listen())
        await do()
        await fail()
        await listening

    app, run = await machine.start(trip, id="r")
    await gate.reached.wait()
    await run.signal("word", "hello")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    await machine.kill(app)
    gate.opened.set()
    second = await machine.worker()
    with pytest.raises(ValueError):
        await second.get("r").result(timeout=60)
    assert NOTES == []
    sound(machine)


async def test_a_held_compensation_that_was_asked_for_goes_on(machine: Machine) -> None:
    gate = Gate()
    app, run = await machine.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await app.hold("r", "let me look")
    hold = await held(machine, run, "asked")
    assert hold.resolutions == ["retry", "cancel"]
    gate.opened.set()
    await app.resolve("r", "retry")
    with pytest.raises(ValueError):
        await run.result(timeout=60)
    assert NOTES == ["room in Oslo", "undo Rome", "undo Rome", "cancel r-Oslo in Oslo"]
    sound(machine)


async def test_a_compensation_that_nobody_drives_is_held_without_the_offer_to_roll_back(machine: Machine) -> None:
    gate = Gate()
    first, _ = await machine.start(slow_compensation(gate), id="r")
    await gate.reached.wait()
    await machine.kill(first)
    app = await machine.boot()
    await app.hold("r")
    assert machine.hold("r").resolutions == ["retry", "cancel"]
    with pytest.raises(HoldConflict):
        await app.rollback("r")


async def test_what_the_code_asked_for_after_its_time_was_over_was_never_asked_for(machine: Machine) -> None:
    """A signal arrives when the grace is over and a payment is waited for: the code does not act any more."""
    gate = Gate()

    @step(effect="once", compensate=lambda receipt: note(f"refund {receipt}"))
    async def pay() -> str:
        await gate.wait()
        return "receipt"

    @workflow(timeout=10)
    async def stubborn() -> None:
        paying = asyncio.create_task(pay())
        while True:
            try:
                await plain(await everstep.receive("word", str))
            except asyncio.CancelledError:
                pass
        await paying

    app, run = await machine.start(stubborn, id="r")
    await gate.reached.wait()
    machine.clock.advance(10)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    machine.clock.advance(31)
    await machine.until(lambda: app.drivers["r"].end_wanted)
    await run.signal("word", "hello")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    gate.opened.set()
    with pytest.raises(RunTimedOut):
        await run.result(timeout=60)
    assert NOTES == ["refund receipt"]
    assert machine.replay("r").differences == []
    sound(machine)
