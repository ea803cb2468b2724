"""Checkpoints: where a long run goes on, which calls are recorded, and what must not be under way."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.code import checkpoints
from everstep.errors import Misuse, NotEncodable
from tests.engine.checkpoint_helpers import KeepingStore
from tests.engine.resume_helpers import Gate, Machine
from tests.worlds.judging import killed_at, sound
from tests.worlds.ledger import GATES, NOTES
from tests.worlds.sums import Sum, add, peek, summing, taken


@step
def add_plainly(number: int) -> int:
    NOTES.append(f"add {number}")
    return number


@workflow
def summing_plainly(numbers: list[int]) -> int:
    state = Sum(numbers)
    while state.todo:
        state = blocking.checkpoint(state)
        if len(state.todo) == 2:
            blocking.receive("go")
        state.total += add_plainly(state.todo.pop(0))
    return state.total


# -- going on ---------------------------------------------------------------------------------------------------------
async def test_a_run_goes_on_from_its_newest_checkpoint_and_does_nothing_twice(machine: Machine) -> None:
    await killed_at(machine, "add 7", summing, list(range(10)))
    assert len(taken(machine)) == 8, "the first, and one after each effect"
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == sum(range(10))
    assert NOTES == ["add 7", "add 8", "add 9"], "neither the steps before the loop nor those in it are done again"
    assert "checkpoint_damaged" not in machine.kinds("r")
    sound(machine)


async def test_what_lies_before_the_checkpoint_is_not_even_read(machine: Machine) -> None:
    store = KeepingStore(clock=machine.clock.now)
    GATES["add 7"] = Gate()
    app = await machine.boot(store=store)
    await app.start(summing, list(range(10)), id="r")
    await GATES["add 7"].reached.wait()
    driver = app.drivers["r"]
    await machine.until(lambda: driver.writer.all_is_durable)
    first, *_, newest = [event.seq for event in store.events("r", 1) if event.kind == "checkpoint_taken"]
    store.read.clear()
    app.take_again(driver)
    GATES.clear()
    assert await app.get("r").result(timeout=60) == sum(range(10))
    read = set(store.read)
    assert read, "it was taken up again"
    assert not read & set(range(first + 1, newest)), "only what leads to the first and what follows the newest"
    assert {*range(1, first + 1), newest} <= read


async def test_damage_in_what_is_not_read_is_found_by_verify_and_does_not_stop_the_run(machine: Machine) -> None:
    await killed_at(machine, "add 7", summing, list(range(10)))
    first, second, *_ = taken(machine)
    machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 'r' AND seq = ?", (first + second) // 2)
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == sum(range(10))
    found = await app.get("r").verify()
    assert not found.sound
    assert found.last_good == (first + second) // 2 - 1


async def test_a_def_workflow_goes_on_from_its_checkpoint_too(machine: Machine) -> None:
    app, _ = await machine.start(summing_plainly, list(range(6)), id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    NOTES.clear()
    app = await machine.worker()
    await app.signal("r", "go")
    assert await app.get("r").result(timeout=60) == 15
    assert NOTES == ["add 4", "add 5"]
    assert machine.bodies("r", "checkpoint_taken")[0].source.startswith("test_checkpoints.py")
    sound(machine)


async def test_the_code_gets_the_decoded_form_of_its_state_also_when_nothing_is_recorded(machine: Machine) -> None:
    given: list[Any] = []

    @workflow(name="checkpoint-identity")
    async def identity() -> list[bool]:
        kept: dict[str, Any] = {"a": (1, 2), "b": [3]}
        for _ in range(3):
            state = await everstep.checkpoint(kept)
            given.append(state == kept and state is not kept and state["b"] is not kept["b"])
        return given

    app = await machine.boot()
    assert await app.run(identity, id="r") == [True, True, True]
    assert len(taken(machine)) == 1, "nothing happened after the first"


# -- which calls are recorded -----------------------------------------------------------------------------------------
def looping(name: str, body: Any, *, every: int | None = None, count: int = 12) -> Any:
    """Declare a loop of so many turns."""

    @workflow(name=f"checkpoint-{name}")
    async def loop() -> int:
        state = await everstep.checkpoint(0, every=every)
        while state < count:
            await body(state)
            state = await everstep.checkpoint(state + 1, every=every)
        return state

    return loop


async def numbers_recorded(machine: Machine, code: Any, run: str) -> list[int]:
    app = await machine.boot()
    assert await app.run(code, id=run) == 12
    return [body.number for body in machine.bodies(run, "checkpoint_taken")]


@pytest.mark.parametrize(("every", "expected"), [(1, list(range(1, 14))), (3, [1, 4, 7, 10, 13]), (100, [1])])
async def test_every_says_after_how_many_steps(machine: Machine, every: int, expected: list[int]) -> None:
    assert await numbers_recorded(machine, looping("counted", peek, every=every), "r") == expected


async def nap(turn: int) -> None:
    await asyncio.sleep(0.001)


async def mixed(turn: int) -> None:
    await (add(turn) if turn % 4 == 3 else peek(turn))


async def publishing(turn: int) -> None:
    everstep.publish("turn", turn)
    await peek(turn)


@step(effect="read", retry=everstep.Retry(attempts=2, first=0.001, jitter=0.0))
async def stumble(turn: int) -> None:
    if everstep.current().attempt == 1:
        raise RuntimeError


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (peek, [1]),
        (publishing, [1]),
        (add, list(range(1, 14))),
        (mixed, [1, 5, 9, 13]),
        (stumble, list(range(1, 14))),
        (nap, list(range(1, 14))),
    ],
    ids=["quick reads", "published values", "effects", "both", "reads tried again", "timers"],
)
async def test_by_default_it_is_recorded_after_whatever_was_not_just_a_quick_read(
    machine: Machine, body: Any, expected: list[int]
) -> None:
    app = await machine.boot(clock=None)
    assert await app.run(looping("by-default", body), id="r") == 12
    assert [body.number for body in machine.bodies("r", "checkpoint_taken")] == expected


async def test_a_step_that_took_a_while_is_worth_a_checkpoint(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "EXPENSIVE_SECONDS", -1.0)
    assert await numbers_recorded(machine, looping("slow", peek), "r") == list(range(1, 14))


async def test_after_many_quick_reads_one_is_recorded_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "OUTCOMES_MAX", 5)
    assert await numbers_recorded(machine, looping("many", peek), "r") == [1, 6, 11]


@pytest.mark.parametrize(("before", "after"), [(1, 7), (7, 1), (1, None), (None, 1)])
async def test_another_policy_is_no_divergence(machine: Machine, before: int | None, after: int | None) -> None:
    await killed_at(machine, "add 7", looping("changing", add, every=before))
    looping("changing", add, every=after)
    assert machine.replay("r").differences == [], "the history says which were recorded"
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 12
    assert [f"add {number}" for number in range(7, 12)] == NOTES
    assert machine.replay("r").differences == []


async def test_the_newest_are_kept_three_or_as_many_as_wanted(machine: Machine) -> None:
    @workflow(name="checkpoint-keeping")
    async def keeping() -> int:
        state = 0
        while state < 9:
            state = await everstep.checkpoint(state, keep=5)
            await add(state)
            state += 1
        return state

    app = await machine.boot()
    await app.run(summing, list(range(9)), id="three")
    await app.run(keeping, id="five")
    for run, count in (("three", 3), ("five", 5)):
        rows, before = [], 2**62
        while (row := machine.store.checkpoint(run, 1, before)) is not None:
            rows.append(row.seq)
            before = row.seq
        assert rows == taken(machine, run)[::-1][:count]


# -- what must not be under way ---------------------------------------------------------------------------------------
async def with_a_step() -> Any:
    task = asyncio.ensure_future(add(1))
    await asyncio.sleep(0)
    return task


async def with_a_timer() -> Any:
    return asyncio.get_running_loop().call_later(50, print)


async def with_a_receive() -> Any:
    return asyncio.ensure_future(everstep.receive("never"))


async def with_a_child() -> Any:
    return await everstep.start(summing, [1])


async def with_a_task() -> Any:
    return asyncio.ensure_future(asyncio.Event().wait())


UNDER_WAY = {
    "step add": with_a_step,
    "a timer of 50 s": with_a_timer,
    "receive 'never'": with_a_receive,
    "child run r.": with_a_child,
    "task task-": with_a_task,
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("what", UNDER_WAY)
async def test_with_something_else_under_way_it_is_refused_with_the_line_and_the_remedy(
    machine: Machine, what: str, is_first: bool
) -> None:
    @workflow(name="checkpoint-busy")
    async def busy() -> None:
        if not is_first:
            await everstep.checkpoint(0)
        other = await UNDER_WAY[what]()
        await asyncio.sleep(0)
        await everstep.checkpoint(1)
        del other

    _, run = await machine.start(busy, id="r")
    with pytest.raises(Misuse) as refused:
        await run.result(timeout=60)
    assert what in str(refused.value)
    assert "test_checkpoints.py" in str(refused.value)
    assert "await everstep.checkpoint(1)" in str(refused.value)
    assert "Await it or cancel it before" in str(refused.value)
    assert len(taken(machine)) == (0 if is_first else 1)


async def test_a_checkpoint_in_a_task_beside_the_main_one_is_refused(machine: Machine) -> None:
    @workflow(name="checkpoint-beside")
    async def beside() -> None:
        async def inner() -> None:
            await everstep.checkpoint(1)

        await asyncio.gather(inner())

    app = await machine.boot()
    with pytest.raises(Misuse, match="under way"):
        await app.run(beside, id="r")


async def test_what_has_ended_or_was_cancelled_is_not_under_way(machine: Machine) -> None:
    @workflow(name="checkpoint-tidy")
    async def tidy() -> int:
        state = await everstep.checkpoint(0, every=1)
        for _ in range(3):
            task = asyncio.ensure_future(peek(1))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with pytest.raises(TimeoutError):
                await everstep.receive("never", timeout=1)
            async with asyncio.timeout(100):
                await add(state)
            await summing([1])
            async with asyncio.TaskGroup() as group:
                group.create_task(peek(2))
            state = await everstep.checkpoint(state + 1, every=1)
        return state

    _, run = await machine.start(tidy, id="r")
    while machine.status("r") not in ("completed", "failed"):
        await machine.advance(1)
    assert await run.result() == 3
    assert len(taken(machine)) == 4
    assert machine.replay("r").differences == []


async def test_a_checkpoint_by_another_function_than_the_first_is_refused(machine: Machine) -> None:
    """A run that goes on comes back to the first call: a function that it would have to be in is not called then."""

    async def inner(state: int) -> int:
        return await everstep.checkpoint(state)

    @workflow(name="checkpoint-elsewhere")
    async def elsewhere(first: str, second: str) -> int:
        state = 0
        for how in (first, second, second):
            await add(state)
            state = 1 + await (inner(state) if how == "inner" else everstep.checkpoint(state))
        return state

    app = await machine.boot()
    for how in ("inner", "here"):
        assert await app.run(elsewhere, how, how, id=how) == 3, "one place, in a function of its own or not"
    for first, second in (("inner", "here"), ("here", "inner")):
        with pytest.raises(Misuse, match="at the top of the loop"):
            await app.run(elsewhere, first, second, id=f"{first}-{second}")


class Broken(Exception):
    pass


@step(raises=(Broken,))
async def fail(turn: int) -> None:
    raise Broken(turn)


@step(raises=(Broken,))
def fail_plainly(turn: int) -> None:
    raise Broken(turn)


@pytest.mark.parametrize("where", ["in the handler", "in its finally", "after it"])
async def test_in_the_handler_of_an_exception_nothing_is_recorded_and_after_it_as_ever(
    machine: Machine, where: str
) -> None:
    @workflow(name="checkpoint-handler")
    async def handler() -> int:
        state = await everstep.checkpoint(0)
        while state < 4:
            try:
                await fail(state)
            except Broken:
                if where == "in the handler":
                    state = await everstep.checkpoint(state + 1)
                elif where == "in its finally":
                    try:
                        raise
                    except Broken:
                        pass
                    finally:
                        state = await everstep.checkpoint(state + 1)
            if where == "after it":
                state = await everstep.checkpoint(state + 1)
        return state

    @workflow(name="checkpoint-handler-plainly")
    def handler_plainly() -> int:
        state = blocking.checkpoint(0)
        while state < 4:
            try:
                fail_plainly(state)
            except Broken:
                if where != "after it":
                    state = blocking.checkpoint(state + 1)
            if where == "after it":
                state = blocking.checkpoint(state + 1)
        return state

    app = await machine.boot()
    for code, run in ((handler, "r"), (handler_plainly, "plain")):
        assert await app.run(code, id=run) == 4
        assert len(taken(machine, run)) == (5 if where == "after it" else 1), run


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -1}, {"keep": 2}])
async def test_wrong_figures_are_refused(machine: Machine, options: dict[str, int]) -> None:
    @workflow(name="checkpoint-wrong")
    async def wrong() -> None:
        await everstep.checkpoint(0, **options)

    app = await machine.boot()
    with pytest.raises(Misuse, match="at least"):
        await app.run(wrong, id="r")


def test_outside_of_a_workflow_it_says_where_it_belongs() -> None:
    with pytest.raises(Misuse, match="for workflow code"):
        asyncio.run(everstep.checkpoint(1))
    with pytest.raises(Misuse, match="for workflow code"):
        blocking.checkpoint(1)


async def test_the_blocking_one_in_an_async_workflow_says_what_to_write(machine: Machine) -> None:
    @workflow(name="checkpoint-blocked")
    async def blocked() -> None:
        blocking.checkpoint(1)

    app = await machine.boot()
    with pytest.raises(Misuse, match=r"await everstep\.checkpoint"):
        await app.run(blocked, id="r")


async def test_a_state_of_a_class_that_a_resume_would_not_know_is_refused_at_once(machine: Machine) -> None:
    @dataclass
    class Later:
        number: int

    @workflow(name="checkpoint-phases")
    async def phases() -> None:
        await everstep.checkpoint({"phase": 1})
        await everstep.checkpoint({"phase": Later(2)})

    app = await machine.boot()
    with pytest.raises(NotEncodable, match="Later"):
        await app.run(phases, id="r")
