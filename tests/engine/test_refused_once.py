"""One refusal, or one cancellation of everything, at a bad moment: nothing stands still because of it."""

import asyncio
import threading
from typing import Any

import pytest

import everstep
from everstep import NotDone, Retry, step, workflow
from everstep.engine.code.execution import Execution
from everstep.engine.code.signals import Receiving
from everstep.errors import StoreFull
from everstep.stores.protocol import Append
from everstep.stores.rows.queues import TakeSlot
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import PATIENCE_SECONDS, Machine


@step(limit="narrow")
def limited(number: int) -> int:
    return number


@workflow
async def plain() -> str:
    return "done"


@workflow
async def all_limited() -> list[int]:
    return [await asyncio.to_thread(limited, number) for number in range(3)]


@step
async def count(number: int) -> int:
    return number


@workflow
async def counts() -> int:
    await count(1)
    await asyncio.sleep(0.001)
    return await everstep.receive("number", int)


def cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_a_run_that_is_being_claimed_when_an_application_cancels_its_tasks_is_taken_up(machine: Machine) -> None:
    worker = await machine.worker()
    client = await machine.boot()
    for number in range(10):
        await client.start(plain, id=f"r{number}", queue="default", delay=0.001)
    await machine.stop(client)
    machine.clock.advance(1)
    for _ in range(20):
        worker.pump.nudge()
        for _ in range(50):
            if worker._taking_up:
                cancel_all()
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
    rows = [f"r{number}" for number in range(10)]
    await machine.until(lambda: all(machine.status(one) == "completed" for one in rows) or machine.clock.advance(0.1))


async def test_slots_that_were_asked_for_when_an_application_cancels_its_tasks_are_not_lost(machine: Machine) -> None:
    worker = await machine.worker()
    await worker.limit("narrow", concurrency=1)
    runs = [await worker.start(all_limited, id=f"r{number}") for number in range(4)]
    for _ in range(40):
        await asyncio.sleep(0.002)
        cancel_all()
    for run in runs:
        await machine.until(lambda: machine.status(run.id) == "completed" or machine.clock.advance(0.1))  # noqa: B023
    assert worker.store.slots() == []


class RefusesOnce:
    """A function of which one call is refused memory."""

    def __init__(self, real: Any, wanted: Any = lambda *args: True) -> None:
        self.real, self.wanted, self.fired = real, wanted, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.fired and self.wanted(*args):
            self.fired += 1
            raise MemoryError
        return self.real(*args, **options)


async def test_a_loop_that_has_no_memory_for_a_flush_is_asked_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.worker()
    refusing = RefusesOnce(app.loop.call_soon, lambda callback, *_: callback == app.committer._flush)
    monkeypatch.setattr(app.loop, "call_soon", refusing)
    for number in range(3):
        try:
            await app.start(plain, id=f"r{number}")
        except MemoryError:
            continue  # the caller is told, and nobody else
    assert refusing.fired
    run = await app.start(plain, id="later")
    assert await run.result(timeout=PATIENCE_SECONDS) == "done"
    assert not app.committer._queue


async def test_a_thread_that_has_no_memory_to_tell_that_its_body_ended_tells_it_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.worker()
    refusing = RefusesOnce(app.loop.call_soon_threadsafe, lambda callback, *_: callback == app.threads._bring_in)
    monkeypatch.setattr(app.loop, "call_soon_threadsafe", refusing)
    assert await app.run(all_limited, id="r") == [0, 1, 2]
    assert refusing.fired


async def test_a_slot_that_could_not_be_asked_for_is_asked_for_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await machine.worker()
    await app.limit("narrow", concurrency=1)
    refusing = RefusesOnce(app.committer.submit, lambda operation: isinstance(operation, TakeSlot))
    monkeypatch.setattr(app.committer, "submit", refusing)
    run = await app.start(all_limited, id="r")
    await machine.until(lambda: machine.status("r") == "completed" or machine.clock.advance(0.1))
    assert refusing.fired
    assert await run.result() == [0, 1, 2]


@pytest.mark.parametrize(("owner", "name"), [(Execution, "issue"), (Receiving, "wait_for")])
async def test_memory_that_is_refused_to_a_command_of_the_code_is_no_outcome(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    refusing = RefusesOnce(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *args, **options: refusing(*args, **options))
    app = await machine.worker()
    run = await app.start(counts, id="r")
    await app.signal("r", "number", 7)
    await machine.until(lambda: machine.status("r") in ("completed", "failed") or machine.clock.advance(0.1))
    assert refusing.fired
    assert await run.result() == 7


async def test_memory_that_is_refused_to_a_body_is_its_failure(machine: Machine) -> None:
    @step
    async def greedy() -> None:
        raise MemoryError

    @workflow
    async def flow() -> None:
        await greedy()

    app = await machine.worker()
    with pytest.raises(MemoryError):
        await app.run(flow, id="r")


@pytest.mark.parametrize("probe", [None, lambda key: NotDone()])
async def test_an_app_that_stops_begins_no_other_attempt(machine: Machine, probe: Any) -> None:
    begun: list[int] = []
    gate = threading.Event()

    @step(effect="once", probe=probe, retry=Retry(attempts=3, first=0.001))
    def pay() -> str:
        begun.append(1)
        if len(begun) == 1:
            assert gate.wait(PATIENCE_SECONDS)
            raise (OSError if probe is not None else NotDone)("try again")
        return "paid"

    @workflow
    async def pays() -> str:
        return await asyncio.to_thread(pay)

    app, _ = await machine.start(pays, id="r")
    await machine.until(lambda: begun)
    closing = asyncio.create_task(machine.stop(app))
    await machine.until(lambda: app.draining)
    gate.set()
    while not closing.done():
        machine.clock.advance(1)
        await asyncio.sleep(0.001)
    assert len(begun) == 1
    await machine.worker()
    await machine.until(lambda: machine.status("r") == "completed" or machine.clock.advance(1))
    assert len(begun) == 2


def test_steps_and_children_may_be_gathered_by_themselves(tmp_path: Any) -> None:
    """They are the outermost functions of their greenlets, and have no caller."""

    @step
    def one() -> int:
        return 1

    @workflow
    def child() -> int:
        return 2

    @workflow
    def flow() -> list[int]:
        return list(everstep.blocking.gather(one, child))

    with everstep.open(str(tmp_path / "runs.db")) as app:
        assert app.run(flow, id="r") == [1, 2]


async def test_a_full_disk_is_shown_for_as_long_as_it_is_full(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), clock=None)

    def appends(operations: Any, **_: Any) -> bool:
        return any(isinstance(one, Append) for one in operations)

    fault = store.fail("commit", after=False, error=StoreFull("no room"), count=2, when=appends)
    run = await app.start(counts, id="r")
    await machine.until(lambda: "commits" in app.background.troubles() and app.background.has_failing)
    await machine.until(lambda: not app.committer.full)
    await app.signal("r", "number", 7)
    assert fault.fired
    assert await run.result(timeout=PATIENCE_SECONDS) == 7
    assert not app.background.has_failing
