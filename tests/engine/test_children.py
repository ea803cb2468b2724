"""Children: started with their parent's record, followed to their end, stopped by their policy."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import IdConflict, RunCancelled
from everstep.model.events import decode_body
from everstep.stores.protocol import Append
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import NOTES, note


@workflow
async def doubling(number: int) -> int:
    await note(f"double {number}")
    return 2 * number


@workflow
async def failing_child(text: str) -> None:
    await note(text)
    raise LookupError(text)


@workflow
async def patient(text: str = "") -> str:
    try:
        return await everstep.receive("go", str)
    finally:
        await note(f"cleaned up {text}".strip())


# -- starting ----------------------------------------------------------------------------------------------------------
async def test_a_workflow_called_in_a_workflow_is_a_child_run(machine: Machine) -> None:
    @workflow
    async def parent() -> int:
        return await doubling(4) + await doubling(5)

    app = await machine.boot()
    assert await app.run(parent, id="p") == 18
    children = machine.store.children("p")
    assert [child.id for child in children] == ["p.1", "p.2"]
    assert [child.status for child in children] == ["completed"] * 2
    assert machine.kinds("p") == [
        "run_started",
        "child_started",
        "child_ended",
        "child_started",
        "child_ended",
        "run_completed",
    ]
    assert machine.replay("p").differences == []


async def test_a_childs_start_is_one_transaction_with_its_parents_record(machine: Machine) -> None:
    @workflow
    async def parent() -> int:
        return await doubling(1)

    app = await machine.boot()
    commit = app.store.commit
    together: list[bool] = []

    def watched(operations: Any, **how: bool) -> Any:
        verdicts = commit(operations, **how)  # first: one that finds the file locked is made again, on another thread
        for one in operations:
            if isinstance(one, Append) and one.run == "p":
                recorded = [event for event in one.events if event.kind == "child_started"]
                if recorded or one.starts:
                    runs = [decode_body("child_started", event.body).run for event in recorded]
                    together.append(runs == [new.row.id for new in one.starts])
        return verdicts

    app.store.commit = watched  # type: ignore[method-assign]
    await app.run(parent, id="p")
    assert together == [True]


async def test_started_children_run_side_by_side_and_their_results_are_awaited_later(machine: Machine) -> None:
    @workflow
    async def parent() -> list[int]:
        children = [await everstep.start(doubling, number) for number in range(10)]
        await note("all started")
        return [await child.result() for child in children]

    app = await machine.boot()
    assert await app.run(parent, id="p") == [2 * number for number in range(10)]
    assert len(machine.store.children("p")) == 10


async def test_a_childs_failure_is_raised_with_its_type_and_can_be_handled(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        try:
            await failing_child("gone")
        except LookupError as error:
            return f"handled {error}"
        return "?"

    app = await machine.boot()
    assert await app.run(parent, id="p") == "handled gone"


async def test_a_childs_failure_that_nobody_handles_is_the_parents(machine: Machine) -> None:
    @workflow
    async def parent() -> None:
        await failing_child("gone")

    app = await machine.boot()
    with pytest.raises(LookupError, match="gone"):
        await app.run(parent, id="p")
    assert machine.status("p") == machine.status("p.1") == "failed"


async def test_a_child_whose_failure_nobody_awaits_does_not_hurt_its_parent(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        await everstep.start(failing_child, "quietly", id="child")
        await everstep.receive("go")
        return "fine"

    _, run = await machine.start(parent, id="p")
    await machine.until_status("child", "failed")
    await run.signal("go")
    assert await run.result() == "fine"


# -- ids ---------------------------------------------------------------------------------------------------------------
async def test_an_explicit_id_attaches_to_a_run_with_the_same_workflow_and_arguments(machine: Machine) -> None:
    @workflow
    async def parent() -> int:
        return await (await everstep.start(doubling, 3, id="shared")).result()

    app = await machine.boot()
    assert await app.run(doubling, 3, id="shared") == 6
    assert await app.run(parent, id="p1") == 6
    assert await app.run(parent, id="p2") == 6
    assert NOTES == ["double 3"]


async def test_two_parents_may_follow_one_running_child(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await (await everstep.start(patient, id="shared")).result()

    app = await machine.boot()
    one, two = await app.start(parent, id="p1"), await app.start(parent, id="p2")
    await machine.until_status("shared", "waiting")
    await machine.rest(app)
    await app.signal("shared", "go", "both")
    assert await asyncio.gather(one.result(), two.result()) == ["both", "both"]


@pytest.mark.parametrize("other", ["arguments", "workflow"])
async def test_an_explicit_id_of_another_run_is_a_conflict_in_the_parent(machine: Machine, other: str) -> None:
    @workflow
    async def parent() -> str:
        child = await (
            everstep.start(doubling, 9, id="taken") if other == "arguments" else everstep.start(patient, id="taken")
        )
        try:
            await child.result()
        except IdConflict:
            return "conflict"
        return "?"

    app = await machine.boot()
    await app.run(doubling, 1, id="taken")
    assert await app.run(parent, id="p") == "conflict"
    assert machine.replay("p").differences == []


# -- crashes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recover", [True, False])
async def test_a_child_of_a_killed_parent_goes_on_and_is_not_started_twice(machine: Machine, recover: bool) -> None:
    gate = Gate()

    @step
    async def slow(text: str) -> str:
        NOTES.append(text)
        await gate.wait()
        return text

    @workflow
    async def child() -> str:
        return await slow("child")

    @workflow
    async def parent() -> str:
        return await child()

    app, _ = await machine.start(parent, id="p")
    await gate.reached.wait()
    await machine.kill(app)
    gate.opened.set()
    again = await machine.boot(recover=recover)
    run = await again.start(parent, id="p")
    assert await run.result(timeout=60) == "child"
    assert len(machine.store.children("p")) == 1
    assert machine.kinds("p").count("child_started") == 1
    assert NOTES == ["child", "child"]


async def test_a_parent_that_was_killed_while_its_child_ended_is_told(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await (await everstep.start(patient, id="child")).result()

    app, _ = await machine.start(parent, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    alone = await machine.worker(workflows=["patient"])
    await alone.signal("child", "go", "done")
    await machine.until_status("child", "completed")
    assert machine.status("p") == "waiting"
    await machine.worker()
    await machine.until_status("p", "completed")


async def test_grandchildren_work_and_survive(machine: Machine) -> None:
    @workflow
    async def middle(number: int) -> int:
        return await doubling(number) + await doubling(number + 1)

    @workflow
    async def top() -> int:
        first = await middle(1)
        word = await everstep.receive("go", int)
        return first + word + await middle(10)

    app, _ = await machine.start(top, id="t")
    await machine.until_status("t", "waiting")
    await machine.until(lambda: machine.kinds("t").count("child_ended") == 1)
    await machine.rest(app)
    await machine.kill(app)
    worker = await machine.worker()
    await worker.signal("t", "go", 100)
    await machine.until_status("t", "completed")
    assert await worker.get("t").result() == 2 + 4 + 100 + 20 + 22
    assert sorted(NOTES) == ["double 1", "double 10", "double 11", "double 2"]


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
@pytest.mark.parametrize("policy", ["cancel", "abandon", "wait"])
async def test_a_childs_policy_decides_what_its_parents_end_means(machine: Machine, policy: Any, how: str) -> None:
    @workflow(name="minor", on_parent_end=policy)
    async def minor() -> str:
        return await patient.function()  # type: ignore[attr-defined,no-any-return]

    @workflow(name="major")
    async def major() -> str:
        await everstep.start(minor, id="child")
        await everstep.receive("end")
        if how == "raises":
            raise ValueError("end")
        return "ended"

    app, run = await machine.start(major, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    if how == "is cancelled":
        await run.cancel()
    else:
        await run.signal("end")
    ended = {"returns": "completed", "raises": "failed", "is cancelled": "cancelled"}[how]
    if policy == "wait" and how != "is cancelled":
        await machine.rest(app)
        assert (machine.status("p"), machine.status("child")) == ("waiting", "waiting")
        await app.signal("child", "go", "x")
        await machine.until_status("child", "completed")
        await machine.until_status("p", ended)
        return
    await machine.until_status("p", ended)
    if policy == "abandon":
        await machine.rest(app)
        assert machine.status("child") == "waiting"
        await app.signal("child", "go", "x")
        await machine.until_status("child", "completed")
    else:
        await machine.until_status("child", "cancelled")
    assert NOTES == ["cleaned up"]


async def test_cancelling_a_direct_call_cancels_the_child(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        try:
            async with asyncio.timeout(60):
                await patient("child")
        except TimeoutError:
            return "gave up"
        return "?"

    app, run = await machine.start(parent, id="p")
    await machine.until_status("p.1", "waiting")
    await machine.rest(app)
    await machine.advance(61)
    assert await run.result() == "gave up"
    await machine.until_status("p.1", "cancelled")
    assert NOTES == ["cleaned up child"]
    assert machine.replay("p").differences == []


async def test_giving_up_waiting_for_a_started_child_does_not_cancel_it(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        child = await everstep.start(patient, "child", id="child")
        try:
            async with asyncio.timeout(60):
                await child.result()
        except TimeoutError:
            everstep.publish("gave-up", True)
        return await child.result()

    app, run = await machine.start(parent, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    await machine.advance(61)
    assert machine.status("child") == "waiting"
    await app.signal("child", "go", "later")
    assert await run.result() == "later"


@pytest.mark.parametrize("policy", ["cancel", "abandon", "wait"])
async def test_a_started_child_is_cancelled_by_its_handle_whatever_its_policy(machine: Machine, policy: str) -> None:
    @workflow(name=f"stoppable_{policy}", on_parent_end=policy)  # type: ignore[arg-type]  # each of them
    async def stoppable() -> str:
        return await everstep.receive("never", str)

    @workflow(name=f"stopping_{policy}")
    async def parent() -> str:
        child = await everstep.start(stoppable, id="child")
        await everstep.receive("stop")
        asked = [child.cancel(), child.cancel()]
        try:
            return await child.result()
        except RunCancelled:
            return f"{asked} {child.cancel()}"

    app, _ = await machine.start(parent, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    _, run = await machine.start(parent, id="p")
    await run.signal("stop", None)
    assert await run.result(timeout=60) == "[True, True] False"
    assert machine.status("child") == "cancelled"
    assert machine.kinds("p").count("child_cancelled") == 1
    assert machine.replay("p").differences == []


async def test_a_child_that_ended_before_the_cancel_reached_it_gives_its_result(machine: Machine) -> None:
    @workflow
    async def quick() -> str:
        try:
            return await everstep.receive("never", str)
        except asyncio.CancelledError:
            return "was done already"

    @workflow
    async def parent() -> str:
        child = await everstep.start(quick, id="child")
        child.cancel()
        return await child.result()

    app = await machine.boot()
    assert await (await app.start(parent, id="p")).result(timeout=60) == "was done already"
    assert machine.replay("p").differences == []


async def test_a_cancel_goes_down_to_grandchildren_and_every_level_cleans_up(machine: Machine) -> None:
    @workflow
    async def middle() -> str:
        try:
            return await patient("bottom")
        finally:
            await note("cleaned up middle")

    @workflow
    async def top() -> str:
        try:
            return await middle()
        finally:
            await note("cleaned up top")

    app, run = await machine.start(top, id="t")
    await machine.until_status("t.1.1", "waiting")
    await machine.rest(app)
    await run.cancel()
    for one in ("t", "t.1", "t.1.1"):
        await machine.until_status(one, "cancelled")
    assert sorted(NOTES) == ["cleaned up bottom", "cleaned up middle", "cleaned up top"]


async def test_a_cancelled_child_is_an_error_in_its_parent(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        try:
            await patient()
        except RunCancelled:
            return "the child was cancelled"
        return "?"

    app, run = await machine.start(parent, id="p")
    await machine.until_status("p.1", "waiting")
    await machine.rest(app)
    await app.cancel("p.1")
    assert await run.result() == "the child was cancelled"


async def test_a_child_that_is_held_lets_its_parent_wait_and_goes_on_when_resolved(machine: Machine) -> None:
    @workflow
    async def parent() -> str:
        return await (await everstep.start(patient, id="child")).result()

    app, run = await machine.start(parent, id="p")
    await machine.until_status("child", "waiting")
    await machine.rest(app)
    await app.hold("child")
    await machine.until_status("child", "held")
    await machine.rest(app)
    assert machine.status("p") == "waiting"
    await app.resolve("child", "retry")
    await app.signal("child", "go", "at last")
    assert await run.result() == "at last"


async def test_a_diverged_child_goes_on_when_its_parents_script_is_run_again_with_the_right_code(
    machine: Machine,
) -> None:
    def declare(right: bool) -> Any:
        @workflow(name="inner")
        async def inner() -> str:
            await note("first" if right else "another")
            return await everstep.receive("go", str)

        @workflow(name="outer")
        async def outer() -> str:
            return await inner()

        return outer

    app, _ = await machine.start(declare(True), id="p")
    await machine.until_status("p.1", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    wrong, _ = await machine.start(declare(False), id="p")
    await machine.until_status("p", "waiting")
    await wrong.signal("p.1", "go", "x")
    await machine.until_status("p.1", "held")
    await machine.stop(wrong)
    _, run = await machine.start(declare(True), id="p")
    assert await run.result(timeout=60) == "x"
    assert NOTES == ["first"]
