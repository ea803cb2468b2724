"""Restored backups and runs that are moved, forked, retried or undone: what may have happened is asked about first."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import everstep
from everstep import Done, NotDone, Retry, step, workflow
from everstep.engine.app.app import App
from everstep.engine.history.restored import mark_restored
from everstep.errors import CrossesOnce, Misuse, Uncompensated
from tests.damage.shop import counts
from tests.engine.resume_helpers import Machine
from tests.worlds.ledger import APPLIED, ASKED, FAILS


async def ask(key: str, *args: Any) -> Done | NotDone:
    ASKED.append(key)
    return Done("posted before") if ("post", key) in APPLIED else NotDone()


@step(effect="once", probe=ask)
async def post(number: int) -> str:
    APPLIED.append(("post", everstep.key()))
    return f"posted {number}"


@step(retry=Retry(attempts=1))
async def pack(number: int) -> str:
    if FAILS:
        raise FAILS.pop()
    return f"packed {number}"


@step
async def label(number: int) -> str:
    if ("label", everstep.key()) not in APPLIED:  # this receiver honours keys
        APPLIED.append(("label", everstep.key()))
    return f"label {number}"


@workflow(name="moved_posting")
async def posting(number: int) -> list[str]:
    word = await everstep.receive("go", str)
    done = [word, await pack(number), await label(number), await post(number)]
    return [*done, await everstep.receive("end", str)]


@workflow(name="moved_parent")
async def parent(number: int) -> list[str]:
    await everstep.receive("go", str)
    return await posting(number)


@workflow(name="moved_loop")
async def loop(count: int) -> int:
    done = 0
    while done < count:
        done = await everstep.checkpoint(done)
        await everstep.receive("go", str)
        await post(done)
        done += 1
    return done


@workflow(name="moved_in_parts")
async def in_parts(part: int) -> str:
    if part == 1:
        everstep.continue_as(2)
    await everstep.receive("go", str)
    return await post(part)


def machine_in(machine: Machine, name: str) -> Machine:
    other = Machine(machine.folder / name)
    other.folder.mkdir()
    return other


async def begun(machine: Machine, flow: Any = posting, argument: int = 7) -> None:
    """Leave a run behind that waits for `go`."""
    app, _ = await machine.start(flow, argument, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.stop(app)


async def restored(machine: Machine, times: int = 1) -> None:
    for _ in range(times):
        mark_restored(machine.store)


async def taken_up(machine: Machine) -> None:
    worker = await machine.worker()
    await worker.take_up_run("r")
    await machine.rest(worker)
    await machine.stop(worker)


async def moved(source: Machine, target: Machine, name: str = "file", *, hold: bool = True) -> str:
    app = await source.boot()
    path = str(source.folder / name)
    await app.export(["r"], path, unfinished="hold" if hold else "leave")
    await source.stop(app)
    await put_into(target, path)
    return path


async def put_into(target: Machine, path: str) -> list[str]:
    app = await target.boot()
    done = await app.import_(path, copies=True)
    await target.stop(app)
    return list(done.asking)


async def asks(machine: Machine, run: str = "r") -> bool:
    """Let a run go on to its post, and tell whether it asked before it did that."""
    worker = await machine.worker()
    before = len(ASKED)
    await worker.signal(run, "go", "x")
    await machine.until(lambda: machine.status(run) in ("held", "completed") or "post" in done_steps(machine, run))
    await machine.rest(worker)
    await machine.stop(worker)
    return len(ASKED) > before


def done_steps(machine: Machine, run: str) -> list[str]:
    return [event.step for event in machine.events(run) if event.kind == "step_completed"]


# -- import and export -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flow", [posting, loop, in_parts])
@pytest.mark.parametrize("times", [0, 1, 5])
async def test_counts_of_two_stores_are_never_compared(machine: Machine, times: int, flow: Any) -> None:
    """However often the store was restored that it comes from: when this one is, the run asks."""
    there = machine_in(machine, "there")
    await restored(machine, times)
    await begun(machine, flow, 1)
    await moved(machine, there)
    await restored(there)
    assert await asks(there)


@pytest.mark.parametrize("flow", [posting, loop, in_parts])
@pytest.mark.parametrize("times", [0, 5])
async def test_a_run_that_lacks_nothing_does_not_ask_where_it_is_imported(
    machine: Machine, times: int, flow: Any
) -> None:
    there = machine_in(machine, "there")
    await restored(machine, times)
    await begun(machine, flow, 1)
    path = await moved(machine, there)
    assert not await asks(there)
    assert "run_restored" not in there.kinds("r")
    elsewhere = machine_in(machine, "elsewhere")
    assert await put_into(elsewhere, path) == []


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("flow", [posting, loop, in_parts])
async def test_the_doubt_travels_with_a_run_that_was_not_asked_yet(machine: Machine, flow: Any, hold: bool) -> None:
    there, further = machine_in(machine, "there"), machine_in(machine, "further")
    await begun(machine, flow, 1)
    await restored(machine)
    await moved(machine, there, hold=hold)
    await moved(there, further, hold=hold)
    assert await asks(further)
    assert further.kinds("r").count("run_restored") == 1


async def test_what_was_asked_about_where_it_comes_from_is_known_here(machine: Machine) -> None:
    """The note is in its history, and so is the doubt."""
    there = machine_in(machine, "there")
    await begun(machine)
    await restored(machine)
    await taken_up(machine)
    await moved(machine, there)
    assert await asks(there)
    assert there.kinds("r").count("run_restored") == 1


async def test_restored_after_the_import_and_moved_on_it_asks_as_well(machine: Machine) -> None:
    there, further = machine_in(machine, "there"), machine_in(machine, "further")
    await begun(machine)
    await moved(machine, there)
    await restored(there)
    await moved(there, further)
    assert await asks(further)


async def test_a_file_that_is_imported_again_after_a_restore_does_nothing_twice(machine: Machine) -> None:
    """The backup lacks the import, and all that came of it."""
    there = machine_in(machine, "there")
    await there.stop(await there.boot())
    backup = backup_of(there)
    await begun(machine)
    path = await moved(machine, there)
    assert not await asks(there)
    assert counts()["post"] == 1
    put_back(there, backup)
    await restored(there)
    assert await put_into(there, path) == ["r"], "the import says which runs ask"
    assert await asks(there)
    assert counts() == {"post": 1, "label": 1}


def backup_of(machine: Machine) -> bytes:
    """Return a store that nobody uses."""
    if machine._reader is not None:
        machine._reader.close()
        machine._reader = None
    return machine.path.read_bytes()


def put_back(machine: Machine, backup: bytes) -> None:
    backup_of(machine)
    for path in machine.folder.glob("runs.db*"):
        path.unlink()
    machine.path.write_bytes(backup)


async def test_children_of_an_imported_run_ask_as_it_does(machine: Machine) -> None:
    there = machine_in(machine, "there")
    await begun(machine, parent)
    await restored(machine)
    await moved(machine, there)
    worker = await there.worker()
    await worker.signal("r", "go", "x")
    await there.until(lambda: there.store.run("r.2") is not None)
    await there.stop(worker)
    assert await asks(there, "r.2")


async def test_a_failed_run_that_was_not_asked_yet_asks_when_it_is_retried_elsewhere(machine: Machine) -> None:
    there = machine_in(machine, "there")
    await failed(machine)
    await restored(machine)
    await moved(machine, there)
    app = await there.worker()
    await app.retry("r")
    await there.until(lambda: "post" in done_steps(there, "r"))
    assert len(ASKED) == 1


async def failed(machine: Machine) -> App:
    FAILS.append(ValueError("no box"))
    app = await machine.worker()
    run = await app.start(posting, 7, id="r")
    await run.signal("go", "x")
    with pytest.raises(ValueError, match="no box"):
        await run.result(timeout=60)
    await machine.stop(app)
    return app


async def test_a_doubted_run_of_a_backup_is_not_imported_into_the_store_that_goes_on(machine: Machine) -> None:
    """There nothing tells its history from one that lacks nothing."""
    copy = machine_in(machine, "copy")
    await begun(machine)
    copy.path.write_bytes(backup_of(machine))
    machine.sql("DELETE FROM runs")
    machine.sql("DELETE FROM events")
    await restored(copy)
    with pytest.raises(Misuse, match="a backup of this very store"):
        await moved(copy, machine)


async def test_histories_of_an_earlier_release_only_count(machine: Machine) -> None:
    app = await machine.boot()
    await app.become_worker()
    app.life = ""  # such a history says nothing of it
    await app.start(posting, 7, id="r")
    await app.start(posting, 7, id="other")
    await machine.rest(app)
    await machine.stop(app)
    assert not await asks(machine, "other")
    await restored(machine)
    assert await asks(machine)


# -- forks -------------------------------------------------------------------------------------------------------------
async def by_worker(machine: Machine, **options: Any) -> None:
    app = await machine.worker()
    await app.fork("r", id="f", **options)
    await machine.stop(app)


async def by_client(machine: Machine, **options: Any) -> None:
    app = await machine.boot()
    await app.fork("r", id="f", **options)
    await machine.stop(app)


Forking = Callable[..., Awaitable[None]]


@pytest.mark.parametrize("first", ["forked", "taken up"])
@pytest.mark.parametrize("fork", [by_worker, by_client])
async def test_a_fork_keeps_the_doubt_of_its_source(machine: Machine, fork: Forking, first: str) -> None:
    await begun(machine)
    await restored(machine)
    if first == "taken up":
        await taken_up(machine)
    with pytest.raises(CrossesOnce, match="the part of its history that is lost"):
        await fork(machine, at=1)
    await fork(machine, at=1, allow_effects=True)
    assert await asks(machine, "f")
    assert (counts()["post"], len(ASKED)) == (1, 1)


@pytest.mark.parametrize("fork", [by_worker, by_client])
async def test_a_fork_of_a_run_that_lacks_nothing_does_not_ask(machine: Machine, fork: Forking) -> None:
    await restored(machine, 2)
    await begun(machine)
    await fork(machine, at=1)
    assert not await asks(machine, "f")


@pytest.mark.parametrize("is_doubted", [True, False])
@pytest.mark.parametrize("fork", [by_worker, by_client])
async def test_a_fork_of_an_imported_run_knows_what_that_knows(
    machine: Machine, fork: Forking, is_doubted: bool
) -> None:
    there = machine_in(machine, "there")
    await restored(machine, 3)
    await begun(machine)
    if is_doubted:
        await restored(machine)
    await moved(machine, there)
    await fork(there, at=1, allow_effects=True)
    assert await asks(there, "f") == is_doubted


async def test_a_restore_after_the_fork_is_asked_about_and_so_is_a_fork_of_the_fork(machine: Machine) -> None:
    await begun(machine)
    await by_client(machine, at=1)
    await restored(machine)
    app = await machine.boot()
    await app.fork("f", at=1, id="g", allow_effects=True)
    await machine.stop(app)
    assert await asks(machine, "g")
    assert await asks(machine, "f")


async def test_a_fork_that_is_moved_before_it_was_asked_takes_the_doubt_along(machine: Machine) -> None:
    there = machine_in(machine, "there")
    await begun(machine)
    await restored(machine)
    await by_client(machine, at=1, allow_effects=True)
    app = await machine.boot()
    await app.export(["f"], str(machine.folder / "forked"), unfinished="hold")
    await machine.stop(app)
    await put_into(there, str(machine.folder / "forked"))
    assert await asks(there, "f")


async def test_a_fork_of_a_child_that_may_have_been_started_before_asks(machine: Machine) -> None:
    await begun(machine, parent)
    await restored(machine)
    worker = await machine.worker()
    await worker.signal("r", "go", "x")
    await machine.until(lambda: machine.store.run("r.2") is not None)
    with pytest.raises(CrossesOnce):
        await worker.fork("r.2", at=1, id="f")
    await worker.fork("r.2", at=1, id="f", allow_effects=True)
    await machine.stop(worker)
    assert await asks(machine, "f")


# -- retry and rollback ------------------------------------------------------------------------------------------------
async def test_a_retry_that_is_lost_and_made_again_presents_the_same_keys(machine: Machine) -> None:
    await failed(machine)
    backup = backup_of(machine)
    for _ in range(2):
        app = await machine.worker()
        await app.retry("r")
        await machine.until(lambda: "post" in done_steps(machine, "r"))
        await machine.rest(app)
        await machine.stop(app)
        assert counts() == {"label": 1, "post": 1}
        put_back(machine, backup)
        await restored(machine)
    assert len(ASKED) == 1


async def unreserve(outcome: int, number: int) -> None:
    APPLIED.append(("unreserve", everstep.key()))


@step(compensate=unreserve)
async def reserve(number: int) -> int:
    return number


@workflow(name="moved_reserving")
async def reserving(number: int) -> int:
    return await reserve(number)


async def test_a_rollback_of_a_run_that_may_lack_something_says_so(machine: Machine) -> None:
    app = await machine.worker()
    assert await app.run(reserving, 7, id="r") == 7
    await machine.stop(app)
    await restored(machine)
    app = await machine.worker()
    with pytest.raises(Uncompensated, match="the part of its history that is lost"):
        await app.rollback("r")
    await app.rollback("r", allow_uncompensated=True)
    await machine.until_status("r", "cancelled")
