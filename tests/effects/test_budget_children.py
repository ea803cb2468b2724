"""Budgets of a tree of runs: a child takes an allotment at its start, and what it did not use comes back at its end."""

import asyncio
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Budget, BudgetExceeded, step, workflow
from everstep.errors import IdConflict, RunCancelled, RunHeld
from tests.effects.spending import charged_in
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.ledger import GATES, NOTES, act


@step(effect="read", cost={"usd": 0.50})
async def ask(name: str) -> str:
    """Estimated at 50 cents, and costs 30."""
    await act(name)
    everstep.charge(usd=0.30)
    return name


@workflow
async def asking(name: str, count: int) -> int:
    for _ in range(count):
        await ask(name)
    return count


@workflow(budget=Budget(usd=1.00, then="fail"))
async def asking_within_a_dollar(name: str, count: int) -> int:
    done = 0
    try:
        while done < count:
            await ask(name)
            done += 1
    except BudgetExceeded:
        pass
    return done


def standing(machine: Machine, run: str) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.json.decode(machine.row(run).budget or b"{}")
    return facts


def spent(machine: Machine, run: str) -> float:
    """Return the dollars that a run's row and its history agree on."""
    told = standing(machine, run)["used"].get("microdollars", 0) / 1_000_000
    assert told == charged_in(machine.events(run))[0]
    return float(told)


async def held(machine: Machine, run: str) -> Any:
    await machine.until_status(run, "held")
    hold = machine.hold(run)
    assert hold.reason == "budget"
    return hold


# -- allotments --------------------------------------------------------------------------------------------------------
async def test_a_child_takes_its_own_budget_and_the_rest_comes_back(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[Any]:
        child = await everstep.start(asking_within_a_dollar, "a", 2)
        while_it_runs = everstep.budget().left.usd
        done = await child.result()
        return [done, while_it_runs, everstep.budget().left.usd]

    app = await machine.boot()
    assert await app.run(parent, id="p") == [2, 5.0, 4.4], (
        "what is reserved is not in the history yet when it is asked for"
    )
    (started,), (ended,) = machine.bodies("p", "child_started"), machine.bodies("p", "child_ended")
    assert (started.allotted.microdollars, started.allotted.then, started.allotted.by) == (1_000_000, "fail", "p")
    assert ended.used.microdollars == 600_000
    assert machine.bodies("p.1", "run_started")[0].budget == started.allotted
    assert spent(machine, "p") == spent(machine, "p.1") == 0.60
    assert machine.replay("p").differences == []


async def test_a_child_gets_no_more_than_its_parent_has_left(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1.30))
    async def parent() -> list[int]:
        await ask("mine")
        await ask("mine")
        return [await asking_within_a_dollar("a", 9), await asking_within_a_dollar("b", 9)]

    app = await machine.boot()
    assert await app.run(parent, id="p") == [1, 0]
    allotted = [one.allotted.microdollars for one in machine.bodies("p", "child_started")]
    assert allotted == [700_000, 400_000]
    assert spent(machine, "p") == 0.90


async def test_a_child_without_a_budget_takes_what_is_left_and_does_as_its_parent_does(machine: Machine) -> None:
    @workflow(budget=Budget(usd=1.40, tokens=10, then="fail"))
    async def parent() -> str:
        await ask("mine")
        try:
            await asking("a", 9)
        except BudgetExceeded as error:
            return f"{error.over} {error.limit} {everstep.budget().left.usd}"
        return "?"

    app = await machine.boot()
    assert await app.run(parent, id="p") == "usd 1.1 0.2"
    assert spent(machine, "p") == 1.20
    assert spent(machine, "p.2") == 0.90
    assert machine.replay("p").differences == []


