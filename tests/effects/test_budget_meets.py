"""Budgets with compensations, keys of actions, atomic steps, checkpoints, repairs and restored backups."""

import asyncio
from typing import Any

import msgspec
import pytest

import everstep
from everstep import STORE, Budget, BudgetExceeded, Done, NotDone, step, transaction, workflow
from everstep.engine.code.checkpoints import decode_part
from everstep.engine.history.journal import unpacked
from everstep.engine.history.restored import mark_restored
from everstep.errors import Misuse, RunCancelled, RunHeld, StoreError
from everstep.stores.protocol import RunFilter
from everstep.stores.rows.keys import EffectRow
from everstep.testing.checker import check, export_histories
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import ANSWERS, GATES, NOTES, pass_gate


def used(machine: Machine, run: str = "r") -> tuple[float, int]:
    """Return the dollars and attempts that the row says were used; nothing may be reserved any more."""
    standing = msgspec.json.decode(machine.row(run).budget or b"{}")
    assert standing["reserved"] == {}
    return standing["used"].get("microdollars", 0) / 1_000_000, standing["used"].get("steps", 0)


def judged(machine: Machine) -> None:
    assert check(export_histories(machine.store), settled=False) == []
    for row in machine.store.runs(RunFilter()):
        assert not machine.replay(row.id).differences, row.id


# -- compensations -----------------------------------------------------------------------------------------------------
@step(cost={"usd": 0.50})
async def unbook(booking: str, day: int) -> None:
    NOTES.append(f"unbook {booking}")
    await pass_gate(f"unbook {booking}")
    everstep.charge(usd=0.40)


@step(cost={"usd": 0.50}, compensate=unbook)
async def book(day: int) -> str:
    NOTES.append(f"book {day}")
    return f"b{day}"


async def book_days() -> None:
    for day in range(9):
        await book(day)


@workflow(name="budget_trip_fails", budget=Budget(usd=1, then="fail"))
async def trip_fails() -> None:
    await book_days()


@workflow(name="budget_trip_of_two_steps", budget=Budget(steps=2, then="fail"))
async def trip_of_two_steps() -> None:
    await book_days()


@workflow(name="budget_trip_held", budget=Budget(usd=1))
async def trip_held() -> None:
    await book_days()


@workflow(name="budget_trip_late", budget=Budget(usd=5, seconds=100))
async def trip_late() -> None:
    await book(0)
    await everstep.receive("go", str)


BACK = ["book 0", "book 1", "unbook b1", "unbook b0"]


@pytest.mark.parametrize("flow", [trip_fails, trip_of_two_steps])
async def test_a_budget_at_its_limit_never_stops_a_compensation_and_it_is_charged(machine: Machine, flow: Any) -> None:
    app = await machine.boot()
    with pytest.raises(BudgetExceeded):
        await app.run(flow, id="r")
    assert NOTES == BACK
    assert used(machine) == (1.80, 4)
    judged(machine)


