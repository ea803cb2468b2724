"""Budgets of one run: what is reserved, charged, stopped, granted; and that a crash or a retry gives nothing back."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from decimal import Decimal
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Budget, BudgetExceeded, NotDone, Retry, step, workflow
from everstep.engine.run.budget import Budgets
from everstep.errors import Misuse, RunCancelled, RunHeld
from everstep.model.budgets import microdollars, nanodollars
from everstep.model.events import decode_body
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import NOTES


@step(effect="read", cost={"usd": 0.50, "tokens": 100}, fallback="a cheap answer")
async def ask(question: str) -> str:
    """Estimated at 50 cents, and costs 30."""
    NOTES.append(question)
    everstep.charge(usd=0.30, tokens=60)
    return f"about {question}"


@step(effect="read")
async def ask_unknown(question: str) -> str:
    """Without an estimate; costs 30 cents."""
    NOTES.append(question)
    everstep.charge(usd=0.30)
    return f"about {question}"


@step(cost={})
async def save(text: str) -> str:
    NOTES.append(f"saved {text}")
    return text


async def held(machine: Machine, run: Any) -> Any:
    """Return the hold in which a run ends up."""
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold(run.id)
    assert hold.reason == "budget"
    return hold


def used(machine: Machine, run: str) -> tuple[float, int, int]:
    """Return what the run's row says was used; the events must say the same."""
    row = msgspec.json.decode(machine.row(run).budget or b"{}")["used"]
    told = (row.get("microdollars", 0) / 1_000_000, row.get("tokens", 0), row.get("steps", 0))
    if machine.status(run) in ("completed", "failed", "cancelled"):
        assert told == charged_in(machine.events(run))
    return told


