"""Steps with a key of your own: one run does it, and the others share its outcome, wait, or conflict."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

import everstep
from everstep import Live, step, workflow
from everstep.codec import Codec
from everstep.engine.process import resting
from everstep.errors import KeyConflict, Misuse
from tests.engine.resume_helpers import Machine
from tests.worlds.invoices import (
    ERRORS,
    FLOWS,
    K,
    begun,
    charge,
    charging,
    effect,
    gate,
    held,
    keys_presented,
    runs_that_ran,
    ship,
    shipping,
    sound,
    waiting,
)
from tests.worlds.ledger import GATES, NOTES


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    ERRORS.clear()


# -- declaring --------------------------------------------------------------------------------------------------------
async def plain(invoice: int, note: str = "") -> str:
    return ""


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("invoice:{number}", "no parameter number. It has: invoice, note"),
        ("invoice", "the same for all arguments"),
        ("invoice:{}", "name the parameters"),
        ("invoice:{0}", "name the parameters"),
        ("invoice:{invoice", "no format string"),
        (7, "is a int"),
        (plain, "is `async`"),
    ],
)
def test_a_key_that_can_never_be_right_is_refused_when_it_is_declared(key: Any, why: str) -> None:
    with pytest.raises(Misuse, match=why.replace("(", r"\(")):
        step(plain, effect="once", key=key)


def test_a_read_has_no_key() -> None:
    with pytest.raises(Misuse, match="a read changes nothing"):
        step(plain, effect="read", key="{invoice}")


class Nameless:
    """Its text is its address."""


class Bill:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(
    ("value", "why"),
    [(None, "is None"), ("", "is ''"), (Nameless(), "its address"), ({1, 2}, "no order"), (frozenset(), "no order")],
)
def test_a_part_that_names_nothing_is_refused_in_the_workflow(value: Any, why: str) -> None:
    @step(key="thing:{thing}")
    async def do(thing: Live[Any], other: Any = None) -> None: ...

    @step(key="thing:{other}")
    async def do_other(thing: Live[Any], other: Any) -> None: ...

    maker = do_other.key  # type: ignore[attr-defined]
    arguments = Codec().encode_arguments(do_other.signature, (1, 2), {}, "x")  # type: ignore[attr-defined]
    with pytest.raises(Misuse, match=why):
        maker.make(do_other.signature, arguments._replace(args=(1, value)))  # type: ignore[attr-defined]
    with pytest.raises(Misuse, match="handed through"):
        do.key.make(do.signature, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [7, "", "x" * 501, "a\nb", "\ud800"])
def test_what_is_no_key_is_refused_in_the_workflow_and_nothing_begins(made: Any) -> None:
    @step(key=lambda number: made)
    async def do(number: int) -> None:
        NOTES.append("begun")

    @workflow
    async def flow() -> None:
        await do(1)

    with pytest.raises(Misuse, match="The key of"):
        everstep.run(flow, url="memory:")
    assert NOTES == []


async def test_a_key_is_made_from_the_bound_arguments(machine: Machine) -> None:
    def of(bill: dict[str, int], kind: str = "b") -> str:
        return f"fn:{kind}:{bill['id']}"

    @step(key="{kind}:{bill[id]:03}:{when.real}")
    async def by_text(bill: dict[str, int], kind: str = "a", *, when: int = 4) -> str:
        return ""

    @step(key=of)
    async def by_function(bill: dict[str, int], kind: str = "b") -> str:
        return ""

    class Shop:
        @step(key="shop:{amount}")
        async def sell(self, amount: Decimal) -> str:
            return ""

    @workflow
    async def flow() -> None:
        await by_text({"id": 7})
        await by_text(kind="c", bill={"id": 8}, when=5)
        await by_function({"id": 7}, kind="z")
        await Shop().sell(Decimal("1.50"))

    app = await machine.boot()
    await app.run(flow, id="r")
    made = [body.key for body in machine.bodies("r", "step_started")]
    assert made == ["a:007:4", "c:008:5", "fn:z:7", "shop:1.50"]
    sound(machine)


def test_a_step_with_a_key_inside_of_another_step_is_refused() -> None:
    @step
    async def outer() -> None:
        await ship(7, 5)

    @workflow
    async def flow() -> None:
        await outer()

    with pytest.raises(Misuse, match=r"has a key .* in the workflow"):
        everstep.run(flow, url="memory:")
    assert NOTES == []


# -- sharing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("contract", FLOWS)
async def test_a_second_run_gets_the_first_ones_outcome_and_does_not_run(machine: Machine, contract: str) -> None:
    app = await machine.boot()
    assert await app.run(FLOWS[contract], 7, id="a") == "paid 5 by a"
    assert await app.run(FLOWS[contract], 7, id="b") == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    assert machine.kinds("b") == ["run_started", "key_taken", "step_shared", "run_completed"]
    (taken,), (shared,) = machine.bodies("b", "key_taken"), machine.bodies("b", "step_shared")
    assert (taken.key, taken.run, taken.generation, taken.seq) == (K, "a", 1, 2)
    assert (shared.run, shared.generation, shared.seq) == ("a", 1, 2)
    assert effect(machine).state == "done"
    sound(machine)


async def test_what_is_shared_is_read_from_the_history_alone(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        first = await charge(7, 5)
        await everstep.receive("go")
        return [first, await charge(8, 5)]

    app = await machine.boot()
    await app.run(charging, 7, id="a")
    await waiting(machine, app, flow, "b")
    await machine.kill(app)
    machine.sql("DELETE FROM effects")
    app, run = await machine.start(flow, id="b")
    await run.signal("go")
    assert await run.result(timeout=60) == ["paid 5 by a", "paid 5 by b"]
    assert runs_that_ran() == ["a", "b"], "the first was not decided again"


async def test_a_large_outcome_is_shared_whole(machine: Machine) -> None:
    @step(key="text:{number}")
    async def write(number: int) -> str:
        NOTES.append("written")
        return f"{number:05} " * 20_000

    @workflow
    async def flow(name: str) -> str:
        return await write(3)

    app = await machine.boot()
    first = await app.run(flow, "a", id="a")
    machine.sql("DELETE FROM payloads WHERE run = 'a'")
    assert await app.run(flow, "b", id="b") == first
    assert NOTES == ["written"]
    await machine.stop(app)
    app = await machine.boot()
    assert await app.get("b").result() == first
    assert not machine.replay("b").differences


async def test_an_outcome_that_is_damaged_is_not_shared(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    machine.sql("UPDATE effects SET outcome = CAST('z' || 'nonsense' AS BLOB)")
    hold = await held(machine, await app.start(charging, 7, id="b"))
    assert hold.reason == "stuck"
    assert "cannot be believed" in hold.summary
    await app.free_key(K, note="it is gone")
    await app.resolve("b", "retry")
    assert await app.get("b").result(timeout=60) == "paid 5 by b"
    sound(machine)


async def test_twenty_runs_at_once_do_it_once(machine: Machine) -> None:
    app = await machine.boot()
    first = gate("r0")
    runs = [await app.start(charging, 7, id=f"r{n}") for n in range(20)]
    await first.reached.wait()
    await machine.until(lambda: len(machine.store.waiters(K)) == 19)
    assert {machine.status(f"r{n}") for n in range(1, 20)} == {"waiting"}
    first.opened.set()
    assert {await run.result(timeout=60) for run in runs} == {"paid 5 by r0"}
    assert runs_that_ran() == ["r0"]
    sound(machine)


async def test_steps_of_one_run_share_as_well(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        together = await asyncio.gather(charge(7, 5), charge(7, 5), charge(8, 5))
        return [*together, await charge(7, 5)]

    app = await machine.boot()
    assert await app.run(flow, id="a") == ["paid 5 by a"] * 4
    assert len(NOTES) == 2
    assert machine.kinds("a").count("step_shared") == 2
    sound(machine)


# -- waiting ----------------------------------------------------------------------------------------------------------
async def test_who_waits_leaves_memory_and_is_woken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "RESTING_MAX", 0)
    app = await machine.boot()
    first = await begun(app, charging, "a")
    second = await waiting(machine, app, charging, "b")
    await machine.until(lambda: "b" not in app.drivers)
    assert machine.row("b").wake_at is None
    GATES["a"].opened.set()
    assert await first.result(timeout=60) == await second.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    sound(machine)


@pytest.mark.parametrize("order", ["owner first", "waiter first"])
async def test_who_waits_goes_on_after_a_restart(machine: Machine, order: str) -> None:
    """In another process, and whether the key has changed meanwhile or changes later."""
    owner, other = await machine.boot(), await machine.boot()
    first = await begun(owner, charging, "a")
    await waiting(machine, other, charging, "b")
    await machine.kill(other)
    if order == "owner first":
        GATES["a"].opened.set()
        await first.result(timeout=60)
        assert len(machine.store.inbox("b")) == 1
    other, second = await machine.start(charging, 7, id="b")
    if order == "waiter first":
        await machine.until_status("b", "waiting")
        GATES["a"].opened.set()
    assert await second.result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a"]
    sound(machine)


async def test_when_both_processes_are_gone_both_runs_go_on(machine: Machine) -> None:
    app = await machine.boot()
    await begun(app, shipping, "a")
    await waiting(machine, app, shipping, "b")
    await machine.kill(app)
    GATES.clear()
    app = await machine.worker()
    await machine.until_status("a", "completed")
    await machine.advance(1)
    assert await app.get("b").result(timeout=60) == "paid 5 by a"
    assert runs_that_ran() == ["a", "a"]
    assert len(keys_presented()) == 1
    assert [body.because for body in machine.bodies("a", "step_started")] == ["", "crash"]
    sound(machine)


async def test_a_timer_that_was_due_before_the_key_changed_wins(machine: Machine) -> None:
    """Also if both are found after downtime."""

    @workflow
    async def patient(invoice: int) -> str:
        try:
            async with asyncio.timeout(10):
                return await charge(invoice, 5)
        except TimeoutError:
            return "too late"

    owner, other = await machine.boot(), await machine.boot()
    first = await begun(owner, charging, "a")
    await waiting(machine, other, patient, "b")
    await machine.kill(other)
    machine.clock.advance(60)
    GATES["a"].opened.set()
    await first.result(timeout=60)
    other, second = await machine.start(patient, 7, id="b")
    assert await second.result(timeout=60) == "too late"
    sound(machine)


# -- conflicts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["done", "under way"])
async def test_other_arguments_are_a_conflict_and_a_replay_raises_it_again(machine: Machine, state: str) -> None:
    @workflow
    async def careful(invoice: int, amount: int) -> str:
        try:
            return await charge(invoice, amount)
        except KeyConflict as conflict:
            found = f"{conflict.key} is of {conflict.run}"
        await everstep.receive("go")
        return found

    app = await machine.boot()
    first = await begun(app, charging, "a")
    if state == "done":
        GATES["a"].opened.set()
        await first.result(timeout=60)
    await waiting(machine, app, careful, "b", 7, 99)
    await machine.kill(app)
    machine.sql("DELETE FROM effects")
    app, run = await machine.start(careful, 7, 99, id="b")
    await run.signal("go")
    assert await run.result(timeout=60) == f"{K} is of a"
    assert machine.kinds("b")[:3] == ["run_started", "key_taken", "step_failed"]
    assert runs_that_ran() == ["a"]


async def test_another_step_is_a_conflict(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    with pytest.raises(KeyConflict, match="belongs to charge of run a, another step"):
        await app.run(shipping, 7, id="b")
    sound(machine)


async def test_a_run_that_failed_with_a_conflict_is_retried(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(charging, 7, id="a")
    for _ in range(2):
        run = await app.start(charging, 7, 99, id="b", on_existing="retry")
        with pytest.raises(KeyConflict):
            await run.result(timeout=60)
    await app.free_key(K)
    await app.retry("b")
    assert await app.get("b").result(timeout=60) == "paid 99 by b"
    sound(machine)