async def test_two_children_at_once_cannot_both_take_all_that_is_left(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[str]:
        found = await asyncio.gather(asking("a", 1), asking("b", 1), return_exceptions=True)
        return [str(one) for one in found]

    app = await machine.boot()
    one, two = await app.run(parent, id="p")
    assert one == "1"
    assert two.startswith("Two child runs at once would both take what is left of the usd in the budget.")
    assert "with everstep.budget(usd=…):" in two
    assert NOTES == ["a"]
    assert machine.replay("p").differences == []


async def test_one_after_the_other_each_takes_what_is_left(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[int]:
        return [await asking(name, 1) for name in "abc"]

    app = await machine.boot()
    assert await app.run(parent, id="p") == [1, 1, 1]
    assert [one.allotted.microdollars for one in machine.bodies("p", "child_started")] == [
        5_000_000,
        4_700_000,
        4_400_000,
    ]


async def test_children_at_once_each_with_a_part_of_the_budget(machine: Machine) -> None:
    @workflow(budget=Budget(usd=2.50, then="fail"))
    async def parent() -> list[str]:
        async def lane(name: str) -> str:
            with everstep.budget(usd=0.80):
                try:
                    return str(await asking(name, 9))
                except BudgetExceeded as error:
                    return f"{name} {error.limit}"

        return await asyncio.gather(*(lane(name) for name in "abc"))

    app = await machine.boot()
    assert await app.run(parent, id="p") == ["a 0.8", "b 0.8", "c 0.8"]
    assert sorted(NOTES) == ["a", "a", "b", "b", "c", "c"]
    assert spent(machine, "p") == 1.80
    assert machine.replay("p").differences == []


async def test_a_tree_keeps_within_the_limit_of_its_root(machine: Machine) -> None:
    """Every node asks until it is stopped. Nothing is under way when a limit is met, so none is crossed."""

    @workflow
    async def node(depth: int) -> int:
        done = 0
        try:
            for _ in range(2):
                await ask(f"depth {depth}")
                done += 1
            if depth:
                done += await node(depth - 1)
                done += await node(depth - 1)
        except BudgetExceeded:
            pass
        return done

    @workflow(budget=Budget(usd=3.10, then="fail"))
    async def root() -> int:
        return await node(3)

    app = await machine.boot()
    assert await app.run(root, id="p") == len(NOTES) == 9, "of the thirty that they would like to ask"
    assert spent(machine, "p") == 2.70
    assert charged_in(machine.events("p.1"))[0] == 2.70


async def test_steps_and_time_are_allotted_too(machine: Machine) -> None:
    @workflow(budget=Budget(steps=3, seconds=60, then="fail"))
    async def parent() -> str:
        await ask("mine")
        await asyncio.sleep(20)
        try:
            await asking("a", 9)
        except BudgetExceeded as error:
            return f"{error.over} {error.limit:g}"
        return "?"

    _, run = await machine.start(parent, id="p")
    await machine.rest()
    await machine.advance(20)
    assert await run.result(timeout=60) == "steps 2"
    (started,) = machine.bodies("p", "child_started")
    assert (started.allotted.steps, started.allotted.seconds) == (2, 40.0)
    assert standing(machine, "p")["used"]["steps"] == 3


# -- waiting for room --------------------------------------------------------------------------------------------------
async def test_a_step_waits_while_a_child_may_give_something_back(machine: Machine) -> None:
    GATES["a"] = Gate()

    @workflow(budget=Budget(usd=1, then="fail"))
    async def parent() -> str:
        child = await everstep.start(asking, "a", 1)
        answer = await ask("mine")
        await child.result()
        return answer

    _, run = await machine.start(parent, id="p")
    await GATES["a"].reached.wait()
    await machine.until(lambda: machine.kinds("p", "call_withheld"))
    assert NOTES == ["a"]
    GATES["a"].opened.set()
    assert await run.result(timeout=60) == "mine"
    assert machine.kinds("p") == [
        "run_started",
        "child_started",
        "call_withheld",
        "child_ended",
        "step_started",
        "step_completed",
        "run_completed",
    ]
    assert machine.replay("p").differences == []


@pytest.mark.parametrize("killed", [False, True])
async def test_a_child_waits_while_a_step_may_give_something_back(machine: Machine, killed: bool) -> None:
    GATES["mine"] = Gate()

    @workflow(budget=Budget(usd=0.50, then="fail"))
    async def parent() -> list[Any]:
        begun = asyncio.ensure_future(ask("mine"))
        await asyncio.sleep(0)
        return [await asking_within_a_dollar("a", 0), await begun]

    app, run = await machine.start(parent, id="p")
    await GATES["mine"].reached.wait()
    await machine.until(lambda: machine.kinds("p", "call_withheld"))
    assert machine.store.children("p") == [], "it is not even started"
    if killed:
        await machine.kill(app)
        app, run = await machine.start(parent, id="p")
    GATES["mine"].opened.set()
    if killed:
        with pytest.raises(BudgetExceeded):  # the attempt that was cut off stays charged
            await run.result(timeout=60)
        return
    assert await run.result(timeout=60) == [0, "mine"]
    (started,) = machine.bodies("p", "child_started")
    assert started.withheld
    assert started.allotted.microdollars == 200_000
    assert machine.replay("p").differences == []


async def test_a_child_that_waits_for_room_can_be_given_up(machine: Machine) -> None:
    GATES["mine"] = Gate()

    @workflow(budget=Budget(usd=0.50))
    async def parent() -> list[Any]:
        begun = asyncio.ensure_future(ask("mine"))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                await asking("a", 1)
        except TimeoutError:
            NOTES.append("gave up")
        return [await begun]

    _, run = await machine.start(parent, id="p")
    await GATES["mine"].reached.wait()
    await machine.until(lambda: machine.kinds("p", "timer_started"))
    machine.clock.advance(10)
    await machine.until(lambda: machine.kinds("p", "child_ended"))
    GATES["mine"].opened.set()
    assert await run.result(timeout=60) == ["mine"]
    assert machine.store.run("p.2") is None
    assert NOTES == ["mine", "gave up"]
    assert machine.replay("p").differences == []


async def test_a_child_that_waits_for_room_and_is_cancelled_by_its_handle_never_begins(machine: Machine) -> None:
    GATES["mine"] = Gate()

    @workflow(budget=Budget(usd=0.50))
    async def parent() -> list[Any]:
        begun = asyncio.ensure_future(ask("mine"))
        await asyncio.sleep(0)
        child = await everstep.start(asking, "a", 1, id="child")
        await everstep.receive("stop")
        child.cancel()
        try:
            return [await child.result()]
        except RunCancelled:
            return ["cancelled", begun.cancel()]

    _, run = await machine.start(parent, id="p")
    await GATES["mine"].reached.wait()
    await machine.until(lambda: machine.kinds("p", "call_withheld"))
    await run.signal("stop", None)
    assert await run.result(timeout=60) == ["cancelled", True]
    assert machine.store.run("child") is None
    assert machine.replay("p").differences == []


# -- crashes -----------------------------------------------------------------------------------------------------------
async def test_a_killed_tree_goes_on_with_what_it_has_left(machine: Machine) -> None:
    GATES["a"] = Gate()

    @workflow(budget=Budget(usd=2, then="fail"))
    async def parent() -> list[int]:
        return [await asking_within_a_dollar(name, 9) for name in "ab"]

    first, _ = await machine.start(parent, id="p")
    await GATES["a"].reached.wait()
    await machine.until(lambda: machine.kinds("p.1", "step_started"))
    await machine.kill(first)
    GATES["a"].opened.set()
    second = await machine.boot()
    assert await second.run(parent, id="p") == [1, 2], "the attempt that was cut off is charged at its estimate"
    assert spent(machine, "p.1") == 0.80
    assert spent(machine, "p") == 1.40
    assert len(machine.kinds("p", "child_started")) == 2
    assert machine.replay("p").differences == []


async def test_a_parent_that_was_dead_when_its_child_ended_is_told_what_it_used(machine: Machine) -> None:
    @workflow(budget=Budget(usd=2))
    async def parent() -> float | None:
        await asking_within_a_dollar("a", 2)
        await everstep.receive("go")
        return everstep.budget().left.usd

    GATES["a"] = Gate()
    first, _ = await machine.start(parent, id="p")
    await GATES["a"].reached.wait()
    await machine.until(lambda: machine.kinds("p.1", "step_started"))
    await machine.kill(first)
    GATES["a"].opened.set()
    second = await machine.boot()
    assert await second.run(asking_within_a_dollar, "a", 2, id="p.1") == 1, "nobody drives its parent"
    assert "child_ended" not in machine.kinds("p")
    await machine.kill(second)
    _, run = await machine.start(parent, id="p")
    await run.signal("go")
    assert await run.result(timeout=60) == 1.2


async def test_a_cancelled_child_tells_what_it_used(machine: Machine) -> None:
    """It ends without its code, and the attempt that was under way is charged at its estimate."""
    GATES["a"] = Gate()

    @workflow(budget=Budget(usd=2))
    async def parent() -> float | None:
        try:
            await asking_within_a_dollar("a", 9)
        except RunCancelled:
            pass
        return everstep.budget().left.usd

    app, run = await machine.start(parent, id="p")
    await GATES["a"].reached.wait()
    await machine.until(lambda: machine.kinds("p.1", "step_started"))
    await app.cancel("p.1", now=True)
    assert await run.result(timeout=60) == 1.5
    assert spent(machine, "p") == 0.50


async def test_a_child_that_is_cancelled_while_it_is_held_tells_what_it_used(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.70))
    async def parent() -> float | None:
        try:
            await asking("a", 9)
        except RunCancelled:
            pass
        return everstep.budget().left.usd

    app, run = await machine.start(parent, id="p")
    await held(machine, "p.1")
    await app.resolve("p.1", "cancel")
    assert await run.result(timeout=60) == 0.4
    assert spent(machine, "p") == 0.30


async def test_what_children_have_when_their_parent_ends_counts_as_used(machine: Machine) -> None:
    GATES["a"] = Gate()

    @workflow(on_parent_end="abandon")
    async def on_its_own() -> None:
        await ask("a")

    @workflow
    async def middle() -> None:
        with everstep.budget(usd=0.90):
            await everstep.start(on_its_own)

    @workflow(budget=Budget(usd=5))
    async def root() -> float | None:
        await middle()
        return everstep.budget().left.usd

    app = await machine.boot()
    assert await app.run(root, id="p") == 4.1, "nobody will tell the root what the abandoned one does with it"
    GATES["a"].opened.set()
    await machine.until(lambda: not machine.store.children("p.1")[0].status.startswith(("run", "wait", "queue")))


# -- persons -----------------------------------------------------------------------------------------------------------
async def test_what_a_person_grants_a_child_is_not_taken_from_its_parent(machine: Machine) -> None:
    @workflow(budget=Budget(usd=2.00))
    async def parent() -> list[float | None]:
        with everstep.budget(usd=0.70):
            await asking("a", 3)
        return [everstep.budget().left.usd]

    app, run = await machine.start(parent, id="p")
    hold = await held(machine, "p.2")
    assert hold.step == "ask#2"
    await app.resolve("p.2", "accept", by="ann")
    assert await run.result(timeout=60) == [1.3], "0.90 were used: 0.70 of its own, and 0.20 of what was granted"
    (ended,) = machine.bodies("p", "child_ended")
    assert (ended.used.microdollars, ended.granted.microdollars) == (900_000, 700_000)
    assert standing(machine, "p")["limits"]["microdollars"] == 2_200_000
    assert standing(machine, "p")["granted"]["microdollars"] == 200_000
    assert machine.replay("p").differences == []


async def test_a_child_that_got_nothing_can_be_granted_what_its_workflow_declares(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.60))
    async def needy() -> str:
        return await ask("needy")

    @workflow(budget=Budget(usd=0.20))
    async def parent() -> str:
        everstep.charge(usd=0.20)
        return await needy()

    app, run = await machine.start(parent, id="p")
    await held(machine, "p.2")
    assert machine.report("p.2")["limits"] == {"usd": 0.0}
    await app.resolve("p.2", "accept")
    assert await run.result(timeout=60) == "needy"