# -- reserving and charging --------------------------------------------------------------------------------------------
async def test_an_estimate_is_in_the_intent_and_the_real_figure_in_the_outcome(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def flow() -> str:
        return await ask("tides")

    app = await machine.boot()
    assert await app.run(flow, id="r") == "about tides"
    (started,), (completed,) = machine.bodies("r", "step_started"), machine.bodies("r", "step_completed")
    assert (started.cost.microdollars, started.cost.tokens) == (500_000, 100)
    assert (completed.charged.microdollars, completed.charged.tokens) == (300_000, 60)
    assert machine.bodies("r", "run_started")[0].budget.microdollars == 5_000_000
    assert used(machine, "r") == (0.30, 60, 1)


async def test_a_repeat_body_starts_when_its_estimate_is_on_disk(machine: Machine) -> None:
    seen: list[bool] = []

    @step(cost={"usd": 0.25})
    async def pay() -> None:
        started = [decode_body(e.kind, e.body) for e in machine.events("r") if e.kind == "step_started"]
        seen.append(started[0].cost.microdollars == 250_000)

    @workflow(budget=Budget(usd=1))
    async def flow() -> None:
        await pay()

    app = await machine.boot()
    await app.run(flow, id="r")
    assert seen == [True]


async def test_the_outcome_of_a_step_with_a_cost_is_on_disk_before_the_code_sees_it(machine: Machine) -> None:
    @workflow
    async def flow() -> list[str]:
        await ask("tides")
        return [event.kind for event in machine.events("r")]

    app = await machine.boot()
    assert machine.store.run("r") is None  # it is open now, for the code may not open it
    assert "step_completed" in await app.run(flow, id="r")


async def test_what_a_body_does_not_charge_stays_as_estimated(machine: Machine) -> None:
    @step(effect="read", cost={"usd": 0.50, "tokens": 100})
    async def odd(charge: dict[str, float]) -> None:
        if charge:
            everstep.charge(**charge)  # type: ignore[arg-type]

    @workflow(budget=Budget(usd=5))
    async def flow(charge: dict[str, float]) -> None:
        await odd(charge)

    app = await machine.boot()
    for number, (charge, expected) in enumerate(
        [({}, (0.50, 100, 1)), ({"tokens": 7}, (0.50, 7, 1)), ({"usd": 0}, (0.0, 100, 1)), ({"usd": 2}, (2.0, 100, 1))]
    ):
        await app.run(flow, charge, id=f"r{number}")
        assert used(machine, f"r{number}") == expected


async def test_failed_attempts_are_charged_and_a_retry_refunds_nothing(machine: Machine) -> None:
    @step(effect="read", cost={"usd": 0.50}, retry=Retry(attempts=3, first=1, factor=1, jitter=0))
    async def flaky() -> None:
        if everstep.current().attempt == 2:
            everstep.charge(usd=0.10)
        raise ConnectionError

    @workflow(budget=Budget(usd=5))
    async def flow() -> None:
        await flaky()

    app, run = await machine.start(flow, id="r")
    for _ in range(3):
        await machine.rest()
        await machine.advance(1)
    with pytest.raises(ConnectionError):
        await run.result()
    assert used(machine, "r") == (1.10, 0, 3), "two whole estimates, and what the second attempt was charged"
    await app.retry("r")
    for _ in range(3):
        await machine.rest()
        await machine.advance(1)
    with pytest.raises(ConnectionError):
        await run.result()
    assert used(machine, "r") == (2.60, 0, 6), "three whole estimates more: none of them is the second attempt"


async def test_an_attempt_that_a_crash_cut_off_stays_charged(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read", cost={"usd": 0.50})
    async def slow() -> None:
        everstep.charge(usd=0.10)
        await gate.wait()

    @workflow(budget=Budget(usd=5))
    async def flow() -> None:
        await slow()

    first, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.until(lambda: machine.kinds("r", "step_started"))
    await machine.kill(first)
    gate.opened.set()
    second = await machine.boot()
    await second.run(flow, id="r")
    assert used(machine, "r") == (0.60, 0, 2), "the estimate of the first attempt, and the charge of the second"


async def test_a_charge_beyond_the_estimate_is_on_disk_while_the_body_runs(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read", cost={"usd": 0.50})
    async def dear() -> None:
        everstep.charge(usd=0.40)
        everstep.charge(usd=0.40)
        await gate.wait()

    @workflow(budget=Budget(usd=5))
    async def flow() -> None:
        await dear()

    first, _ = await machine.start(flow, id="r")
    await machine.until(lambda: machine.kinds("r", "attempt_charged"))
    await machine.kill(first)
    assert charged_in(machine.events("r")) == (0.80, 0, 1)
    gate.opened.set()
    second = await machine.boot()
    await second.run(flow, id="r")
    assert used(machine, "r") == (1.60, 0, 2)


async def test_what_a_stopped_process_cuts_off_is_charged(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read")
    async def unknown() -> None:
        everstep.charge(usd=0.10)
        await gate.wait()

    @workflow
    async def flow() -> None:
        await unknown()

    first, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.stop(first)
    assert charged_in(machine.events("r")) == (0.10, 0, 1), "also without a budget"


async def test_a_step_that_the_code_gives_up_keeps_what_it_was_charged(machine: Machine) -> None:
    gate = Gate()

    @step(effect="read", cost={"usd": 0.50})
    async def endless() -> None:
        everstep.charge(usd=0.70)
        await gate.wait()

    @workflow(budget=Budget(usd=5))
    async def flow() -> str:
        try:
            async with asyncio.timeout(10):
                await endless()
        except TimeoutError:
            return "gave up"
        return "?"

    _, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.until(lambda: machine.status("r") in ("running", "waiting") and len(machine.events("r")) > 2)
    machine.clock.advance(10)
    assert await run.result(timeout=60) == "gave up"
    assert used(machine, "r") == (0.70, 0, 1)


# -- threads -----------------------------------------------------------------------------------------------------------
async def test_charges_from_many_threads_add_up_exactly(machine: Machine) -> None:
    def charge_often() -> None:
        for _ in range(500):
            everstep.charge(usd=0.000_1, tokens=3)

    @step(effect="read", cost={"usd": 2})
    def busy() -> None:
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(copy_context().run, charge_often) for _ in range(8)]:
                future.result()

    @step(effect="read", cost={"usd": 2})
    async def busy_too() -> None:
        await asyncio.gather(*(asyncio.to_thread(charge_often) for _ in range(8)))

    @workflow(budget=Budget(usd=10))
    async def flow() -> None:
        await asyncio.gather(asyncio.to_thread(busy), busy_too())

    app = await machine.boot()
    await app.run(flow, id="r")
    assert used(machine, "r") == (0.80, 24_000, 2)


async def test_a_thread_that_acts_on_after_its_timeout_is_charged_too(machine: Machine) -> None:
    go_on, acted = threading.Event(), threading.Event()

    @step(effect="read", cost={"usd": 0.50}, timeout=0.05)
    def late() -> None:
        go_on.wait(20)
        everstep.charge(usd=0.90)
        acted.set()

    @workflow(budget=Budget(usd=5))
    async def flow() -> str:
        try:
            await asyncio.to_thread(late)
        except TimeoutError:
            pass
        await everstep.receive("go")
        return "done"

    _, run = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    go_on.set()
    await machine.until(lambda: machine.bodies("r", "attempt_charged"))
    await run.signal("go")
    assert await run.result(timeout=60) == "done"
    assert machine.bodies("r", "attempt_charged")[0].beside
    assert used(machine, "r") == (1.40, 0, 1), "nobody can tell how much of it the estimate had covered"


async def test_a_thread_without_the_context_is_refused_so_that_no_charge_is_lost_silently(machine: Machine) -> None:
    @step(effect="read")
    def careless() -> str:
        with ThreadPoolExecutor(1) as pool:
            try:
                pool.submit(everstep.charge, usd=1).result()
            except Misuse:
                return "refused"
        return "?"

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(careless)

    app = await machine.boot()
    assert await app.run(flow) == "refused"


# -- hold --------------------------------------------------------------------------------------------------------------
@workflow(budget=Budget(usd=1.00))
async def holding(count: int) -> list[str]:
    return [await ask(f"question {number}") for number in range(count)]


async def test_at_the_limit_the_run_is_held_with_what_was_used_by_which_steps(machine: Machine) -> None:
    app = await machine.boot()
    hold = await held(machine, await app.start(holding, 5, id="r"))
    assert NOTES == ["question 0", "question 1"], "0.60 are used, and 0.50 more would be 1.10"
    assert hold.step == "ask#3"
    assert hold.summary == (
        "there is no room in its budget for ask#3: 0.6 of 1 usd are used, and it is estimated at 0.5"
    )
    assert hold.resolutions == ["accept", "skip", "cancel"]
    report = machine.report("r")
    assert report["used"] == {"usd": 0.6, "tokens": 120, "steps": 2}
    assert report["limits"] == {"usd": 1.0}
    assert report["by_step"] == {"ask": {"usd": 0.6, "tokens": 120, "steps": 2}}
    assert machine.kinds("r")[-2:] == ["call_withheld", "run_held"]
    assert machine.replay("r").differences == []


async def test_accept_grants_the_same_again_and_says_who_and_why(machine: Machine) -> None:
    app, run = await machine.start(holding, 5, id="r")
    await held(machine, run)
    await app.resolve("r", "accept", note="worth it", by="ann")
    assert await run.result(timeout=60) == [f"about question {number}" for number in range(5)]
    (resolved,) = machine.bodies("r", "run_resolved")
    assert (resolved.resolution, resolved.by, resolved.note) == ("accept", "ann", "worth it")
    assert resolved.granted.microdollars == 1_000_000
    assert used(machine, "r") == (1.50, 300, 5)
    assert machine.bodies("r", "step_started")[2].because == "budget"
    assert machine.replay("r").differences == []


async def test_a_grant_is_used_up_as_well(machine: Machine) -> None:
    app, run = await machine.start(holding, 20, id="r")
    for granted in range(1, 4):
        await held(machine, run)
        assert used(machine, "r")[0] <= granted
        await app.resolve("r", "accept")
    await held(machine, run)
    assert used(machine, "r")[0] == 3.60


async def test_skip_gives_the_step_a_value_and_the_next_one_is_stopped_again(machine: Machine) -> None:
    app, run = await machine.start(holding, 4, id="r")
    await held(machine, run)
    await app.resolve("r", "skip", value="by hand", by="ann")
    assert (await held(machine, run)).step == "ask#4"
    await app.resolve("r", "skip", value="by hand too")
    assert await run.result(timeout=60) == ["about question 0", "about question 1", "by hand", "by hand too"]
    assert machine.replay("r").differences == []


async def test_cancel_ends_a_run_that_is_held_for_its_budget(machine: Machine) -> None:
    app, run = await machine.start(holding, 4, id="r")
    await held(machine, run)
    await app.resolve("r", "cancel")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)


async def test_a_held_run_is_held_in_the_next_process_and_nothing_is_done(machine: Machine) -> None:
    first = await machine.boot()
    await held(machine, await first.start(holding, 5, id="r"))
    await machine.kill(first)
    second = await machine.boot()
    before = machine.dump()["events"]
    await held(machine, await second.start(holding, 5, id="r"))
    assert machine.dump()["events"] == before


async def test_what_is_under_way_comes_to_its_end_before_the_run_is_held(machine: Machine) -> None:
    """Cutting it off would lose what it has cost."""
    gate = Gate()

    @step(effect="read")
    async def slow() -> str:
        await gate.wait()
        return "done"

    @workflow(budget=Budget(usd=0.40))
    async def flow() -> list[str]:
        return await asyncio.gather(slow(), ask("tides"))

    app, run = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.until(lambda: machine.kinds("r", "call_withheld"))
    await asyncio.sleep(0.01)
    assert machine.status("r") != "held"
    gate.opened.set()
    await held(machine, run)
    assert machine.kinds("r")[-2:] == ["step_completed", "run_held"]
    await app.resolve("r", "accept")
    assert await run.result(timeout=60) == ["done", "about tides"]
    assert len(machine.bodies("r", "step_started")) == 2, "nothing was done twice"


# -- fail --------------------------------------------------------------------------------------------------------------
async def test_with_fail_the_step_raises_and_the_code_may_go_on_with_what_costs_nothing(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.55, then="fail"))
    async def flow() -> str:
        found: list[str] = []
        try:
            while True:
                found.append(await ask_unknown(f"question {len(found)}"))
        except BudgetExceeded as error:
            NOTES.append((error.over, error.limit))
        return await save(f"{len(found)} answers")

    app = await machine.boot()
    assert await app.run(flow, id="r") == "2 answers"
    assert NOTES == ["question 0", "question 1", ("usd", 0.55), "saved 2 answers"]
    assert machine.kinds("r", "call_", "step_failed") == ["call_withheld", "step_failed"]
    assert used(machine, "r") == (0.60, 0, 3), "overshot by the step that was under way, and no more"
    assert machine.replay("r").differences == []


async def test_a_failure_that_nobody_handles_fails_the_run_and_a_retry_fails_again(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1.00, then="fail"))
    async def flow() -> list[str]:
        return [await ask(f"question {number}") for number in range(5)]

    app, run = await machine.start(flow, id="r")
    with pytest.raises(BudgetExceeded, match=r"no room in the budget for ask#3: 0\.6 of 1 usd are used") as raised:
        await run.result(timeout=60)
    assert (raised.value.over, raised.value.limit) == ("usd", 1.0)
    await app.retry("r")
    with pytest.raises(BudgetExceeded):
        await run.result(timeout=60)
    assert NOTES == ["question 0", "question 1"]
    assert machine.replay("r").differences == []


