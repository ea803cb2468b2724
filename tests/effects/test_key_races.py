"""A key that somebody else gets first: between the look at it and the claim, with whatever else is in the same unit."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.errors import KeyConflict, RunHeld, StoreError, StoreFull
from everstep.stores.protocol import Append, Claim, Operation, Post
from everstep.stores.rows.keys import EffectRow
from everstep.testing.checker import check, export_histories
from everstep.testing.faulty_store import FaultyStore
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import GATES, NOTES, act

K = "invoice:7"


async def perform(invoice: int, amount: int = 5) -> str:
    run = everstep.current().run
    await act(run)
    return f"paid {amount} by {run}"


charge = step(perform, name="charge", effect="once", key="invoice:{invoice}")
ship = step(perform, name="ship", effect="repeat", key="parcel:{invoice}")


@step(effect="read")
async def look(number: int) -> int:
    return number


@workflow
async def racing_charge(invoice: int, amount: int = 5) -> str:
    return await charge(invoice, amount)


@workflow
async def racing_ship(invoice: int) -> str:
    return await ship(invoice)


@workflow
async def racing_child(number: int) -> int:
    return await look(number)


def blind(app: App, times: int = 1) -> None:
    """Let an app see keys as free, so often: as if somebody else were quicker between its look and its claim."""
    real, left = app.store.effect, times

    def effect(key: str) -> EffectRow | None:
        nonlocal left
        left -= 1
        return None if left >= 0 else real(key)

    app.store.effect = effect  # type: ignore[method-assign]


def has_claims(operations: Sequence[Operation]) -> bool:
    return any(isinstance(one, Append) and one.keys is not None and one.keys.claims for one in operations)


class Slow:
    """Holds back the commits of an app that have a claim in them, until it is opened."""

    def __init__(self, app: App) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._commit = app.store.commit
        app.store.commit = self.commit  # type: ignore[method-assign]
        app.committer._seconds = 1.0  # such a disk is not waited for on the application's loop

    def commit(self, operations: Any, **how: bool) -> Any:
        if has_claims(operations):
            self.reached.set()
            assert self.opened.wait(20)
        return self._commit(operations, **how)


async def owned(machine: Machine, app: App, run: str = "a", flow: Any = racing_charge, invoice: int = 7) -> Any:
    """Start a run that has the key and whose body waits."""
    GATES[run] = Gate()
    handle = await app.start(flow, invoice, id=run)
    await asyncio.wait_for(GATES[run].reached.wait(), 60)
    return handle


def sound(machine: Machine, *runs: str) -> None:
    assert check(export_histories(machine.store), settled=False) == []
    for run in runs:
        assert not machine.replay(run).differences, run


@pytest.mark.parametrize("state", ["under way", "done", "other arguments"])
async def test_a_claim_that_is_lost_becomes_a_key_that_is_taken(machine: Machine, state: str) -> None:
    first, second = await machine.boot(), await machine.boot()
    owner = await owned(machine, first)
    if state == "done":
        GATES["a"].opened.set()
        await owner.result(timeout=60)
    blind(second)
    run = await second.start(racing_charge, 7, 5 if state != "other arguments" else 6, id="b")
    if state == "under way":
        await machine.until_status("b", "waiting")
        GATES["a"].opened.set()
    if state == "other arguments":
        with pytest.raises(KeyConflict):
            await run.result(timeout=60)
        GATES["a"].opened.set()
    else:
        assert await run.result(timeout=60) == "paid 5 by a"
    assert NOTES == ["a"]
    (taken,) = machine.bodies("b", "key_taken")
    assert (taken.key, taken.run, taken.seq, taken.again) == (K, "a", 2, False)
    assert "step_started" not in machine.kinds("b")
    sound(machine, "a", "b")


async def test_everything_else_in_the_unit_stands(machine: Machine) -> None:
    @workflow
    async def busy() -> list[Any]:
        everstep.publish("sofar", 1)
        word = await everstep.receive("word", str)
        results = await asyncio.gather(
            charge(7, 5), look(1), racing_child(2), charge(8, 5), ship(9), look(3), asyncio.sleep(0.01, "slept")
        )
        return [word, *results]

    first, second = await machine.boot(), await machine.boot()
    await owned(machine, first)
    await owned(machine, first, "c", racing_ship, 9)
    run = await second.start(busy, id="b")
    await machine.until_status("b", "waiting")
    blind(second, 3)
    GATES["b"] = Gate()
    await run.signal("word", "tides")
    await GATES["b"].reached.wait()
    machine.clock.advance(1)
    await machine.until(lambda: machine.kinds("b").count("key_taken") == 2)
    for waits in GATES.values():
        waits.opened.set()
    paid = ["paid 5 by a", 1, 2, "paid 5 by b", "paid 5 by c", 3, "slept"]
    assert await run.result(timeout=60) == ["tides", *paid]
    assert sorted(NOTES) == ["a", "b", "c"]
    assert await run.published() == {"sofar": 1}
    await machine.rest()  # the owners of the keys may be about to end
    sound(machine, "a", "b", "c")


@pytest.mark.parametrize("contract", ["once", "repeat"])
async def test_a_step_that_is_cancelled_while_its_claim_is_being_lost(machine: Machine, contract: str) -> None:
    """What the code was told then must be what a replay tells it, although the step never began."""

    @workflow
    async def fickle() -> str:
        task = asyncio.create_task(charge(7, 5) if contract == "once" else ship(7))
        await look(1)
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return f"gave up {await look(2)}"

    first, second = await machine.boot(), await machine.boot()
    owner = await owned(machine, first, "a", racing_charge if contract == "once" else racing_ship)
    blind(second)
    slow = Slow(second)
    run = await second.start(fickle, id="b")
    await machine.until(slow.reached.is_set)
    await machine.until(lambda: second.drivers["b"].journal.seq >= 4)  # the read is done, and the code went on
    slow.opened.set()
    assert await run.result(timeout=60) == "gave up 2"
    GATES["a"].opened.set()
    await owner.result(timeout=60)
    assert NOTES == ["a"]
    assert "key_taken" in machine.kinds("b")
    sound(machine, "a", "b")


async def test_a_run_that_ends_in_the_unit_of_a_claim_that_is_lost(machine: Machine) -> None:
    @workflow
    async def leaving() -> str:
        task = asyncio.create_task(ship(7))
        await asyncio.sleep(0)
        return f"left {task.done()}"

    first, second = await machine.boot(), await machine.boot()
    owner = await owned(machine, first, "a", racing_ship)
    blind(second)
    run = await second.start(leaving, id="b")
    assert await run.result(timeout=60) == "left False"
    assert machine.kinds("b") == ["run_started", "key_taken", "run_completed"]
    assert machine.store.waiters("parcel:7") == []
    GATES["a"].opened.set()
    await owner.result(timeout=60)
    sound(machine, "a", "b")


async def test_a_hold_in_the_unit_of_a_claim_that_is_lost(machine: Machine) -> None:
    first, second = await machine.boot(), await machine.boot()
    owner = await owned(machine, first, "a", racing_ship)
    blind(second)
    slow = Slow(second)
    run = await second.start(racing_ship, 7, id="b")
    await machine.until(slow.reached.is_set)
    held = asyncio.create_task(second.hold("b", "wait a moment"))
    await asyncio.sleep(0.02)
    slow.opened.set()
    await held
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    GATES["a"].opened.set()
    await owner.result(timeout=60)
    await second.resolve("b", "retry")
    assert await run.result(timeout=60) == "paid 5 by a"
    sound(machine, "a", "b")


async def test_who_is_woken_may_lose_again_and_waits_again(machine: Machine) -> None:
    first, second = await machine.boot(), await machine.boot()
    await owned(machine, first, "a", racing_ship)
    waits = await second.start(racing_ship, 7, id="b")
    await machine.until_status("b", "waiting")
    GATES["c"] = Gate()
    third = await first.start(racing_ship, 7, id="c")
    await machine.until_status("c", "waiting")
    blind(second)
    # The one that has the key gives it up; both others are told, and the one that does not look is too late.
    slow = Slow(second)
    await first.cancel("a", now=True)
    await asyncio.wait_for(GATES["c"].reached.wait(), 60)
    slow.opened.set()
    await machine.until(lambda: machine.kinds("b").count("key_taken") == 2)
    assert [body.again for body in machine.bodies("b", "key_taken")] == [False, True]
    GATES["c"].opened.set()
    assert await waits.result(timeout=60) == await third.result(timeout=60) == "paid 5 by c"
    sound(machine, "a", "b", "c")


async def test_a_key_that_cannot_be_read_is_claimed_and_the_store_decides(machine: Machine) -> None:
    first = await machine.boot()
    owner = await owned(machine, first)
    store = FaultyStore(machine.open_store())
    second = await machine.boot(store=store.as_store())
    fault = store.fail("effect", after=False, count=2)
    run = await second.start(racing_charge, 7, id="b")
    free = await second.start(racing_charge, 8, id="c")
    assert await free.result(timeout=60) == "paid 5 by c"
    await machine.until(lambda: machine.store.waiters(K) == [("b", 1)])
    assert fault.fired == 2
    store.fail("effect", after=False, error=StoreError("just now"))
    GATES["a"].opened.set()
    assert await owner.result(timeout=60) == await run.result(timeout=60) == "paid 5 by a"
    assert NOTES == ["a", "c"]
    sound(machine, "a", "b", "c")


@pytest.mark.parametrize("after", [False, True])
async def test_an_unknown_commit_of_a_claim_or_of_its_end_is_read_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    app = await machine.boot()
    writer: Any = app.store._writer  # type: ignore[attr-defined]
    end: Callable[[], None] = writer._end
    await app.become_worker()
    calls, is_batch = 0, False
    write: Callable[..., Any] = writer._attempt

    def note_batch(*args: Any) -> Any:
        nonlocal is_batch
        is_batch = True
        return write(*args)

    def fail() -> None:
        nonlocal calls, is_batch
        calls, breaks, is_batch = calls + is_batch, is_batch and calls % 2 == 0, False
        if after or not breaks:
            end()
        if breaks:
            raise OSError("the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_end", fail)
        patch.setattr(writer, "_attempt", note_batch)
        assert await app.run(racing_charge, 7, id="a") == "paid 5 by a"
        assert await app.run(racing_charge, 7, id="b") == "paid 5 by a"
    assert calls > 4
    assert NOTES == ["a"]
    assert check(export_histories(machine.store), settled=False) == []


async def test_whoever_lost_its_run_neither_claims_nor_ends_a_key(machine: Machine) -> None:
    app = await machine.boot()
    await owned(machine, app)
    thief = machine.open_store()
    machine.sql("UPDATE workers SET lease_until = 0")
    thief.register_worker("thief", 1, "host", machine.clock.now() + 60_000_000)
    thief.commit([Claim("a", "thief", machine.clock.now(), ["running", "waiting"])])
    GATES["a"].opened.set()
    await machine.until(lambda: "a" not in app.drivers)
    row = machine.store.effect(K)
    assert row is not None
    assert (row.state, row.outcome) == ("under-way", None)
    assert "step_completed" not in machine.kinds("a")
    thief.close()


async def test_on_a_full_disk_a_claim_waits_and_may_then_be_lost(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    second = await machine.boot(store=store.as_store())

    @workflow
    async def busy() -> list[Any]:
        return list(await asyncio.gather(charge(7, 5), look(1), look(2)))

    fault = store.fail("commit", after=False, error=StoreFull("no room"), count=3, when=has_claims)
    run = await second.start(busy, id="b")
    await machine.until(lambda: fault.fired > 0)
    first = await machine.boot()
    owner = await owned(machine, first)
    await machine.until(lambda: machine.store.waiters(K) == [("b", 1)])
    GATES["a"].opened.set()
    assert await owner.result(timeout=60) == "paid 5 by a"
    assert await run.result(timeout=60) == ["paid 5 by a", 1, 2]
    assert NOTES == ["a"]
    sound(machine, "a", "b")


async def test_who_is_told_while_it_stops_leaves_that_to_the_next(machine: Machine) -> None:
    app, other = await machine.boot(), await machine.boot()
    owner = await owned(machine, app)
    await other.start(racing_charge, 7, id="b")
    await machine.until_status("b", "waiting")
    other.draining = True
    GATES["a"].opened.set()
    await owner.result(timeout=60)
    other.wake_driver("b")
    await machine.until(lambda: len(machine.store.signals("b")) > 1)
    assert "step_shared" not in machine.kinds("b")
    await machine.stop(other)
    assert machine.store.inbox("b") != []
    run = await app.start(racing_charge, 7, id="b")
    assert await run.result(timeout=60) == "paid 5 by a"
    sound(machine, "a", "b")


async def test_what_was_published_with_an_end_that_is_taken_back_is_not_lost(machine: Machine) -> None:
    """The same way back as for a claim: a cancel arrives before the end is durable."""

    inbox = machine.open_store()

    @step(effect="read")
    async def cancel_me() -> None:
        inbox.commit([Post("a", "cancel", value=b'{"reason": "no"}', at=1)])

    @workflow
    async def flow() -> str:
        await cancel_me()
        everstep.publish("sofar", 2)
        return "done"

    _, run = await machine.start(flow, id="a")
    await machine.until_status("a", "cancelled", "completed")
    assert machine.status("a") == "cancelled"
    assert await run.published() == {"sofar": 2}
    inbox.close()
