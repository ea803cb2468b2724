"""Checkpoints and the other verbs: retry, cancel, fork, restart; and what arrives meanwhile."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.engine.code.recovery_point import damaged_checkpoints
from everstep.engine.history.verify import load_verified
from everstep.errors import RunCancelled, RunTimedOut
from everstep.model.events import CancelRequested, SignalReceived, StepCompleted, encode_body
from everstep.stores.protocol import Post
from tests.engine.resume_helpers import Gate, Machine, freeze
from tests.worlds.judging import killed_at, sound
from tests.worlds.ledger import GATES, NOTES, pass_gate
from tests.worlds.sums import Sum, add, peek, summing, taken


# -- with the other verbs ---------------------------------------------------------------------------------------------
@step
async def risky(number: int) -> int:
    NOTES.append(f"risky {number} {everstep.key()}")
    await pass_gate(f"risky {number}")
    if "broken" in GATES or f"broken {number}" in GATES:
        raise ValueError(number)
    return number


@workflow
async def risking(numbers: list[int], fatal: int) -> list[str]:
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        number = state.todo.pop(0)
        state.seen.append(str(await (risky(number) if number == fatal else add(number))))
        state = await everstep.checkpoint(state)
    return state.seen


async def test_a_retry_goes_on_from_the_newest_checkpoint_before_the_failure(machine: Machine) -> None:
    GATES["broken"] = Gate()
    app, run = await machine.start(risking, list(range(8)), 5, id="r")
    with pytest.raises(ValueError, match="5"):
        await run.result(timeout=60)
    GATES.clear()
    first_key = NOTES[-1].split()[-1]
    NOTES.clear()
    await app.retry("r")
    assert await run.result(timeout=60) == [str(number) for number in range(8)]
    assert [note.rpartition(" ")[0] for note in NOTES] == ["risky 5", "add", "add"]
    assert NOTES[0].split()[-1] == first_key, "another attempt at the same step"
    assert machine.replay("r").differences == []
    sound(machine)


@workflow
async def handling(numbers: list[int], extras: int) -> list[str]:
    """After a failure it goes on for a few turns, with checkpoints, and then raises it."""
    error: BaseException | None = None
    state = Sum(numbers)
    while state.todo:
        state = await everstep.checkpoint(state)
        number = state.todo.pop(0)
        try:
            state.seen.append(str(await (add(number) if error else risky(number))))
        except ValueError as caught:
            error, state.todo = caught, list(range(100, 100 + extras))
    if error is not None:
        raise error
    return state.seen


@pytest.mark.parametrize("extras", [1, 2, 4])
async def test_a_checkpoint_that_a_retry_voids_is_never_used(machine: Machine, extras: int) -> None:
    """With few of them an older one is kept that counts, with many there is none, and all is replayed."""
    app = await machine.boot()
    GATES["broken 3"] = Gate()
    run = await app.start(handling, [0, 1, 2, 3, 4, 5], extras, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    assert len(taken(machine)) == 4 + extras, "with those of the handler"
    GATES.clear()
    NOTES.clear()
    GATES["risky 3"] = Gate()
    await app.retry("r")
    await GATES["risky 3"].reached.wait()
    jumped = app.drivers["r"].execution.checkpoints.has_jumped  # type: ignore[union-attr]
    assert jumped == (extras < 3)
    GATES["risky 3"].opened.set()
    assert await run.result(timeout=60) == ["0", "1", "2", "3", "4", "5"], "the handler's work no longer counts"
    assert [note.split()[1] for note in NOTES] == ["3", "4", "5"]
    assert "checkpoint_damaged" not in machine.kinds("r")
    assert machine.replay("r").differences == []
    sound(machine)


async def test_after_a_retry_a_crash_uses_the_checkpoints_of_the_new_branch_with_its_keys(machine: Machine) -> None:
    GATES["broken"] = Gate()
    app, run = await machine.start(risking, list(range(8)), 3, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    GATES.clear()
    await machine.stop(app)
    GATES["add 6"] = Gate()
    app = await machine.worker()
    await app.retry("r")
    await GATES["add 6"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    entropy = app.drivers["r"].execution.entropy
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == [str(number) for number in range(8)]
    assert NOTES == ["add 6", "add 7"]
    (retried,) = machine.bodies("r", "run_retried")
    assert entropy == retried.entropy
    assert machine.replay("r").differences == []
    sound(machine)


async def test_a_restart_knows_nothing_of_the_old_checkpoints(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(summing, [1, 2, 3], id="r")
    NOTES.clear()
    GATES["add 20"] = Gate()
    await app.start(summing, [10, 20, 30], id="r", on_existing="restart")
    await GATES["add 20"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 60
    assert NOTES == ["add 20", "add 30"]
    assert machine.store.checkpoint("r", 1) is not None, "the old ones stay with the old history"


@workflow
async def cleaning(numbers: list[int]) -> int:
    state = await everstep.checkpoint(Sum(numbers))
    try:
        while state.todo:
            state.total += await add(state.todo.pop(0))
            state = await everstep.checkpoint(state)
    finally:
        while state.seen != ["clean"] * 3:
            await add(-1)
            state = await everstep.checkpoint(Sum([], state.total, [*state.seen, "clean"]))
    return state.total


async def test_a_cancelled_loop_cleans_up_across_a_crash_from_before_the_cancel(machine: Machine) -> None:
    GATES["add 3"], GATES["add -1"] = Gate(), Gate()
    app, _ = await machine.start(cleaning, list(range(6)), id="r")
    await GATES["add 3"].reached.wait()
    await app.cancel("r")
    await GATES["add -1"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    before = taken(machine)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    assert NOTES == ["add -1"] * 3
    assert taken(machine) == before, "a run that is about to end records none"
    sound(machine)


async def test_a_loop_that_follows_its_cancel_by_itself_records_none_on_the_way(machine: Machine) -> None:
    @workflow(name="checkpoint-graceful")
    async def graceful() -> int:
        state = 0
        while state < 10:
            state = await everstep.checkpoint(state)
            try:
                await add(state)
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            state += 1
        return state

    GATES["add 3"], GATES["add 6"] = Gate(), Gate()
    app, _ = await machine.start(graceful, id="r")
    await GATES["add 3"].reached.wait()
    await app.cancel("r")
    await GATES["add 6"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 10
    assert NOTES == ["add 6", "add 7", "add 8", "add 9"]
    assert len(taken(machine)) == 4
    sound(machine)


async def test_a_checkpoint_stays_when_the_end_beside_it_is_taken_back_for_a_cancel(machine: Machine) -> None:
    """The last checkpoint and the end go into one unit, and a cancel is in the inbox that nobody has seen yet."""
    GATES["add 2"] = Gate()
    app, _ = await machine.start(summing, [0, 1, 2], id="r")
    await GATES["add 2"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    freeze(app)  # so that it does not see the cancel before its end is refused
    machine.store.commit([Post("r", "cancel", value=encode_body(CancelRequested(reason="late")), at=1)])
    GATES["add 2"].opened.set()
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    assert machine.kinds("r")[-3:] == ["checkpoint_taken", "cancel_requested", "run_cancelled"]
    assert damaged_checkpoints(machine.store, machine.row("r"), load_verified(machine.store, machine.row("r"))) == []
    sound(machine)


@workflow
async def reading_after(turns: int, extras: int) -> int:
    """Its turns are quick reads; after a failure it does a few effects, and then raises it."""
    error: BaseException | None = None
    state = Sum(list(range(turns)))
    while state.todo:
        state = await everstep.checkpoint(state)
        number = state.todo.pop(0)
        try:
            state.total += await (add(number) if number >= 100 else risky(number) if number == 3 else peek(number))
        except ValueError as caught:
            error, state.todo = caught, list(range(100, 100 + extras))
    if error is not None:
        raise error
    return state.total


async def test_which_calls_were_recorded_before_a_retry_says_nothing_about_those_after_it(machine: Machine) -> None:
    app = await machine.boot()
    GATES["broken"] = Gate()
    run = await app.start(reading_after, 9, 4, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    voided = [body.number for body in machine.bodies("r", "checkpoint_taken")][1:]
    assert voided == [5, 6, 7, 8]
    GATES.clear()
    await app.retry("r")
    assert await run.result(timeout=60) == sum(range(9))
    assert [body.number for body in machine.bodies("r", "checkpoint_taken")][5:] == [5], "the others were quick reads"
    assert machine.replay("r").differences == []
    sound(machine)


async def test_the_time_of_a_run_with_a_timeout_is_counted_from_its_start_also_after_a_jump(machine: Machine) -> None:
    @workflow(name="checkpoint-timed", timeout=100)
    async def timed() -> int:
        state = await everstep.checkpoint(0)
        while state < 50:
            await asyncio.sleep(15)
            state = await everstep.checkpoint(state + 1)
        return state

    app, _ = await machine.start(timed, id="r")
    for count in range(2, 6):
        await machine.advance(15)
        await machine.until(lambda count=count: len(taken(machine)) == count)
    await machine.rest(app)
    await machine.kill(app)
    app = await machine.worker()
    for count in (6, 7):
        await machine.advance(15)
        await machine.until(lambda count=count: len(taken(machine)) == count)
    checkpoint = app.drivers["r"].execution.checkpoints
    assert checkpoint is not None
    assert (checkpoint.has_jumped, checkpoint.number) == (True, 7)
    await machine.advance(15)
    with pytest.raises(RunTimedOut):
        await app.get("r").result(timeout=60)
    assert len(taken(machine)) == 7


@workflow
async def parent_of_loops(numbers: list[int]) -> int:
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        state.total += await summing([state.todo.pop(0), 1])
        state = await everstep.checkpoint(state)
    return state.total


async def test_parents_and_children_both_go_on_from_their_checkpoints(machine: Machine) -> None:
    await killed_at(machine, "add 30", parent_of_loops, [10, 20, 30, 40])
    app = await machine.worker()
    await machine.until_status("r.6", "completed")
    await machine.advance(1)
    assert await app.get("r").result(timeout=60) == 104
    assert NOTES == ["add 30", "add 1", "peek 1000", "add 40", "add 1"]
    children = [row.id for row in machine.store.children("r")]
    assert len(children) == 4, "ids of children go on where they were"
    sound(machine)


# -- what arrives -----------------------------------------------------------------------------------------------------
@workflow
async def listening(turns: int) -> list[str]:
    state = await everstep.checkpoint(Sum([]))
    while len(state.seen) < turns:
        await peek(len(state.seen))
        state.seen.append(await everstep.receive("word", str))
        state = await everstep.checkpoint(state, every=1)
    return state.seen


async def test_signals_that_arrived_before_the_checkpoint_are_received_after_it(machine: Machine) -> None:
    GATES["peek 1"], GATES["peek 2"] = Gate(), Gate()
    app, _ = await machine.start(listening, 6, id="r")
    for number in range(5):
        await app.signal("r", "word", f"w{number}")
    await GATES["peek 1"].reached.wait()
    await machine.until(lambda: len(machine.bodies("r", "signal_received")) == 5)
    GATES["peek 1"].opened.set()
    await GATES["peek 2"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    assert max(event.seq for event in machine.events("r") if event.kind == "signal_received") < taken(machine)[-1]
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    await app.signal("r", "word", "w5")
    assert await app.get("r").result(timeout=60) == [f"w{number}" for number in range(6)]
    assert NOTES == ["peek 2", "peek 3", "peek 4", "peek 5"]
    sound(machine)


async def test_a_checkpoint_is_not_taken_while_the_code_has_not_seen_all_that_is_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that is recorded while an expensive outcome waits for the disk stands before the checkpoint."""
    GATES["peek 0"] = Gate()
    app, _ = await machine.start(listening, 2, id="r")
    await GATES["peek 0"].reached.wait()
    driver = app.drivers["r"]
    await machine.until(lambda: driver.writer.all_is_durable)
    ((number, attempt),) = driver.attempts.running.items()
    app.committer._busy = True  # the disk is slow
    driver.attempts._known.pop(number)
    driver.attempts.finish(attempt)
    driver.deliver("step_completed", "peek", StepCompleted(number, raw(app, 0), "", 1, 9.0), expensive=True)
    driver.deliver("signal_received", "", SignalReceived(1, "word", raw(app, "w0"), ""))
    driver.deliver("signal_received", "", SignalReceived(2, "word", raw(app, "w1"), ""))
    assert len(driver._unapplied) == 3
    app.committer._busy = False
    app.committer._soon()
    GATES.clear()
    assert await app.get("r").result(timeout=60) == ["w0", "w1"]
    kinds = machine.kinds("r")
    early = kinds.index("signal_received")
    assert kinds[early : early + 3] == ["signal_received", "signal_received", "signal_awaited"]
    for body in machine.bodies("r", "checkpoint_taken"):
        assert body.number != 2, "the code had not seen the second signal"
    judged_replays(machine)


def raw(app: App, value: Any) -> Any:
    import msgspec

    return msgspec.Raw(app.codec.encode(value))


def judged_replays(machine: Machine) -> None:
    assert machine.replay("r").differences == []