async def test_code_that_asks_again_for_ever_leaves_the_loop_free(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.10, then="fail"))
    async def stubborn() -> None:
        while True:
            try:
                await ask("tides")
            except BudgetExceeded:
                pass

    _, run = await machine.start(stubborn, id="r")
    await machine.until(lambda: len(machine.kinds("r", "step_failed")) > 3)
    await run.cancel(now=True)
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    assert NOTES == []


# -- fallback ----------------------------------------------------------------------------------------------------------
async def test_with_fallback_the_body_does_not_run_and_the_history_says_why(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1.00, then="fallback"))
    async def flow() -> list[str]:
        return [await ask(f"question {number}") for number in range(4)]

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["about question 0", "about question 1"] + ["a cheap answer"] * 2
    assert NOTES == ["question 0", "question 1"]
    withheld = machine.bodies("r", "call_withheld")
    assert [(one.over, one.then, one.attempt) for one in withheld] == [("usd", "fallback", 0)] * 2
    assert [one.fallback for one in machine.bodies("r", "step_completed")] == [False, False, True, True]
    assert machine.replay("r").differences == []


async def test_a_step_without_a_fallback_holds_the_run(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.10, then="fallback"))
    async def flow() -> str:
        await ask_unknown("tides")
        return await ask_unknown("moon")

    app = await machine.boot()
    assert (await held(machine, await app.start(flow, id="r"))).step == "ask_unknown#2"