# -- others' children --------------------------------------------------------------------------------------------------
async def test_a_run_that_somebody_else_started_is_not_charged(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[Any]:
        child = await everstep.start(asking_within_a_dollar, "a", 2, id="shared")
        return [await child.result(), everstep.budget().left.usd]

    app = await machine.boot()
    assert await app.run(asking_within_a_dollar, "a", 2, id="shared") == 2
    assert await app.run(parent, id="p") == [2, 5.0]
    assert spent(machine, "shared") == 0.60


async def test_the_allotment_of_a_child_that_could_not_be_started_comes_back(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[Any]:
        try:
            await (await everstep.start(asking, "a", 2, id="taken")).result()
        except IdConflict:
            return ["conflict", everstep.budget().left.usd]
        return []

    app = await machine.boot()
    await app.run(asking, "b", 0, id="taken")
    assert await app.run(parent, id="p") == ["conflict", 5.0]


async def test_one_child_asked_for_twice_is_paid_once(machine: Machine) -> None:
    @workflow(budget=Budget(usd=5))
    async def parent() -> list[Any]:
        first = await everstep.start(asking_within_a_dollar, "a", 2, id="c")
        second = await everstep.start(asking_within_a_dollar, "a", 2, id="c")
        return [await first.result(), await second.result(), everstep.budget().left.usd]

    app = await machine.boot()
    assert await app.run(parent, id="p") == [2, 2, 4.4]
    assert spent(machine, "c") == 0.60
    assert standing(machine, "p")["used"]["microdollars"] == 600_000


# -- retry -------------------------------------------------------------------------------------------------------------
async def test_a_retried_child_goes_on_with_its_allotment_and_is_not_paid_twice(machine: Machine) -> None:
    broken = [True]

    @workflow(budget=Budget(usd=1.00, then="fail"))
    async def fragile() -> str:
        await ask("before")
        if broken[0]:
            raise LookupError("not yet")
        return await ask("after")

    @workflow(budget=Budget(usd=5))
    async def parent() -> list[Any]:
        return [await fragile(), everstep.budget().left.usd]

    app, run = await machine.start(parent, id="p")
    with pytest.raises(LookupError):
        await run.result(timeout=60)
    assert spent(machine, "p") == 0.30
    broken[0] = False
    await app.retry("p")
    assert await run.result(timeout=60) == ["after", 4.4]
    assert NOTES == ["before", "after"]
    assert standing(machine, "p")["used"]["microdollars"] == 600_000
    assert standing(machine, "p.1")["used"]["microdollars"] == 600_000
    assert machine.replay("p").differences == []


async def test_a_child_outside_of_any_budget_has_its_own(machine: Machine) -> None:
    @workflow
    async def parent() -> int:
        return await asking_within_a_dollar("a", 9)

    app = await machine.boot()
    assert await app.run(parent, id="p") == 2
    assert machine.row("p").budget is None
    assert spent(machine, "p.1") == 0.60
    assert machine.bodies("p.1", "run_started")[0].budget.by == ""


async def test_a_held_child_leaves_its_parent_waiting(machine: Machine) -> None:
    @workflow(budget=Budget(usd=0.20))
    async def parent() -> int:
        return await asking("a", 1)

    app, run = await machine.start(parent, id="p")
    await held(machine, "p.1")
    assert machine.status("p") == "waiting"
    with pytest.raises(RunHeld):
        await app.get("p.1").result(timeout=60)
    await app.resolve("p.1", "skip", value="by hand")
    assert await run.result(timeout=60) == 1


async def test_a_child_that_is_cancelled_while_it_is_held_wakes_its_parent(machine: Machine) -> None:
    @workflow
    async def patient() -> None:
        await everstep.receive("never")

    @workflow
    async def parent() -> str:
        try:
            await patient()
        except RunCancelled:
            return "told"
        return "?"

    app, run = await machine.start(parent, id="p")
    await machine.until_status("p.1", "waiting")
    await machine.rest()
    await app.hold("p.1")
    await app.resolve("p.1", "cancel")
    assert await run.result(timeout=60) == "told"
