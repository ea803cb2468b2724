"""Who has room in a budget: steps and time, workflow code, many at once, and estimates."""

import asyncio
from typing import Any

import pytest

import everstep
from everstep import Budget, BudgetExceeded, NotDone, Retry, step, workflow
from everstep.engine.run.budget import Budgets
from everstep.errors import Misuse
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.calls import ask, ask_unknown, save, used
from tests.worlds.judging import held
from tests.worlds.ledger import NOTES


# -- steps and time ---------------------------------------------------------------------------------------------------
async def test_steps_are_attempts(machine: Machine) -> None:
    @step(effect="read", retry=Retry(attempts=9, first=1, factor=1, jitter=0))
    async def flaky() -> None:
        NOTES.append(everstep.current().attempt)
        raise ConnectionError

    @workflow(budget=Budget(steps=3, then="fail"))
    async def flow() -> None:
        await flaky()

    _, run = await machine.start(flow, id="r")
    for _ in range(4):
        await machine.rest()
        await machine.advance(1)
    with pytest.raises(BudgetExceeded, match="3 of 3 steps are used") as raised:
        await run.result(timeout=60)
    assert raised.value.over == "steps"
    assert NOTES == [1, 2, 3]
    assert machine.bodies("r", "step_failed")[0].attempt == 3
    assert machine.replay("r").differences == []


async def test_time_stops_the_next_step_and_counts_from_the_start(machine: Machine) -> None:
    @workflow(budget=Budget(seconds=60, then="fail"))
    async def flow() -> str:
        await ask("tides")
        await asyncio.sleep(61)
        try:
            await save("never")
        except BudgetExceeded as error:
            return f"{error.over} {error}"
        return "?"

    _, run = await machine.start(flow, id="r")
    await machine.rest()
    await machine.advance(61)
    assert await run.result(timeout=60) == ("seconds There is no room in the budget for save: its 60 seconds are over.")


async def test_a_run_that_waits_is_held_when_its_time_is_over_and_a_grant_counts_from_then(machine: Machine) -> None:
    @workflow(budget=Budget(seconds=60))
    async def flow() -> str:
        word = await everstep.receive("word", str)
        return await save(word)

    first, run = await machine.start(flow, id="r")
    await machine.rest()
    await machine.advance(59)
    assert machine.status("r") == "waiting"
    await machine.kill(first)
    app, run = await machine.start(flow, id="r")
    await machine.rest()
    machine.clock.advance(1)
    hold = await held(machine, run, "budget")
    assert (hold.step, hold.resolutions) == ("", ["accept", "cancel"])
    await machine.advance(1_000)
    await app.resolve("r", "accept")
    await run.signal("word", "moon")
    assert await run.result(timeout=60) == "moon"


async def test_a_delay_does_not_count(machine: Machine) -> None:
    @workflow(budget=Budget(seconds=60, then="fail"))
    async def flow() -> str:
        return await ask("tides")

    _, run = await machine.start(flow, id="r", delay=1_000)
    await machine.advance(1_001)
    assert await run.result(timeout=60) == "about tides"


# -- workflow code ----------------------------------------------------------------------------------------------------
async def test_workflow_code_that_charges_beyond_the_limit_stops_the_next_step(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1, tokens=50, then="fail"))
    async def flow() -> str:
        everstep.charge(tokens=40)
        everstep.charge(tokens=20)
        try:
            await ask_unknown("tides")
        except BudgetExceeded as error:
            return f"{error.over}: {await save('rest')}"
        return "?"

    app = await machine.boot()
    assert await app.run(flow, id="r") == "tokens: rest"
    assert NOTES == ["saved rest"]
    assert machine.kinds("r")[1:3] == ["charged", "charged"]
    assert used(machine, "r") == (0.0, 60, 1)
    assert machine.replay("r").differences == []


