"""Named limits of steps: a body starts when its limit has a slot, and what waits has not happened."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.errors import Misuse, RunCancelled, StoreFull
from everstep.stores.rows.queues import FreeSlot, TakeSlot
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Machine
from tests.waiting import wait_on_loop_until
from tests.worlds.ledger import BEGUN, GATES

FAILURES: dict[str, int] = {}


async def pass_gate(name: str) -> str:
    BEGUN.append(name)
    await GATES.setdefault(name, asyncio.Event()).wait()
    if FAILURES.get(name, 0):
        FAILURES[name] -= 1
        raise ConnectionError(name)
    return name


read = step(pass_gate, name="read", effect="read", limit="api")
once = step(pass_gate, name="once", effect="once", limit="api")
retried = step(pass_gate, name="retried", effect="repeat", limit="api", retry=everstep.Retry(attempts=3, first=5.0))
keyed = step(pass_gate, name="keyed", effect="once", limit="api", key="k:{name}")


@workflow
async def reads(prefix: str, count: int) -> list[str]:
    return list(await asyncio.gather(*(read(f"{prefix}{number}") for number in range(count))))


@workflow
async def one(kind: str, name: str) -> str:
    steps: dict[str, Any] = {"read": read, "once": once, "retried": retried, "keyed": keyed}
    result: str = await steps[kind](name)
    return result


@workflow
async def impatient(name: str) -> str:
    try:
        async with asyncio.timeout(10):
            return await once(name)
    except TimeoutError:
        return "too late"


@workflow
async def spends(name: str) -> str:
    return await read(name)


@pytest.fixture(autouse=True)
def fresh() -> None:
    FAILURES.clear()


async def begun(*names: str) -> None:
    """Wait until just these have begun, and give others the time to begin wrongly."""
    async with asyncio.timeout(60):
        while len(BEGUN) < len(names):
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert list(names) == BEGUN


def let(*names: str) -> None:
    for name in names:
        GATES.setdefault(name, asyncio.Event()).set()


def kinds(machine: Machine, run: str) -> list[str]:
    return [event.kind for event in machine.store.events(run, 1)]


async def test_no_more_bodies_run_than_the_limit_has_slots_over_all_runs_and_apps(machine: Machine) -> None:
    app, other = await machine.boot(), await machine.boot()
    await app.limit("api", concurrency=2)
    first = await app.start(reads, "a", 3)
    await begun("a0", "a1")
    second = await other.start(reads, "b", 1)
    await begun("a0", "a1")
    let("a0")
    async with asyncio.timeout(60):
        while len(BEGUN) < 3:  # which of the two that wait is next depends on which app looks first
            await asyncio.sleep(0.005)
    await begun(*BEGUN)
    assert BEGUN[:2] == ["a0", "a1"]
    assert BEGUN[2] in ("a2", "b0")
    let("a1", "a2", "b0")
    assert await first.result(60) == ["a0", "a1", "a2"]
    assert await second.result(60) == ["b0"]
    for _ in range(100):
        if not machine.store.slots():
            break
        await asyncio.sleep(0.01)
    assert machine.store.slots() == []


async def test_a_slot_is_free_for_others_as_soon_as_its_body_has_ended(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    run = await app.start(one, "read", "a")
    await begun("a")
    assert len(machine.store.slots()) == 1
    let("a")
    assert await run.result(60) == "a"
    await app.committer.drained()
    assert machine.store.slots() == []


async def test_a_step_that_shares_another_s_outcome_gives_its_slot_back(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    let("a")
    assert await app.run(one, "keyed", "a") == "a"
    assert await app.run(one, "keyed", "a") == "a"
    assert BEGUN == ["a"]
    async with asyncio.timeout(60):
        while machine.store.slots():
            await asyncio.sleep(0.01)


async def test_what_waits_for_a_slot_is_withheld_and_not_begun(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=0)
    run = await app.start(one, "once", "a", id="r")
    await machine.until(lambda: "call_withheld" in kinds(machine, "r"))
    await asyncio.sleep(0.05)  # time for it to begin wrongly
    assert kinds(machine, "r") == ["run_started", "call_withheld"]
    (body,) = machine.bodies("r", "call_withheld")
    assert (body.over, body.limit, body.instead_of) == ("limit", "api", "step_started")
    await app.limit("api", concurrency=1)
    let("a")
    assert await run.result(60) == "a"
    assert kinds(machine, "r")[1:] == ["call_withheld", "step_started", "step_completed", "run_completed"]


@pytest.mark.parametrize("kind", ["read", "once", "retried", "keyed"])
async def test_a_step_that_waited_when_its_process_died_is_begun_by_the_next(machine: Machine, kind: str) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=0)
    await app.start(one, kind, "a", id="r")
    await asyncio.sleep(0.05)
    await machine.kill(app)
    following = await machine.worker()
    await asyncio.sleep(0.1)
    assert BEGUN == []
    await following.limit("api", concurrency=1)
    let("a")
    assert await following.get("r").result(60) == "a"
    assert BEGUN == ["a"]
    assert await following.holds() == []


async def test_slots_of_a_dead_process_come_back(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    await app.start(one, "read", "a", id="r")
    await begun("a")
    following = await machine.worker()
    waiting = await following.start(one, "read", "b", id="s")
    await begun("a")
    await machine.kill(app)
    machine.clock.advance(1)
    let("a", "b")
    assert await following.get("r").result(60) == "a"
    assert await waiting.result(60) == "b"


async def test_a_rate_lets_bodies_begin_by_the_store_s_clock(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", rate=(1, 10))
    let("a0", "a1", "a2")
    run = await app.start(reads, "a", 3)
    await begun("a0")
    machine.clock.advance(9)
    await begun("a0")
    machine.clock.advance(1.1)
    await begun("a0", "a1")
    machine.clock.advance(10)
    assert await run.result(60) == ["a0", "a1", "a2"]


async def test_each_attempt_takes_a_slot_of_its_own(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    FAILURES["a"] = 1
    let("a")
    run = await app.start(one, "retried", "a", id="r")
    await begun("a")
    other = await app.start(one, "read", "b")
    await begun("a", "b")
    machine.clock.advance(6)
    await begun("a", "b")
    let("b")
    assert await other.result(60) == "b"
    assert await run.result(60) == "a"
    assert kinds(machine, "r").count("call_withheld") == 2


async def test_a_step_that_waits_can_be_cancelled_and_has_not_happened(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=0)
    runs = [await app.start(one, kind, kind) for kind in ("read", "once", "keyed")]
    late = await app.start(impatient, "late")
    await asyncio.sleep(0.05)
    for run in runs:
        await run.cancel()
    machine.clock.advance(11)
    for run in runs:
        with pytest.raises(RunCancelled):
            await run.result(60)
    assert await late.result(60) == "too late"
    await app.limit("api", concurrency=5)
    await asyncio.sleep(0.2)
    assert BEGUN == []
    assert machine.store.slots() == []


async def test_a_held_run_gives_its_slot_back(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    first = await app.start(one, "read", "a")
    second = await app.start(one, "read", "b")
    await begun("a")
    await app.hold(first.id)
    await begun("a", "b")
    let("a", "b")
    assert await second.result(60) == "b"
    await app.resolve(first.id, "retry")
    assert await first.result(60) == "a"


async def test_a_slot_for_a_run_that_has_left_is_given_back(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    taken = await app.committer.submit(TakeSlot("api", "ghost", 1, app.worker or "nobody", app.clock.now()))
    assert taken is not None
    run = await app.start(one, "read", "a")
    let("a")
    assert await run.result(60) == "a", "a worker that is not there has no slots"


async def test_an_app_that_closes_begins_nothing_that_waits(machine: Machine) -> None:
    app = await machine.boot()
    await app.limit("api", concurrency=1)
    await app.start(one, "once", "a", id="a")
    await begun("a")
    await app.start(one, "once", "b", id="b")
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(machine.stop(app))
    await asyncio.sleep(0.05)
    let("a")
    await closing
    assert BEGUN == ["a"]
    following = await machine.worker()
    let("b")
    assert [await following.get(run).result(60) for run in "ab"] == ["a", "b"]
    assert BEGUN == ["a", "b"]


def test_a_limit_s_name_is_checked() -> None:
    with pytest.raises(Misuse, match="not a name"):
        step(pass_gate, limit="two words")


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("method", ["queues", "slots"])
async def test_a_store_that_fails_while_it_is_asked_about_slots_is_asked_again(
    machine: Machine, method: str, first: int
) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), clock=None)
    await app.limit("api", concurrency=1)
    fault = store.fail(method, after=False, first=first)
    for name in ("f0", "f1"):
        GATES[name] = asyncio.Event()
        GATES[name].set()
    run = await app.start(reads, "f", 2, id="r")
    assert await run.result(timeout=60) == ["f0", "f1"]
    assert fault.fired


def frees(operations: Any, **_: Any) -> bool:
    return any(isinstance(one, FreeSlot) for one in operations)


@pytest.mark.parametrize("after", [False, True])
async def test_a_slot_that_the_store_does_not_take_back_is_given_back_later(machine: Machine, after: bool) -> None:
    """As with a disk that is full, or a right that is missing, while a body ends."""
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), clock=None)
    await app.limit("api", concurrency=1)
    fault = store.fail("commit", after=after, error=StoreFull("no room"), count=2, when=frees)
    let("a", "b")
    first = await app.start(one, "read", "a")
    assert await first.result(timeout=60) == "a"
    second = await app.start(one, "read", "b")
    assert await second.result(timeout=60) == "b"
    await wait_on_loop_until(lambda: not machine.store.slots())
    assert fault.fired == 2


async def test_an_attempt_whose_last_slot_is_still_to_be_given_back_waits_for_that(machine: Machine) -> None:
    """Else what is given back late would be the slot of the next attempt."""
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store(), clock=None)
    await app.limit("api", concurrency=2)
    app.limits._owed.add(("r", 1))
    let("a")
    run = await app.start(one, "read", "a", id="r")
    await app.committer.drained()
    app.limits.look()
    await asyncio.sleep(0.05)
    assert BEGUN == []
    app.limits._give_back("api", ("r", 1))
    assert await run.result(timeout=60) == "a"
