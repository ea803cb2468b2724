"""Budgets: estimates are reserved, costs are charged, and what happens when there is no room."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

import everstep
from everstep import Budget, BudgetExceeded, Retry, step, workflow
from everstep.errors import Misuse, RunCancelled
from everstep.model.events import decode_body
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.calls import ask, ask_unknown, save, used
from tests.worlds.judging import held
from tests.worlds.ledger import NOTES


# -- reserving and charging -------------------------------------------------------------------------------------------
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


# -- threads ----------------------------------------------------------------------------------------------------------
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


# -- hold -------------------------------------------------------------------------------------------------------------
@workflow(budget=Budget(usd=1.00))
async def holding(count: int) -> list[str]:
    return [await ask(f"question {number}") for number in range(count)]


async def test_at_the_limit_the_run_is_held_with_what_was_used_by_which_steps(machine: Machine) -> None:
    app = await machine.boot()
    hold = await held(machine, await app.start(holding, 5, id="r"), "budget")
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
    await held(machine, run, "budget")
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
        await held(machine, run, "budget")
        assert used(machine, "r")[0] <= granted
        await app.resolve("r", "accept")
    await held(machine, run, "budget")
    assert used(machine, "r")[0] == 3.60


async def test_skip_gives_the_step_a_value_and_the_next_one_is_stopped_again(machine: Machine) -> None:
    app, run = await machine.start(holding, 4, id="r")
    await held(machine, run, "budget")
    await app.resolve("r", "skip", value="by hand", by="ann")
    assert (await held(machine, run, "budget")).step == "ask#4"
    await app.resolve("r", "skip", value="by hand too")
    assert await run.result(timeout=60) == ["about question 0", "about question 1", "by hand", "by hand too"]
    assert machine.replay("r").differences == []


async def test_cancel_ends_a_run_that_is_held_for_its_budget(machine: Machine) -> None:
    app, run = await machine.start(holding, 4, id="r")
    await held(machine, run, "budget")
    await app.resolve("r", "cancel")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)


async def test_a_held_run_is_held_in_the_next_process_and_nothing_is_done(machine: Machine) -> None:
    first = await machine.boot()
    await held(machine, await first.start(holding, 5, id="r"), "budget")
    await machine.kill(first)
    second = await machine.boot()
    before = machine.dump()["events"]
    await held(machine, await second.start(holding, 5, id="r"), "budget")
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
    await held(machine, run, "budget")
    assert machine.kinds("r")[-2:] == ["step_completed", "run_held"]
    await app.resolve("r", "accept")
    assert await run.result(timeout=60) == ["done", "about tides"]
    assert len(machine.bodies("r", "step_started")) == 2, "nothing was done twice"


# -- fail -------------------------------------------------------------------------------------------------------------
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


# -- fallback ---------------------------------------------------------------------------------------------------------
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
    assert (await held(machine, await app.start(flow, id="r"), "budget")).step == "ask_unknown#2"


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
