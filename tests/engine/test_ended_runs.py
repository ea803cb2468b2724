"""Ended runs: attach, retry, restart, fail; and how a failed run goes on from what failed."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Retry, step, workflow
from everstep.errors import IdConflict, RunActive, RunCancelled
from tests.engine.resume_helpers import Gate, Machine, steps_of
from tests.worlds.judging import failed
from tests.worlds.ledger import BROKEN, KEYS, NOTES


@step
async def do(name: str) -> str:
    NOTES.append(name)
    KEYS.append(everstep.key())
    if name in BROKEN:
        raise ValueError(name)
    return name.upper()


@workflow
async def three_steps() -> str:
    return await do("load") + await do("summarise") + await do("write")


@workflow
async def one_step(name: str) -> str:
    return await do(name)


@workflow
async def other_step(name: str) -> str:
    return await do(name)


# -- start with an id that exists --------------------------------------------------------------------------------------
async def test_attach_gives_the_result_of_a_completed_run_without_running_it(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(one_step, "a", id="r") == "A"
    events = machine.events("r")
    other = await machine.boot()
    assert await other.run(one_step, "a", id="r") == "A"
    assert await other.run(one_step, "a", id="r", on_existing="attach") == "A"
    assert NOTES == ["a"]
    assert machine.events("r") == events


async def test_attach_raises_the_failure_of_a_failed_run_with_its_type(machine: Machine) -> None:
    BROKEN.add("a")
    app = await machine.boot()
    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            await app.run(one_step, "a", id="r")
    assert NOTES == ["a"]


async def test_attach_to_a_running_run_waits_for_the_same_one(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return "done"

    @workflow
    async def flow() -> str:
        return await slow()

    app, other = await machine.boot(), await machine.boot()
    first = await app.start(flow, id="r")
    await gate.reached.wait()
    second = await other.start(flow, id="r")
    waiting = asyncio.gather(first.result(), second.result())
    gate.opened.set()
    assert await waiting == ["done", "done"]
    assert NOTES == ["slow"]
    assert machine.kinds("r") == ["run_started", "step_started", "step_completed", "run_completed"]


@pytest.mark.parametrize("policy", ["attach", "retry"])
async def test_other_arguments_are_an_id_conflict(machine: Machine, policy: Any) -> None:
    app = await machine.boot()
    await app.run(one_step, "a", id="r")
    with pytest.raises(IdConflict, match="other arguments"):
        await app.start(one_step, "b", id="r", on_existing=policy)
    assert NOTES == ["a"]


@pytest.mark.parametrize("policy", ["attach", "retry", "restart"])
async def test_another_workflow_is_an_id_conflict(machine: Machine, policy: Any) -> None:
    app = await machine.boot()
    await app.run(one_step, "a", id="r")
    with pytest.raises(IdConflict, match="one_step"):
        await app.start(other_step, "a", id="r", on_existing=policy)


async def test_fail_refuses_any_existing_run(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(one_step, "a", id="r", on_existing="fail")
    with pytest.raises(IdConflict, match="exists already"):
        await app.start(one_step, "a", id="r", on_existing="fail")


async def test_a_workflow_may_declare_what_happens_to_existing_runs(machine: Machine) -> None:
    @workflow(on_existing="restart")
    async def again() -> str:
        return await do("again")

    app = await machine.boot()
    await app.run(again, id="r")
    await app.run(again, id="r")
    assert NOTES == ["again", "again"]
    assert machine.row("r").generation == 2


# -- retry -------------------------------------------------------------------------------------------------------------
async def test_the_textbook_case_three_steps_the_second_fails_and_a_retry_goes_on_from_it(machine: Machine) -> None:
    app = await failed(machine, three_steps, "summarise")
    await machine.stop(app)
    BROKEN.clear()

    again = await machine.boot()
    assert await again.run(three_steps, id="r", on_existing="retry") == "LOADSUMMARISEWRITE"
    assert NOTES == ["load", "summarise", "summarise", "write"]
    assert steps_of(machine.kinds("r")) == [
        "step_started",
        "step_completed",
        "step_started",
        "step_failed",
        "step_started",
        "step_completed",
        "step_started",
        "step_completed",
    ]
    attempts = [(event.step, body.attempt, body.because) for event, body in started(machine)]
    assert attempts == [("do", 1, ""), ("do#2", 1, ""), ("do#2", 2, "person"), ("do#3", 1, "")]
    assert KEYS[1] == KEYS[2], "the key is that of the step, in every attempt"
    assert len({KEYS[0], KEYS[1], KEYS[3]}) == 3
    assert machine.replay("r").differences == []


def started(machine: Machine, run: str = "r") -> list[tuple[Any, Any]]:
    events = [event for event in machine.events(run) if event.kind == "step_started"]
    return list(zip(events, machine.bodies(run, "step_started"), strict=True))


async def test_a_retry_that_fails_again_can_be_retried_again(machine: Machine) -> None:
    BROKEN.add("summarise")
    app = await machine.boot()
    for _ in range(3):
        with pytest.raises(ValueError, match="summarise"):
            await app.run(three_steps, id="r", on_existing="retry")
    BROKEN.clear()
    await app.retry("r", by="ann")
    assert await app.get("r").result() == "LOADSUMMARISEWRITE"
    assert NOTES == ["load", "summarise", "summarise", "summarise", "summarise", "write"]
    assert [body.by for body in machine.bodies("r", "run_retried")] == ["", "", "ann"]
    assert machine.replay("r").differences == []


async def test_a_retried_step_has_all_its_attempts_again(machine: Machine) -> None:
    @step(retry=Retry(attempts=2, first=0.0, jitter=0.0))
    async def flaky() -> str:
        NOTES.append("flaky")
        if "flaky" in BROKEN:
            raise OSError("down")
        return "up"

    @workflow
    async def flow() -> str:
        return await flaky()

    BROKEN.add("flaky")
    app = await machine.boot()
    for _ in range(2):
        with pytest.raises(OSError, match="down"):
            await app.run(flow, id="r", on_existing="retry")
    assert [body.attempt for _, body in started(machine)] == [1, 2, 3, 4]


async def test_a_retry_survives_a_crash_at_once_after_it(machine: Machine) -> None:
    app = await failed(machine, three_steps, "summarise")
    BROKEN.clear()
    from everstep.engine.verbs import runs

    await runs.retry(app, "r", "ann")
    await machine.kill(app)
    assert machine.status("r") == "queued"
    await machine.worker()
    await machine.until_status("r", "completed")
    assert NOTES == ["load", "summarise", "summarise", "write"]


async def test_a_failure_of_the_code_itself_goes_on_with_the_fixed_code(machine: Machine) -> None:
    def declare(divisor: int) -> Any:
        @workflow(name="dividing")
        async def dividing() -> int:
            await do("load")
            value = 6 // divisor
            await do("write")
            return value

        return dividing

    app = await machine.boot()
    with pytest.raises(ZeroDivisionError):
        await app.run(declare(0), id="r")
    with pytest.raises(ZeroDivisionError):
        await app.run(declare(0), id="r", on_existing="retry")
    assert machine.kinds("r", "run_") == ["run_started", "run_failed", "run_retried", "run_failed"]
    assert await app.run(declare(2), id="r", on_existing="retry") == 3
    assert NOTES == ["load", "write"]
    assert machine.replay("r").differences == []


async def test_an_error_raised_from_a_steps_failure_is_that_steps(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        try:
            return await do("a")
        except ValueError as error:
            raise RuntimeError("wrapped") from error

    BROKEN.add("a")
    app = await machine.boot()
    with pytest.raises(RuntimeError, match="wrapped"):
        await app.run(flow, id="r")
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "A"


async def test_a_handled_failure_stays_as_it_is(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        try:
            await do("a")
        except ValueError:
            await do("plan b")
        return await do("c")

    app = await failed(machine, flow, "c", "a")
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "C"
    assert NOTES == ["a", "plan b", "c", "c"]


async def test_a_sibling_in_gather_that_had_finished_is_not_done_again(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        return list(await asyncio.gather(do("a"), do("b"), do("c")))

    app = await failed(machine, flow, "c")
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == ["A", "B", "C"]
    assert sorted(NOTES) == ["a", "b", "c", "c"]
    assert machine.replay("r").differences == []


async def test_a_sibling_that_was_cut_off_by_the_failure_is_begun_again_with_its_key(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        KEYS.append(f"slow {everstep.key()}")
        await gate.wait()
        return "slow"

    @workflow
    async def flow() -> list[str]:
        return list(await asyncio.gather(slow(), do("a")))

    app = await failed(machine, flow, "a")
    BROKEN.clear()
    gate.opened.set()
    assert await app.run(flow, id="r", on_existing="retry") == ["slow", "A"]
    slow_keys = [key for key in KEYS if key.startswith("slow")]
    assert len(slow_keys) == 2
    assert len(set(slow_keys)) == 1


async def test_in_a_task_group_the_failed_one_and_those_it_cancelled_are_done_again(machine: Machine) -> None:
    gate = Gate()

    @step
    async def slow() -> str:
        NOTES.append("slow")
        await gate.wait()
        return "slow"

    @workflow
    async def flow() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(do("done")), group.create_task(slow()), group.create_task(do("bad"))]
        return [task.result() for task in tasks]

    BROKEN.add("bad")
    app = await machine.boot()
    with pytest.raises(ExceptionGroup):
        await app.run(flow, id="r")
    assert "step_cancelled" in machine.kinds("r")
    BROKEN.clear()
    gate.opened.set()
    assert await app.run(flow, id="r", on_existing="retry") == ["DONE", "slow", "BAD"]
    assert sorted(NOTES) == ["bad", "bad", "done", "slow", "slow"]
    assert machine.replay("r").differences == []


async def test_a_retry_that_goes_back_beyond_an_earlier_one_shares_no_keys_with_it(machine: Machine) -> None:
    @workflow
    async def grudging() -> str:
        error = None
        try:
            first = await do("a")
        except ValueError as caught:
            error, first = caught, ""
        second = await do("b")
        third = await do("c")
        if error is not None:
            raise error
        return first + second + third

    BROKEN.update("ab")
    app = await machine.boot()
    with pytest.raises(ValueError, match="b"):
        await app.run(grudging, id="r")
    BROKEN.discard("b")
    with pytest.raises(ValueError, match="a"):
        await app.run(grudging, id="r", on_existing="retry")
    BROKEN.clear()
    assert await app.run(grudging, id="r", on_existing="retry") == "ABC"
    assert NOTES == ["a", "b", "b", "c", "a", "b", "c"]
    assert KEYS[3] != KEYS[6], "what was done between the two retries no longer counts"
    await machine.stop(app)
    assert machine.replay("r").differences == []


async def test_what_a_handler_did_after_the_failure_no_longer_counts_and_shares_no_keys(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        try:
            value = await do("a")
        except ValueError:
            await do("tell somebody")
            raise
        return value + await do("go on")

    app = await failed(machine, flow, "a")
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "AGO ON"
    assert NOTES == ["a", "tell somebody", "a", "go on"]
    assert KEYS[1] != KEYS[3], "both are the step do#2"
    await machine.stop(app)
    assert machine.replay("r").differences == []


async def test_siblings_that_went_on_while_the_handler_worked_keep_their_outcomes(machine: Machine) -> None:
    """Several outcomes arrive between the failure and the end, and each leads to new commands: all of that replays."""
    gates = {name: Gate() for name in ("b", "c", "handler")}

    @step
    async def wait_at(name: str) -> str:
        NOTES.append(name)
        await gates[name].wait()
        return name

    @workflow
    async def flow() -> str:
        async def chain(name: str) -> str:
            return await wait_at(name) + await do(f"{name}2")

        chains = [asyncio.create_task(chain("b")), asyncio.create_task(chain("c"))]
        try:
            first = await do("a")
        except ValueError:
            await wait_at("handler")
            raise
        return first + "".join(await asyncio.gather(*chains))

    BROKEN.add("a")
    app, run = await machine.start(flow, id="r")
    await gates["handler"].reached.wait()
    gates["b"].opened.set()
    await machine.until(lambda: "b2" in NOTES)
    gates["c"].opened.set()
    await machine.until(lambda: "c2" in NOTES)
    await machine.until(lambda: machine.kinds("r").count("step_completed") == 4)
    gates["handler"].opened.set()
    with pytest.raises(ValueError, match="a"):
        await run.result()
    BROKEN.clear()
    NOTES.clear()
    first_keys = list(KEYS)
    KEYS.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "AbB2cC2"
    assert sorted(NOTES) == ["a", "b2", "c2"], "b and c had finished; what followed from them is asked for anew"
    assert len(set(KEYS) & set(first_keys)) == 1, "only the failed step keeps its key"
    assert machine.replay("r").differences == []


async def test_a_second_sibling_that_failed_later_is_retried_as_well(machine: Machine) -> None:
    gate = Gate()

    @step
    async def late() -> str:
        NOTES.append("late")
        await gate.wait()
        if "late" in BROKEN:
            raise OSError("late")
        return "LATE"

    @step
    async def handle() -> None:
        gate.opened.set()
        await machine.until(lambda: machine.kinds("r").count("step_failed") == 2)

    @workflow
    async def flow() -> list[str]:
        try:
            return list(await asyncio.gather(do("a"), late()))
        except ValueError:
            await handle()
            raise

    app = await failed(machine, flow, "a", "late")
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == ["A", "LATE"]
    assert NOTES == ["a", "late", "a", "late"]
    assert machine.replay("r").differences == []


async def test_a_signal_that_arrived_after_the_failure_still_counts(machine: Machine) -> None:
    gate = Gate()

    @step
    async def handle() -> None:
        await gate.wait()

    @workflow
    async def flow() -> str:
        try:
            first = await do("a")
        except ValueError:
            await handle()
            raise
        return first + await everstep.receive("word", str)

    BROKEN.add("a")
    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await run.signal("word", "tides")
    await machine.until(lambda: "signal_received" in machine.kinds("r"))
    gate.opened.set()
    with pytest.raises(ValueError, match="a"):
        await run.result()
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "Atides"


async def test_a_failed_child_is_retried_with_its_parent(machine: Machine) -> None:
    @workflow
    async def child() -> str:
        return await do("first") + await do("second")

    @workflow
    async def parent() -> str:
        await do("before")
        return await child()

    BROKEN.add("second")
    app = await machine.boot()
    with pytest.raises(ValueError, match="second"):
        await app.run(parent, id="p")
    await machine.stop(app)
    BROKEN.clear()
    again = await machine.boot()
    assert await again.run(parent, id="p", on_existing="retry") == "FIRSTSECOND"
    assert NOTES == ["before", "first", "second", "second"]
    assert [row.status for row in machine.store.children("p")] == ["completed"]
    assert machine.replay("p").differences == []


async def test_a_failed_grandchild_is_retried_from_the_top(machine: Machine) -> None:
    @workflow
    async def grandchild() -> str:
        return await do("deep")

    @workflow
    async def child() -> str:
        return await grandchild()

    @workflow
    async def parent() -> str:
        return await child()

    BROKEN.add("deep")
    app = await machine.boot()
    with pytest.raises(ValueError, match="deep"):
        await app.run(parent, id="p")
    BROKEN.clear()
    assert await app.run(parent, id="p", on_existing="retry") == "DEEP"
    assert NOTES == ["deep", "deep"]


async def test_a_child_of_a_handler_does_not_lend_its_id_to_a_later_child(machine: Machine) -> None:
    @workflow
    async def tell(what: str) -> str:
        return await do(f"tell {what}")

    @workflow
    async def parent() -> str:
        try:
            await do("a")
        except ValueError:
            await tell("of the failure")
            raise
        return await tell("of success")

    BROKEN.add("a")
    app = await machine.boot()
    with pytest.raises(ValueError, match="a"):
        await app.run(parent, id="p")
    BROKEN.clear()
    assert await app.run(parent, id="p", on_existing="retry") == "TELL OF SUCCESS"
    assert len(machine.store.children("p")) == 2
    assert machine.replay("p").differences == []


@pytest.mark.parametrize("how", ["completed", "cancelled"])
async def test_only_a_failed_run_can_be_retried(machine: Machine, how: str) -> None:
    @workflow
    async def flow() -> None:
        if how == "cancelled":
            await everstep.receive("never")

    app, run = await machine.start(flow, id="r")
    if how == "cancelled":
        await machine.rest(app)
        await run.cancel()
    await machine.until_status("r", how)
    with pytest.raises(RunActive, match="only a failed run"):
        await app.retry("r")
    if how == "cancelled":
        with pytest.raises(RunCancelled):
            await app.run(flow, id="r", on_existing="retry")
    assert machine.status("r") == how


async def test_two_retries_at_once_are_one(machine: Machine) -> None:
    BROKEN.add("a")
    one, two = await machine.boot(), await machine.boot()
    with pytest.raises(ValueError, match="a"):
        await one.run(one_step, "a", id="r")
    BROKEN.clear()
    results = await asyncio.gather(
        one.run(one_step, "a", id="r", on_existing="retry"), two.run(one_step, "a", id="r", on_existing="retry")
    )
    assert results == ["A", "A"]
    assert NOTES == ["a", "a"]
    assert machine.kinds("r").count("run_retried") == 1


async def test_a_code_error_after_a_retried_timeout_is_not_taken_for_the_timeout(machine: Machine) -> None:
    @workflow(timeout=10)
    async def flow() -> str:
        await everstep.receive("go")
        value = await do("a")
        if "code" in BROKEN:
            raise KeyError("code")
        return value

    BROKEN.add("code")
    app, run = await machine.start(flow, id="r")
    await machine.rest(app)
    await machine.advance(11)
    with pytest.raises(everstep.errors.RunTimedOut):
        await run.result()
    await app.retry("r")
    await machine.rest(app)
    await run.signal("go")
    with pytest.raises(KeyError, match="code"):
        await run.result()
    BROKEN.clear()
    assert await app.run(flow, id="r", on_existing="retry") == "A"
    assert NOTES == ["a"], "the step had finished before the code failed"


# -- restart -----------------------------------------------------------------------------------------------------------
async def test_restart_begins_again_and_keeps_the_old_history_readable(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(one_step, "a", id="r")
    old = machine.events("r")
    assert await app.run(one_step, "a", id="r", on_existing="restart") == "A"
    run = app.get("r")
    assert [event.kind for event in await run.history(1)] == [event.kind for event in old]
    assert machine.store.events("r", 1) == old
    assert [event.kind for event in await run.history()] == [event.kind for event in old]
    assert machine.row("r").generation == 2
    assert KEYS[0] != KEYS[1], "a restart is another branch, so its keys are others"
    assert (await run.verify()).sound


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
async def test_every_ended_run_can_be_restarted_also_with_other_arguments(machine: Machine, status: str) -> None:
    @workflow
    async def flow(how: str) -> str:
        if how == "failed":
            raise ValueError(how)
        if how == "cancelled":
            await everstep.receive("never")
        return how

    app, run = await machine.start(flow, status, id="r")
    await machine.rest(app)
    if status == "cancelled":
        await run.cancel()
    await machine.until_status("r", status)
    assert await app.run(flow, "anew", id="r", on_existing="restart") == "anew"
    assert machine.row("r").generation == 2


async def test_an_unfinished_run_is_not_restarted(machine: Machine) -> None:
    @workflow
    async def flow() -> None:
        await everstep.receive("never")

    app, _ = await machine.start(flow, id="r")
    await machine.rest(app)
    with pytest.raises(RunActive, match="cancel it first"):
        await app.start(flow, id="r", on_existing="restart")
    assert machine.status("r") == "waiting"
    assert machine.row("r").generation == 1


async def test_children_of_a_restarted_run_are_others(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await one_step("a")

    app = await machine.boot()
    await app.run(parent, id="p")
    await app.run(parent, id="p", on_existing="restart")
    assert len({row.id for row in machine.store.children("p")}) == 2
    assert NOTES == ["a", "a"]


async def test_two_restarts_at_once_are_one(machine: Machine) -> None:
    one, two = await machine.boot(), await machine.boot()
    await one.run(one_step, "a", id="r")
    answers = await asyncio.gather(
        *(app.start(one_step, "a", id="r", on_existing="restart") for app in (one, two)), return_exceptions=True
    )
    assert sum(isinstance(answer, RunActive) for answer in answers) <= 1
    await machine.until_status("r", "completed")
    assert machine.row("r").generation in (2, 3)
    assert len(NOTES) == machine.row("r").generation