async def test_a_fallback_that_a_crash_cut_off_is_taken_again(machine: Machine) -> None:
    gate = Gate()
    lives: list[int] = []

    async def instead(question: str) -> str:
        lives.append(1)
        await gate.wait()
        return "instead"

    @step(cost={"usd": 5}, fallback=instead)
    async def dear(question: str) -> str:
        raise AssertionError("there is no money for it")

    @workflow(budget=Budget(usd=1, then="fallback"))
    async def flow() -> str:
        return await dear("tides")

    first, _ = await machine.start(flow, id="r")
    await gate.reached.wait()
    await machine.kill(first)
    gate.opened.set()
    second = await machine.boot()
    assert await second.run(flow, id="r") == "instead"
    assert len(lives) == 2
    assert len(machine.kinds("r", "call_withheld")) == 1


async def test_a_fallback_for_which_there_was_no_budget_must_not_use_any(machine: Machine) -> None:
    async def dear_too(question: str) -> str:
        everstep.charge(usd=0.20)
        return "instead"

    @step(effect="read", cost={"usd": 5}, fallback=dear_too)
    async def dear(question: str) -> str:
        raise AssertionError("there is no money for it")

    @workflow(budget=Budget(usd=1, then="fallback"))
    async def flow() -> str:
        return await dear("tides")

    app = await machine.boot()
    with pytest.raises(Misuse, match="the fallback of a step for which there is no budget must not use anything"):
        await app.run(flow, id="r")
    assert used(machine, "r")[0] == 0.20, "what was used is counted all the same"


# -- steps and time ----------------------------------------------------------------------------------------------------
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
    hold = await held(machine, run)
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


# -- workflow code -----------------------------------------------------------------------------------------------------
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


# -- concurrency -------------------------------------------------------------------------------------------------------
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
        await held(machine, run)
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
    assert (await held(machine, run)).step.endswith("also"), "what was cut off stays charged"
    assert machine.kinds("r", "step_doubted") == ["step_doubted"], "only of the one that was begun"
    await machine.until(lambda: not second.threads.is_acting("r", -1))  # else its probe is asked again a second later
    await second.resolve("r", "accept")
    assert (await held(machine, run)).step.endswith("pay"), "there is no room for another attempt either"
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


# -- estimates ---------------------------------------------------------------------------------------------------------
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


# -- restart and no budget ---------------------------------------------------------------------------------------------
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


# -- parts -------------------------------------------------------------------------------------------------------------
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
    await held(machine, run)
    await app.resolve("r", "accept")
    await held(machine, run)
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


# -- mistakes and money ------------------------------------------------------------------------------------------------
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