async def test_code_sees_its_own_charges_at_once_and_once(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def flow() -> list[float | None]:
        everstep.charge(usd=1)
        lefts = [everstep.budget().left.usd]
        await ask("tides")
        lefts.append(everstep.budget().left.usd)
        everstep.charge(usd=1)
        return [*lefts, everstep.budget().left.usd]

    app = await machine.boot()
    assert await app.run(flow, id="r") == [4.0, 3.7, 2.7]
    assert machine.replay("r").differences == []


async def test_another_amount_than_was_recorded_is_held_as_diverged(machine: Machine) -> None:
    price = [10]

    @workflow(budget=Budget(usd=1))
    async def flow() -> None:
        everstep.charge(tokens=price[0])
        await everstep.receive("go")

    first, _ = await machine.start(flow, id="r")
    await machine.rest()
    await machine.kill(first)
    price[0] = 11
    assert [one.what for one in machine.replay("r").differences] == ["amount"]


# -- concurrency ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("then", ["hold", "fail", "fallback"])
async def test_of_twenty_steps_at_once_only_those_begin_for_which_there_is_room(machine: Machine, then: Any) -> None:
    """Each is estimated at 50 cents and really costs 90: the overshoot is at most what was under way."""
    most = [0, 0]

    @step(effect="read", cost={"usd": 0.50}, fallback="none")
    async def dear(number: int) -> str:
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(0.001)
        everstep.charge(usd=0.90)
        most[0] -= 1
        return str(number)

    @workflow(budget=Budget(usd=3, then=then))
    async def flow() -> list[str]:
        found = await asyncio.gather(*(dear(number) for number in range(20)), return_exceptions=True)
        return [one if isinstance(one, str) else type(one).__name__ for one in found]

    _, run = await machine.start(flow, id="r")
    if then == "hold":
        await held(machine, run, "budget")
    else:
        ends = {"fail": "BudgetExceeded", "fallback": "none"}
        assert await run.result(timeout=60) == [str(n) for n in range(6)] + [ends[then]] * 14
    assert most[1] == 6, "six estimates fit into three dollars"
    assert charged_in(machine.events("r")) == (5.40, 0, 6)
    assert 5.40 <= 3 + 6 * 0.90, "the limit, and the steps that were under way"
    assert machine.replay("r").differences == []


async def test_steps_wait_while_those_under_way_may_be_cheaper_than_estimated(machine: Machine) -> None:
    at_once = [0, 0]

    @step(effect="read", cost={"usd": 0.50})
    async def cheap(number: int) -> int:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0.001)
        everstep.charge(usd=0.04)
        at_once[0] -= 1
        return number

    @workflow(budget=Budget(usd=1.20, then="fail"))
    async def flow() -> list[int]:
        return await asyncio.gather(*(cheap(number) for number in range(10)))

    app = await machine.boot()
    assert await app.run(flow, id="r") == list(range(10))
    assert at_once[1] == 2, "two estimates fit at a time"
    assert used(machine, "r") == (0.40, 0, 10)
    assert machine.replay("r").differences == []


async def test_many_steps_that_wait_for_room_are_not_all_asked_again_each_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    lack = Budgets.lack
    monkeypatch.setattr(Budgets, "lack", lambda one, call: (asked.append(call.call), lack(one, call))[1])

    @step(effect="read", cost=lambda number: {"usd": 0.50 if number % 100 else 0.60})
    async def cheap(number: int) -> int:
        everstep.charge(usd=0.000_1)
        return number

    @workflow(budget=Budget(usd=5.60, then="fail"))
    async def flow() -> int:
        return sum(await asyncio.gather(*(cheap(number) for number in range(1_000))))

    app = await machine.boot()
    assert await app.run(flow, id="r") == 499_500
    assert len(asked) < 5_000, "each a few times"
    assert used(machine, "r") == (0.10, 0, 1_000)


