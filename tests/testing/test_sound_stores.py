"""What `everstep check` says of stores that are sound, however runs were deleted, moved, undone and shared: nothing."""

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine

GATES: dict[str, Gate] = {}


@step(effect="read")
async def ask(number: int) -> int:
    return number


@workflow(name="sound_kid")
async def kid(number: int) -> int:
    return await ask(number)


@workflow(name="sound_parent")
async def parent(number: int, waits: bool = True) -> int:
    child = await everstep.start(kid, 1, id="kid")
    return await child.result() if waits else number


def broken(machine: Machine) -> list[str]:
    return [str(one) for one in check(export_histories(machine.store))]


async def two_parents(machine: Machine, *, waits: bool = True) -> App:
    app = await machine.boot()
    assert await app.run(parent, 1, id="p1") == 1
    machine.clock.advance(1)
    await app.run(parent, 2, waits, id="p2")
    await machine.rest()
    return app


@pytest.mark.parametrize("waits", [True, False])
async def test_a_shared_child_may_be_deleted_with_its_first_parent(machine: Machine, waits: bool) -> None:
    app = await two_parents(machine, waits=waits)
    assert broken(machine) == []
    machine.clock.advance(10)
    await app.gc(older_than=0, keep=1)
    assert [row.id for row in await app.list()] == ["p2"]
    assert broken(machine) == []


async def test_another_run_may_have_the_id_of_a_shared_child_then(machine: Machine) -> None:
    app = await two_parents(machine)
    machine.clock.advance(10)
    await app.gc(older_than=0, keep=1)
    machine.clock.advance(10)
    await (await app.start(kid, 2, id="kid", delay=60)).cancel(now=True)
    assert machine.status("kid") == "cancelled", "p2 was told that its child completed"
    assert broken(machine) == []


@pytest.mark.parametrize("waits", [True, False])
async def test_a_shared_child_may_stay_where_its_first_parent_is(machine: Machine, waits: bool) -> None:
    app = await two_parents(machine, waits=waits)
    path = machine.folder / "file"
    assert (await app.export(["p2"], str(path))).runs == ["p2"]
    folder = machine.folder / "elsewhere"
    folder.mkdir()
    other = Machine(folder)
    try:
        there = await other.boot()
        await there.import_(str(path))
        assert broken(other) == []
        await (await there.start(kid, 2, id="kid", delay=60)).cancel(now=True)
        assert broken(other) == [], "that is another run"
    finally:
        await other.shut()


@pytest.mark.parametrize("run", ["p1", "p2"])
async def test_a_shared_child_that_is_needed_and_gone_is_found(machine: Machine, run: str) -> None:
    app = await two_parents(machine)
    await machine.stop(app)
    machine.sql("DELETE FROM runs WHERE id = 'kid'")
    machine.sql("DELETE FROM events WHERE run = 'kid'")
    machine.sql("UPDATE runs SET status = 'running' WHERE id = ?", run)
    found = broken(machine)
    assert any("L1" in one and run in one and "kid is not in the store" in one for one in found), found


async def test_a_shared_child_that_was_never_there_is_found(machine: Machine) -> None:
    app = await two_parents(machine)
    await machine.stop(app)
    machine.sql("DELETE FROM runs WHERE id = 'kid'")
    machine.sql("DELETE FROM events WHERE run = 'kid'")
    machine.sql("DELETE FROM signals WHERE kind = 'child'")
    found = broken(machine)
    assert sum("L1" in one and "kid is not in the store" in one for one in found) == 2, found


@step
async def undo(outcome: int, number: int) -> None:
    await GATES["undo"].wait()


@step(effect="once", key="sound:{number}", compensate=undo)
async def book(number: int) -> int:
    return number


@workflow(name="sound_first")
async def first() -> None:
    await book(1)
    raise ValueError("first fails")


@workflow(name="sound_second")
async def second(generation: int, then: str) -> int:
    if generation == 1:
        await book(1)
        everstep.continue_as(2, then)
    if then == "fails":
        raise ValueError("second fails")
    return 1


@pytest.mark.parametrize("then", ["fails", "is rolled back", "completes"])
async def test_a_step_that_waited_for_its_key_is_undone_by_a_later_generation(machine: Machine, then: str) -> None:
    GATES["undo"] = Gate()
    app, _ = await machine.start(first, id="first")
    await GATES["undo"].reached.wait()
    run = await app.start(second, 1, then, id="second")
    await machine.until(lambda: "key_taken" in machine.kinds("second"))
    GATES["undo"].opened.set()
    if then == "fails":
        with pytest.raises(ValueError, match="second fails"):
            await run.result()
    else:
        assert await run.result() == 1
    if then == "is rolled back":
        await app.rollback("second")
        await machine.until_status("second", "cancelled")
    assert broken(machine) == []
