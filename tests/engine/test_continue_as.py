"""`continue_as`: the same run with a fresh history. What it has is carried over, and nothing happens twice or never."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, witness, workflow
from everstep.engine.app.app import App
from everstep.engine.verbs.verify import verify_run
from everstep.engine.verbs.verify_store import verify_with_outside
from everstep.errors import IdConflict, Misuse, RunCancelled, RunTimedOut
from everstep.model.events import CancelRequested, encode_body
from everstep.stores.protocol import Post
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import sound
from tests.worlds.ledger import GATES, NOTES, pass_gate


@step
async def add(number: int) -> int:
    NOTES.append(f"add {number} {everstep.key()}")
    await pass_gate(f"add {number}")
    return number + 1


@step
def add_plainly(number: int) -> int:
    NOTES.append(f"add {number} {everstep.key()}")
    return number + 1


@workflow
async def counting(number: int, left: int) -> int:
    everstep.publish("left", left)
    number = await add(number)
    if left:
        everstep.continue_as(number, left - 1)
    return number


async def test_a_run_goes_on_with_a_fresh_history_and_the_new_arguments(machine: Machine) -> None:
    _, run = await machine.start(counting, 0, 3, id="r", tags={"of": "ann"})
    created = machine.row("r").created_at
    assert await run.result(timeout=60) == 4
    row = machine.row("r")
    assert (row.generation, row.status, row.tags, row.created_at) == (4, "completed", {"of": "ann"}, created)
    for generation in (1, 2, 3):
        kinds = [event.kind for event in machine.events("r", generation)]
        assert kinds == ["run_started", "value_published", "step_started", "step_completed", "run_continued"]
    assert machine.kinds("r")[-1] == "run_completed"
    assert len({note.split()[2] for note in NOTES}) == 4, "no two generations share a key"
    assert await run.published() == {"left": 0}
    sound(machine)


async def test_the_same_call_in_two_generations_has_two_keys_and_draws_other_numbers(machine: Machine) -> None:
    @workflow(name="same")
    async def same(drawn: list[float]) -> list[float]:
        await add(7)
        drawn.append(everstep.random().random())
        if len(drawn) < 3:
            everstep.continue_as(drawn)
        return drawn

    app = await machine.boot()
    drawn = await (await app.start(same, [], id="r")).result(timeout=60)
    assert len(NOTES) == len(set(NOTES)) == 3
    assert len(set(drawn)) == 3


async def test_a_def_workflow_goes_on_with_a_fresh_history_too(machine: Machine) -> None:
    @workflow(name="counting_plainly")
    def plainly(number: int, left: int) -> int:
        number = add_plainly(number)
        if left:
            everstep.continue_as(number, left - 1)
        return number

    app = await machine.boot()
    assert await (await app.start(plainly, 0, 2, id="r")).result(timeout=60) == 3
    assert machine.row("r").generation == 3


async def test_except_exception_does_not_swallow_it_and_a_task_group_lets_it_out(machine: Machine) -> None:
    @workflow(name="guarded")
    async def guarded(left: int) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                await group.create_task(add(left))
                if left:
                    everstep.continue_as(left - 1)
        except Exception:  # noqa: BLE001  # as careless code does
            return "swallowed"
        return "done"

    app = await machine.boot()
    assert await (await app.start(guarded, 1, id="r")).result(timeout=60) == "done"
    assert machine.row("r").generation == 2


async def test_a_start_with_the_first_arguments_attaches_and_with_others_conflicts(machine: Machine) -> None:
    app = await machine.boot()
    await (await app.start(counting, 0, 1, id="r")).result(timeout=60)
    assert await (await app.start(counting, 0, 1, id="r")).result(timeout=60) == 2
    with pytest.raises(IdConflict):
        await app.start(counting, 1, 0, id="r")


async def test_signals_that_nobody_received_are_received_in_the_next_generation(machine: Machine) -> None:
    @workflow(name="taking")
    async def taking(got: list[str], left: int) -> list[str]:
        got.append(await everstep.receive("word", str))
        if left:
            everstep.continue_as(got, left - 1)
        return got

    _, run = await machine.start(taking, [], 2, id="r")
    for word in ("one", "two"):
        await run.signal("word", word)
    await machine.until(lambda: machine.row("r").generation == 3)
    await machine.rest()
    assert machine.status("r") == "waiting"
    await run.signal("word", "three")
    assert await run.result(timeout=60) == ["one", "two", "three"]
    sound(machine)


async def test_a_signal_that_was_recorded_before_the_end_and_not_received_is_carried_over(machine: Machine) -> None:
    @workflow(name="late")
    async def late(left: int) -> str:
        await add(left)
        if left:
            everstep.continue_as(left - 1)
        return await everstep.receive("word", str)

    GATES["add 1"] = gate = Gate()
    _, run = await machine.start(late, 1, id="r")
    await gate.reached.wait()
    await run.signal("word", "early")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    gate.opened.set()
    assert await run.result(timeout=60) == "early"
    (started,) = machine.bodies("r", "run_started")
    assert [name for name, _, _ in started.carried.signals] == ["word"]
    sound(machine)


def deliver_behind(machine: Machine, app: App, post: Post) -> None:
    """Let something arrive when the outcome that lets the code end is recorded, and the code has not seen it."""
    driver = app.drivers[post.run]
    deliver, commit_now = driver.deliver, app.committer.commit_now

    def both(kind: str, step: str, body: Any, *, expensive: bool = False) -> None:
        if kind != "step_completed":
            deliver(kind, step, body, expensive=expensive)
            return
        app.committer.commit_now = lambda: None  # type: ignore[method-assign]
        deliver(kind, step, body, expensive=True)
        machine.store.commit([post])
        driver.inbox.take(app.store.inbox(post.run))
        assert next(one[2] for one in driver.execution.unapplied) == "step_completed"
        assert len(driver.execution.unapplied) == 2
        app.committer.commit_now = commit_now  # type: ignore[method-assign]

    driver.deliver = both  # type: ignore[method-assign]


async def test_a_signal_that_the_code_had_not_come_to_is_carried_over(machine: Machine) -> None:
    @workflow(name="hasty")
    async def hasty(left: int) -> str:
        await add(left)
        if left:
            everstep.continue_as(left - 1)
        return await everstep.receive("word", str)

    GATES["add 1"] = gate = Gate()
    app, run = await machine.start(hasty, 1, id="r")
    await gate.reached.wait()
    deliver_behind(machine, app, Post("r", "signal", "word", value=app.codec.encode("early"), at=machine.clock.now()))
    gate.opened.set()
    assert await run.result(timeout=60) == "early"
    assert [event.kind for event in machine.events("r", 1)][-2:] == ["signal_received", "run_continued"]
    sound(machine)


async def test_a_cancel_that_the_code_had_not_come_to_comes_before_a_fresh_history(machine: Machine) -> None:
    GATES["add 0"] = gate = Gate()
    app, run = await machine.start(counting, 0, 1, id="r")
    await gate.reached.wait()
    deliver_behind(machine, app, Post("r", "cancel", value=encode_body(CancelRequested()), at=machine.clock.now()))
    gate.opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert machine.row("r").generation == 1
    assert machine.replay("r").differences == []
    sound(machine)


async def test_a_process_that_dies_after_the_fresh_history_began_is_followed_by_one_that_goes_on(
    machine: Machine,
) -> None:
    GATES["add 1"] = gate = Gate()
    app, _ = await machine.start(counting, 0, 2, id="r")
    await gate.reached.wait()
    assert machine.row("r").generation == 2
    await machine.kill(app)
    del GATES["add 1"]
    again = await machine.boot()
    assert await (await again.start(counting, 0, 2, id="r")).result(timeout=60) == 3
    done = [note.split()[1] for note in NOTES]
    assert done == ["0", "1", "1", "2"]
    assert len(set(NOTES)) == 3, "the attempt that was cut off and the next have one key"
    sound(machine)


async def test_a_budget_counts_over_all_generations(machine: Machine) -> None:
    @workflow(name="bounded", budget=everstep.Budget(steps=3, then="fail"))
    async def bounded(number: int) -> int:
        everstep.continue_as(await add(number))

    _, run = await machine.start(bounded, 0, id="r")
    with pytest.raises(everstep.BudgetExceeded):
        await run.result(timeout=60)
    assert len(NOTES) == 3
    assert machine.row("r").generation == 4
    sound(machine)


async def test_the_timeout_counts_from_the_start_of_the_run(machine: Machine) -> None:
    @workflow(name="timed", timeout=100)
    async def timed(number: int) -> int:
        await asyncio.sleep(40)
        everstep.continue_as(number + 1)

    _, run = await machine.start(timed, 0, id="r")
    for _ in range(3):
        await machine.advance(40)
    with pytest.raises(RunTimedOut):
        await run.result(timeout=60)
    assert machine.row("r").generation == 3


async def test_a_remembered_fact_is_carried_over_and_its_drift_found(machine: Machine) -> None:
    path = machine.folder / "fact.txt"
    path.write_text("as it was")

    @workflow(name="watchful")
    async def watchful(first: bool) -> str:
        if first:
            await everstep.expect(witness.file(str(path)))
            everstep.continue_as(False)
        return await everstep.receive("go", str)

    app, _ = await machine.start(watchful, True, id="r")
    await machine.until(lambda: machine.row("r").generation == 2 and machine.status("r") == "waiting")
    await machine.kill(app)
    assert verify_with_outside(machine.store, machine.row("r")).drift == []
    path.write_text("another")
    (drift,) = verify_with_outside(machine.store, machine.row("r")).drift
    assert str(path) in drift["subject"]
    again = await machine.worker()
    await again.signal("r", "go", "on")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "drift"


async def test_a_cancel_that_comes_with_the_end_of_a_generation_is_not_lost(machine: Machine) -> None:
    @workflow(name="endless")
    async def endless(number: int) -> int:
        everstep.continue_as(await add(number))

    _, run = await machine.start(endless, 0, id="r")
    await machine.until(lambda: machine.row("r").generation > 3)
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    sound(machine)


async def test_a_run_that_is_being_cancelled_ends_and_does_not_go_on(machine: Machine) -> None:
    @workflow(name="stubborn")
    async def stubborn(number: int) -> int:
        try:
            await everstep.receive("never")
        finally:
            everstep.continue_as(number + 1)

    _, run = await machine.start(stubborn, 0, id="r")
    await machine.until_status("r", "waiting")
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert machine.row("r").generation == 1


async def test_a_parent_gets_the_result_of_a_child_that_went_on(machine: Machine) -> None:
    @workflow(name="parent")
    async def parent() -> int:
        return await counting(0, 2)

    app = await machine.boot()
    assert await (await app.start(parent, id="p")).result(timeout=60) == 3
    sound(machine)


async def _child_open(left: int) -> None:
    await everstep.start(counting, 0, 0)
    everstep.continue_as(left)


async def _step_open(left: int) -> None:
    asyncio.ensure_future(add(1))  # noqa: RUF006  # that is the mistake
    await asyncio.sleep(0)
    everstep.continue_as(left)


async def _judged(left: int) -> None:
    await everstep.expect(witness.value("mine", lambda: 1))
    everstep.continue_as(left)


@pytest.mark.parametrize(
    ("function", "says"),
    [(_child_open, "child run"), (_step_open, "step add"), (_judged, "remembers")],
)
async def test_what_a_fresh_history_would_not_know_is_refused(machine: Machine, function: Any, says: str) -> None:
    _, run = await machine.start(workflow(name=f"wrong{function.__name__}")(function), 1, id="r")
    with pytest.raises(Misuse, match=says):
        await run.result(timeout=60)
    assert machine.row("r").generation == 1


async def test_arguments_that_do_not_fit_are_an_error_of_the_code(machine: Machine) -> None:
    @workflow(name="misfit")
    async def misfit(number: int) -> int:
        everstep.continue_as(number, "too", "many")

    app = await machine.boot()
    with pytest.raises(TypeError):
        await (await app.start(misfit, 1, id="r")).result(timeout=60)


async def test_a_rollback_knows_what_earlier_generations_did_that_nothing_undoes(machine: Machine) -> None:
    @step(effect="once")
    async def send(number: int) -> int:
        return number

    @workflow(name="sending")
    async def sending(left: int) -> str:
        if left == 2:
            await send(left)
        if left:
            everstep.continue_as(left - 1)
        return await everstep.receive("go", str)

    app, _ = await machine.start(sending, 2, id="r")
    await machine.until(lambda: machine.row("r").generation == 3 and machine.status("r") == "waiting")
    with pytest.raises(Misuse, match="send"):
        await app.rollback("r")


async def test_a_missing_link_between_two_generations_is_found(machine: Machine) -> None:
    app = await machine.boot()
    await (await app.start(counting, 0, 2, id="r")).result(timeout=60)
    assert verify_run(machine.store, machine.row("r"))[0].sound
    machine.sql("DELETE FROM events WHERE run = 'r' AND generation = 2")
    assert "the next one does not follow it" in verify_run(machine.store, machine.row("r"))[0].problem
    assert {violation.rule for violation in check(export_histories(machine.store))} == {"L3", "D6"}