async def test_a_step_that_waits_for_room_goes_on_waiting_in_the_next_process(machine: Machine) -> None:
    gate = Gate()

    @step(effect="once", cost={"usd": 0.80}, probe=lambda key: NotDone())
    async def pay() -> str:
        await gate.wait()
        everstep.charge(usd=0.10)
        return "paid"

    @step(effect="once", cost={"usd": 0.50})
    async def also() -> str:
        return "also"

    @workflow(budget=Budget(usd=1))
    async def tight() -> list[str]:
        return await asyncio.gather(pay(), also())

    first, _ = await machine.start(tight, id="r")
    await gate.reached.wait()
    await machine.until(lambda: machine.kinds("r", "call_withheld"))
    await machine.kill(first)
    gate.opened.set()
    second, run = await machine.start(tight, id="r")
    assert (await held(machine, run, "budget")).step.endswith("also"), "what was cut off stays charged"
    assert machine.kinds("r", "step_doubted") == ["step_doubted"], "only of the one that was begun"
    await machine.until(lambda: not second.threads.is_acting("r", -1))  # else its probe is asked again a second later
    await second.resolve("r", "accept")
    assert (await held(machine, run, "budget")).step.endswith("pay"), "there is no room for another attempt either"
    await second.resolve("r", "accept")
    assert await run.result(timeout=60) == ["paid", "also"]
    assert [one.attempt for one in machine.bodies("r", "step_started")] == [1, 1, 2]


async def test_a_step_that_waits_for_room_can_be_given_up(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read", cost={"usd": 0.80})
    async def slow() -> str:
        await gate.wait()
        return "slow"

    @step(effect="once", cost={"usd": 0.80})
    async def pay() -> str:
        NOTES.append("paid")
        return "paid"

    @workflow(budget=Budget(usd=1))
    async def flow() -> str:
        begun = asyncio.ensure_future(slow())
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                await pay()
        except TimeoutError:
            NOTES.append("gave up")
        return await begun

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.until(lambda: machine.kinds("r", "timer_started"))
    machine.clock.advance(10)
    await machine.until(lambda: NOTES)
    gate.opened.set()
    assert await run.result(timeout=60) == "slow"
    assert NOTES == ["gave up"]
    assert machine.replay("r").differences == []


# -- estimates --------------------------------------------------------------------------------------------------------
async def test_an_estimate_may_be_a_function_of_the_arguments(machine: Machine) -> None:
    @step(effect="read", cost=lambda text, *, dear=False: {"tokens": len(text) * (10 if dear else 1)})
    async def count(text: str, *, dear: bool = False) -> int:
        return len(text)

    @workflow(budget=Budget(tokens=100, then="fail"))
    async def flow() -> list[str]:
        told = [str(await count("x" * 20)), str(await count("x" * 5, dear=True))]
        try:
            await count("x" * 31)
        except BudgetExceeded as error:
            told.append(error.over)
        return told

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["20", "5", "tokens"]
    assert [one.cost.tokens for one in machine.bodies("r", "step_started")] == [20, 50]


async def test_an_estimate_that_raises_is_the_steps_failure(machine: Machine) -> None:
    @step(effect="once", cost=lambda: {"usd": 1 / 0})
    async def broken() -> None:
        NOTES.append("begun")

    @step(effect="read", cost=lambda: {"dollars": 1})
    async def wrong() -> None:
        NOTES.append("begun")

    @workflow(budget=Budget(usd=1))
    async def flow() -> list[str]:
        found = await asyncio.gather(broken(), wrong(), return_exceptions=True)
        return [type(one).__name__ for one in found]

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["ZeroDivisionError", "Misuse"]
    assert NOTES == []
    assert machine.replay("r").differences == []


async def test_a_step_that_says_it_costs_nothing_must_not_be_charged(machine: Machine) -> None:
    @step(effect="read", cost={})
    async def liar() -> None:
        everstep.charge(usd=0.10)

    @workflow(budget=Budget(usd=1))
    async def flow() -> None:
        await liar()

    app = await machine.boot()
    with pytest.raises(Misuse, match=r"a step with cost=\{\} must not use anything"):
        await app.run(flow, id="r")
    assert used(machine, "r")[0] == 0.10


async def test_our_own_steps_cost_nothing(machine: Machine) -> None:
    path = machine.folder / "report.txt"

    @workflow(budget=Budget(usd=0.10, then="fail"))
    async def flow() -> None:
        everstep.charge(usd=5)
        await everstep.files.write(path, "all that was found")

    app = await machine.boot()
    await app.run(flow, id="r")
    assert path.read_text() == "all that was found"