async def test_a_run_that_is_held_at_its_limit_can_be_rolled_back(machine: Machine) -> None:
    app, run = await machine.start(trip_held, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert "rollback" in machine.hold("r").resolutions
    await app.rollback("r", "too dear")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == BACK
    assert used(machine) == (1.80, 4)
    judged(machine)


async def test_what_is_being_undone_is_not_held_when_the_time_is_over(machine: Machine) -> None:
    app, run = await machine.start(trip_late, id="r")
    await machine.until_status("r", "waiting")
    GATES["unbook b0"] = Gate()
    await app.rollback("r", "changed my mind")
    await GATES["unbook b0"].reached.wait()
    machine.clock.advance(200)
    app.drivers["r"].take_inbox_and_deadlines()
    GATES["unbook b0"].opened.set()
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == ["book 0", "unbook b0"]
    assert "run_held" not in machine.kinds("r")
    judged(machine)


# -- keys --------------------------------------------------------------------------------------------------------------
@step(key="report:{topic}", cost={"usd": 0.50})
async def report(topic: str) -> str:
    NOTES.append(everstep.current().run)
    await pass_gate(everstep.current().run)
    everstep.charge(usd=0.30)
    return f"about {topic}"


@workflow(name="budget_reports", budget=Budget(usd=0.60))
async def reports(*topics: str) -> list[str]:
    return [await report(topic) for topic in topics]


@workflow(name="budget_no_reports", budget=Budget(usd=0.10))
async def no_reports(topic: str) -> str:
    return await report(topic)


async def test_an_outcome_that_another_run_gives_costs_nothing_and_needs_no_room(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(reports, "tides", id="a")
    assert await app.run(reports, "tides", "moon", id="b") == ["about tides", "about moon"]
    assert await app.run(no_reports, "tides", id="c") == "about tides"
    assert NOTES == ["a", "b"]
    assert [used(machine, run) for run in "abc"] == [(0.30, 1), (0.30, 1), (0, 0)]
    judged(machine)


async def test_a_step_for_which_there_is_no_room_does_not_keep_its_key_from_others(machine: Machine) -> None:
    app, run = await machine.start(no_reports, "tides", id="a")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    (withheld,) = machine.bodies("a", "call_withheld")
    assert (withheld.key, withheld.over) == ("report:tides", "usd")
    assert await app.run(reports, "tides", id="b") == ["about tides"]
    await machine.stop(app)
    app = await machine.boot()
    await app.resolve("a", "accept", by="ann")  # that is 10 cents more, and not enough
    run = await app.start(no_reports, "tides", id="a")
    assert await run.result(timeout=60) == "about tides"
    assert NOTES == ["b"]
    assert machine.kinds("a", "step") == ["step_shared"]
    assert used(machine, "a") == (0, 0)
    judged(machine)


def blind(app: Any) -> None:
    """Let an app see a key as free once: as if somebody else were quicker between its look and its claim."""
    real, seen = app.store.effect, []

    def effect(key: str) -> EffectRow | None:
        seen.append(key)
        found: EffectRow | None = None if len(seen) == 1 else real(key)
        return found

    app.store.effect = effect


async def test_what_was_reserved_for_a_claim_that_is_lost_is_given_back(machine: Machine) -> None:
    first, second = await machine.boot(), await machine.boot()
    GATES["a"] = Gate()
    await first.start(reports, "tides", id="a")
    await GATES["a"].reached.wait()
    blind(second)
    run = await second.start(reports, "tides", "moon", id="b")
    await machine.until_status("b", "waiting")
    assert used(machine, "b") == (0, 0)
    GATES["a"].opened.set()
    assert await run.result(timeout=60) == ["about tides", "about moon"]
    assert used(machine, "b") == (0.30, 1)
    judged(machine)


# -- atomic steps ------------------------------------------------------------------------------------------------------
@transaction(STORE, cost={"usd": 0.50})
def sell(connection: Any, item: str) -> str:
    NOTES.append(f"sell {item}")
    everstep.charge(usd=0.30)
    return f"sold {item}"


@workflow(name="budget_sale", budget=Budget(usd=0.60))
async def sale() -> str:
    return await asyncio.to_thread(sell, "lamp")


async def test_an_atomic_step_is_charged_with_its_outcome(machine: Machine) -> None:
    app = await machine.boot()
    assert await app.run(sale, id="r") == "sold lamp"
    assert used(machine) == (0.30, 1)


async def test_an_atomic_step_that_has_happened_is_found_without_room_and_not_paid_twice(machine: Machine) -> None:
    """The process dies when the transaction is committed and the outcome is not recorded."""
    app = await machine.boot()
    real = app.store.commit

    def commit(operations: Any, **options: Any) -> Any:
        if any(event.kind == "step_completed" for one in operations for event in getattr(one, "events", ())):
            raise StoreError("the disk is gone")
        return real(operations, **options)

    app.store.commit = commit  # type: ignore[method-assign]
    await app.start(sale, id="r")
    await machine.until(lambda: NOTES)
    await asyncio.sleep(0.1)
    await machine.kill(app)
    app = await machine.boot()
    assert await (await app.start(sale, id="r")).result(timeout=60) == "sold lamp"
    assert NOTES == ["sell lamp"]
    (completed,) = machine.bodies("r", "step_completed")
    assert (completed.adopted, completed.charged.microdollars) == (True, 0)
    assert used(machine) == (0.50, 2), "the attempt that was cut off stays at its estimate"
    judged(machine)


# -- lost parts of the history -----------------------------------------------------------------------------------------
async def ask_trade(key: str, number: int) -> Any:
    return ANSWERS.pop(0)


@step(effect="once", probe=ask_trade, cost={"usd": 0.50})
async def trade(number: int) -> str:
    NOTES.append(f"trade {number}")
    everstep.charge(usd=0.30)
    return f"traded {number}"


@workflow(name="budget_trades", budget=Budget(usd=5))
async def trades(count: int) -> list[str]:
    done = [await trade(0)]
    await everstep.receive("go", str)
    return done + [await trade(1 + number) for number in range(count)]


@pytest.mark.parametrize(("answer", "dollars"), [(NotDone(), 0.60), (Done("traded 1"), 0.80)])
async def test_after_a_restore_only_what_happens_is_charged(machine: Machine, answer: Any, dollars: float) -> None:
    """What had happened after the backup costs its estimate: what it was charged is lost. What had not is paid once."""
    app, _ = await machine.start(trades, 1, id="r")
    await machine.until_status("r", "waiting")
    await machine.stop(app)
    mark_restored(machine.store)
    ANSWERS.append(answer)
    app, run = await machine.start(trades, 1, id="r")
    await run.signal("go", "now")
    await machine.advance(5)
    assert await run.result(timeout=60) == ["traded 0", "traded 1"]
    assert used(machine)[0] == dollars
    judged(machine)


async def test_a_repaired_run_is_charged_again_only_for_what_happens_again(machine: Machine) -> None:
    app, _ = await machine.start(reads, id="r")
    await machine.until_status("r", "waiting")
    await machine.stop(app)
    assert used(machine) == (0.90, 3)
    (lost,) = [event.seq for event in machine.events("r") if event.kind == "step_started" and event.step == "read#3"]
    machine.sql("DELETE FROM events WHERE run = 'r' AND seq >= ?", lost)
    app = await machine.boot()
    await app.repair("r", by="ann")
    assert used(machine) == (0.60, 2), "the row is made anew from what is left"
    run = await app.start(reads, id="r")
    await run.signal("go", "now")
    await run.result(timeout=60)
    assert NOTES == ["read 0", "read 1", "read 2", "read 2"]
    assert used(machine) == (0.90, 3)
    judged(machine)


@step(effect="read", cost={"usd": 0.50})
async def read(number: int) -> int:
    NOTES.append(f"read {number}")
    await pass_gate(f"read {number}")
    everstep.charge(usd=0.30)
    return number


@workflow(name="budget_reads", budget=Budget(usd=5))
async def reads() -> None:
    for number in range(3):
        await read(number)
    await everstep.receive("go", str)


# -- checkpoints -------------------------------------------------------------------------------------------------------
@workflow(name="budget_loop", budget=Budget(usd=100))
async def loop(turns: int) -> float | None:
    turn = await everstep.checkpoint(0)
    while turn < turns:
        with everstep.budget(usd=1):
            await read(turn)
        turn = await everstep.checkpoint(turn + 1)
    return everstep.budget().left.usd


async def test_a_loop_that_goes_on_from_a_checkpoint_knows_what_was_used(machine: Machine) -> None:
    GATES["read 40"] = Gate()
    app, _ = await machine.start(loop, 50, id="r")
    await GATES["read 40"].reached.wait()
    await machine.until(lambda: all(one.writer.all_is_durable for one in app.drivers.values()))
    await machine.kill(app)
    GATES["read 40"].opened.set()
    app = await machine.boot()
    assert await (await app.start(loop, 50, id="r")).result(timeout=60) == 84.5
    assert len(NOTES) == 51
    assert used(machine) == (15.5, 51)
    found = machine.store.checkpoint("r", 1)
    assert found is not None
    books = decode_part(unpacked(found.engine, "part")).books
    assert books is not None
    assert books.head is not None
    assert list(books.head.parts) == list(books.view.parts) == [0], "parts that were left do not pile up"
    judged(machine)


async def test_a_checkpoint_in_another_part_than_the_first_is_refused(machine: Machine) -> None:
    @workflow(name="budget_inside", budget=Budget(usd=100))
    async def inside() -> None:
        await everstep.checkpoint(0)
        with everstep.budget(usd=1):
            await everstep.checkpoint(1)

    app = await machine.boot()
    with pytest.raises(Misuse, match="another part of the budget"):
        await app.run(inside, id="r")
