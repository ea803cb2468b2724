"""Parts of a budget, restarts, runs without one, and mistakes."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest

import everstep
from everstep import Budget, BudgetExceeded, step, workflow
from everstep.errors import Misuse
from everstep.model.budgets import microdollars, nanodollars
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Machine
from tests.worlds.calls import ask, save, used
from tests.worlds.judging import held
from tests.worlds.ledger import NOTES


# -- restart and no budget --------------------------------------------------------------------------------------------
async def test_a_restart_has_a_new_budget(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.60, then="fail"))
    async def flow() -> str:
        return await ask("tides")

    app = await machine.boot()
    for generation in (1, 2, 3):
        run = await app.start(flow, id="r", on_existing="restart")
        assert await run.result(timeout=60) == "about tides"
        assert machine.row("r").generation == generation
        assert used(machine, "r") == (0.30, 60, 1)


async def test_without_a_budget_charges_are_written_down_and_nothing_is_stopped(machine: Machine) -> None:
    @workflow
    async def flow() -> str:
        everstep.charge(tokens=5)
        await ask("tides")
        assert everstep.budget().left == (None, None, None, None)
        return await ask("moon")

    app = await machine.boot()
    assert await app.run(flow, id="r") == "about moon"
    assert charged_in(machine.events("r")) == (0.60, 125, 2)
    assert machine.bodies("r", "step_started")[0].cost is None
    assert machine.row("r").budget is None


async def test_what_was_used_between_a_failure_and_its_retry_is_gone_for_the_code_too(machine: Machine) -> None:
    broken = [True]

    @step(effect="read", cost={"usd": 0.50})
    async def fragile() -> str:
        everstep.charge(usd=0.20)
        if broken[0]:
            raise LookupError("not yet")
        return "fine"

    @workflow(budget=Budget(usd=5))
    async def flow() -> list[float]:
        await ask("before")
        lefts = [everstep.budget().left.usd or 0]
        try:
            await fragile()
        except LookupError:
            with everstep.budget(usd=1):
                everstep.charge(usd=0.05)
                await ask("after the failure")
            raise
        lefts.append(everstep.budget().left.usd or 0)
        await ask(f"at the end, with {lefts}")
        return [*lefts, everstep.budget().left.usd or 0]

    app, run = await machine.start(flow, id="r")
    with pytest.raises(LookupError):
        await run.result(timeout=60)
    broken[0] = False
    await app.retry("r")
    assert await run.result(timeout=60) == [4.7, 3.95, 3.65], "0.30, 0.20 + 0.05 + 0.30 + 0.20, 0.30"
    assert machine.replay("r").differences == []
    assert used(machine, "r")[0] == 1.35


# -- parts ------------------------------------------------------------------------------------------------------------
async def test_a_part_of_the_budget_is_for_what_begins_in_its_block(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def flow() -> list[Any]:
        told: list[Any] = []
        with everstep.budget(usd=1, then="fail") as part:
            try:
                for number in range(9):
                    await ask(f"question {number}")
            except BudgetExceeded as error:
                told += [error.limit, round(part.left.usd or 0, 2), round(everstep.budget().left.usd or 0, 2)]
        told.append(round(everstep.budget().left.usd or 0, 2))
        await ask("outside")
        return told

    app = await machine.boot()
    assert await app.run(flow, id="r") == [1.0, 0.4, 0.4, 4.4]
    assert NOTES == ["question 0", "question 1", "outside"]
    (narrowed,) = machine.bodies("r", "budget_narrowed")
    assert (narrowed.limits.microdollars, narrowed.then) == (1_000_000, "fail")
    assert [one.part for one in machine.bodies("r", "step_started")] == [narrowed.call, narrowed.call, 0]
    assert machine.replay("r").differences == []


async def test_parts_nest_and_tasks_take_them_along(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5, tokens=10_000, then="fail"))
    async def flow() -> list[str]:
        async def lane(name: str) -> str:
            with everstep.budget(usd=0.6):
                try:
                    while True:
                        await ask(name)
                except BudgetExceeded:
                    left = everstep.budget().left
                    return f"{name} {round(left.usd or 0, 2)} {left.tokens}"

        with everstep.budget(usd=2):
            told = await asyncio.gather(*(lane(name) for name in "abc"))
        return [*told, str(round(everstep.budget().left.usd or 0, 2))]

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["a 0.3 9820", "b 0.3 9820", "c 0.3 9820", "4.1"]
    assert sorted(NOTES) == ["a", "b", "c"]
    assert machine.replay("r").differences == []


async def test_a_grant_for_a_part_raises_that_part(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def flow() -> int:
        with everstep.budget(usd=0.6):
            for number in range(4):
                await ask(f"question {number}")
        return len(NOTES)

    app, run = await machine.start(flow, id="r")
    await held(machine, run, "budget")
    await app.resolve("r", "accept")
    await held(machine, run, "budget")
    await app.resolve("r", "accept")
    assert await run.result(timeout=60) == 4
    assert {one.part for one in machine.bodies("r", "run_resolved")} == {1}


async def test_the_time_of_a_part_counts_from_its_opening(machine: Machine) -> None:
    @workflow(budget=Budget())
    async def flow() -> str:
        await asyncio.sleep(100)
        with everstep.budget(seconds=10, then="fail") as part:
            await ask("in time")
            assert part.left.seconds == 10.0
            await asyncio.sleep(9)
            assert part.left.seconds == 1.0
            await ask("still in time")
            await asyncio.sleep(1)
            try:
                await ask("too late")
            except BudgetExceeded as error:
                return error.over
        return "?"

    _, run = await machine.start(flow, id="r")
    for seconds in (100, 9, 1):
        await machine.rest()
        await machine.advance(seconds)
    assert await run.result(timeout=60) == "seconds"


async def test_a_part_in_a_def_workflow(machine: Machine) -> None:
    @step(effect="read", cost={"usd": 0.5})
    def look(name: str) -> str:
        everstep.charge(usd=0.3)
        return name

    @workflow(budget=Budget(usd=5))
    def plain() -> list[str]:
        def lane(name: str) -> str:
            with everstep.budget(usd=0.6, then="fail"):
                look(name)
                try:
                    return look(name)
                except BudgetExceeded:
                    return f"{name} {round(everstep.budget().left.usd or 0, 2)}"

        told = everstep.blocking.gather(lambda: lane("a"), lambda: lane("b"))
        return [*told, look(f"{round(everstep.budget().left.usd or 0, 2)}")]

    app = await machine.boot()
    assert await app.run(plain, id="r") == ["a 0.3", "b 0.3", "4.4"]
    assert machine.replay("r").differences == []


async def test_there_is_nothing_to_narrow_without_a_budget(machine: Machine) -> None:
    @workflow
    async def flow() -> None:
        with everstep.budget(usd=1):
            pass

    app = await machine.boot()
    with pytest.raises(Misuse, match=r"put `budget=everstep.Budget\(\)` on its workflow"):
        await app.run(flow)


async def test_a_part_is_opened_once(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1))
    async def flow() -> None:
        part = everstep.budget(usd=1)
        with part:
            pass
        with part:
            pass

    app = await machine.boot()
    with pytest.raises(Misuse, match="was opened before"):
        await app.run(flow)


async def test_another_limit_of_a_part_than_was_recorded_is_held_as_diverged(machine: Machine) -> None:
    limit = [1.0]

    @workflow(budget=Budget(usd=5))
    async def flow() -> None:
        with everstep.budget(usd=limit[0]):
            await everstep.receive("go")

    first, _ = await machine.start(flow, id="r")
    await machine.rest()
    await machine.kill(first)
    limit[0] = 2.0
    assert [one.what for one in machine.replay("r").differences] == ["budget"]


# -- mistakes and money -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"usd": -1}, "usd"),
        ({"usd": float("nan")}, "usd"),
        ({"usd": "5"}, "usd"),
        ({"usd": True}, "usd"),
        ({"tokens": 1.5}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"steps": "many"}, "steps"),
        ({"seconds": 0}, "seconds"),
        ({"then": "stop"}, "then"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(Misuse, match=word):
        Budget(**options)


def test_other_mistakes_are_told_where_they_are_made() -> None:
    with pytest.raises(Misuse, match=r"budget= is an everstep\.Budget"):
        workflow(budget={"usd": 5})(lambda: None)  # type: ignore[arg-type]
    for cost in ({"dollars": 1}, 5, {"usd": -1}, {"tokens": 1.5}):
        with pytest.raises(Misuse):
            step(cost=cost)(lambda: None)  # type: ignore[call-overload]
    for amounts in ({}, {"usd": -1}, {"tokens": 0.5}, {"usd": float("inf")}):
        with pytest.raises(Misuse):
            everstep.charge(**amounts)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="inside a run"):
        everstep.charge(usd=1)


def test_a_step_called_outside_of_a_run_is_the_plain_function() -> None:
    assert asyncio.run(save("x")) == "x"


@pytest.mark.parametrize(
    ("usd", "micros"),
    [
        (0.1 + 0.2, 300_000),
        (1e-9, 1),
        (0.0000004, 1),
        (0, 0),
        (Decimal("0.000001"), 1),
        (12, 12_000_000),
        (0.29, 290_000),
    ],
)
def test_money_is_exact_and_rounded_up(usd: Any, micros: int) -> None:
    assert microdollars(nanodollars(usd)) == micros
