"""`checkpoint`: a loop records its state, and a run that goes on starts from the newest, as if it had never stopped."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

import everstep
from everstep import blocking, step, witness, workflow
from everstep.engine.app.app import App
from everstep.engine.code import checkpoints
from everstep.engine.code.execution import Execution
from everstep.engine.code.recovery_point import damaged_checkpoints
from everstep.engine.code.replay import Replayed
from everstep.engine.history.verify import load_verified
from everstep.errors import Misuse, NotEncodable, RunCancelled, RunTimedOut, StepError
from everstep.model.events import CancelRequested, SignalReceived, StepCompleted, encode_body
from everstep.stores.protocol import Post
from everstep.testing.checker import check, export_histories
from tests.engine.checkpoint_helpers import KeepingStore
from tests.engine.resume_helpers import Gate, Machine, declared, freeze, scenario

NOTES: list[str] = []
GATES: dict[str, Gate] = {}


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    NOTES.clear()
    GATES.clear()


@dataclass
class Sum:
    todo: list[int]
    total: int = 0
    seen: list[str] = field(default_factory=list)


@step
async def add(number: int) -> int:
    NOTES.append(f"add {number}")
    if f"add {number}" in GATES:
        await GATES[f"add {number}"].wait()
    return number


@step(effect="read")
async def peek(number: int) -> int:
    NOTES.append(f"peek {number}")
    if f"peek {number}" in GATES:
        await GATES[f"peek {number}"].wait()
    return number


@step
def add_plainly(number: int) -> int:
    NOTES.append(f"add {number}")
    return number


@workflow
async def summing(numbers: list[int]) -> int:
    first = await peek(1000)
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        state.total += await add(state.todo.pop(0))
        state = await everstep.checkpoint(state)
    return state.total + first - 1000


@workflow
def summing_plainly(numbers: list[int]) -> int:
    state = Sum(numbers)
    while state.todo:
        state = blocking.checkpoint(state)
        if len(state.todo) == 2:
            blocking.receive("go")
        state.total += add_plainly(state.todo.pop(0))
    return state.total


async def killed_at(machine: Machine, gate: str, code: Any, *args: Any, run: str = "r") -> None:
    """Start a run and kill its process while a body stands at a gate."""
    GATES[gate] = Gate()
    app = await machine.boot()
    await app.start(code, *args, id=run)
    await GATES[gate].reached.wait()
    await machine.until(lambda: all(one.writer.all_is_durable for one in app.drivers.values()))
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()


def taken(machine: Machine, run: str = "r") -> list[int]:
    return [event.seq for event in machine.events(run) if event.kind == "checkpoint_taken"]


def judged(machine: Machine) -> None:
    violations = check(export_histories(machine.store))
    assert not violations, violations


# -- going on ---------------------------------------------------------------------------------------------------------


@scenario
async def test_a_run_goes_on_from_its_newest_checkpoint_and_does_nothing_twice(machine: Machine) -> None:
    await killed_at(machine, "add 7", summing, list(range(10)))
    assert len(taken(machine)) == 8, "the first, and one after each effect"
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == sum(range(10))
    assert NOTES == ["add 7", "add 8", "add 9"], "neither the steps before the loop nor those in it are done again"
    assert "checkpoint_damaged" not in machine.kinds("r")
    judged(machine)


@scenario
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


@scenario
async def test_damage_in_what_is_not_read_is_found_by_verify_and_does_not_stop_the_run(machine: Machine) -> None:
    await killed_at(machine, "add 7", summing, list(range(10)))
    first, second, *_ = taken(machine)
    machine.sql("UPDATE events SET body = x'7b7d' WHERE run = 'r' AND seq = ?", (first + second) // 2)
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == sum(range(10))
    found = await app.get("r").verify()
    assert not found.sound
    assert found.last_good == (first + second) // 2 - 1


@scenario
async def test_a_def_workflow_goes_on_from_its_checkpoint_too(machine: Machine) -> None:
    app = await machine.boot()
    await app.start(summing_plainly, list(range(6)), id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    NOTES.clear()
    app = await machine.worker()
    await app.signal("r", "go")
    assert await app.get("r").result(timeout=60) == 15
    assert NOTES == ["add 4", "add 5"]
    assert machine.bodies("r", "checkpoint_taken")[0].source.startswith("test_checkpoints.py")
    judged(machine)


@scenario
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
@scenario
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
@scenario
async def test_by_default_it_is_recorded_after_whatever_was_not_just_a_quick_read(
    machine: Machine, body: Any, expected: list[int]
) -> None:
    app = await machine.boot(clock=None)
    assert await app.run(looping("by-default", body), id="r") == 12
    assert [body.number for body in machine.bodies("r", "checkpoint_taken")] == expected


@scenario
async def test_a_step_that_took_a_while_is_worth_a_checkpoint(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "EXPENSIVE_SECONDS", -1.0)
    assert await numbers_recorded(machine, looping("slow", peek), "r") == list(range(1, 14))


@scenario
async def test_after_many_quick_reads_one_is_recorded_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "OUTCOMES_MAX", 5)
    assert await numbers_recorded(machine, looping("many", peek), "r") == [1, 6, 11]


@pytest.mark.parametrize(("before", "after"), [(1, 7), (7, 1), (1, None), (None, 1)])
@scenario
async def test_another_policy_is_no_divergence(machine: Machine, before: int | None, after: int | None) -> None:
    await killed_at(machine, "add 7", looping("changing", add, every=before))
    looping("changing", add, every=after)
    assert machine.replay("r").differences == [], "the history says which were recorded"
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 12
    assert [f"add {number}" for number in range(7, 12)] == NOTES
    assert machine.replay("r").differences == []


@scenario
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
@scenario
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

    app = await machine.boot()
    run = await app.start(busy, id="r")
    with pytest.raises(Misuse) as refused:
        await run.result(timeout=60)
    assert what in str(refused.value)
    assert "test_checkpoints.py" in str(refused.value)
    assert "await everstep.checkpoint(1)" in str(refused.value)
    assert "Await it or cancel it before" in str(refused.value)
    assert len(taken(machine)) == (0 if is_first else 1)


@scenario
async def test_a_checkpoint_in_a_task_beside_the_main_one_is_refused(machine: Machine) -> None:
    @workflow(name="checkpoint-beside")
    async def beside() -> None:
        async def inner() -> None:
            await everstep.checkpoint(1)

        await asyncio.gather(inner())

    app = await machine.boot()
    with pytest.raises(Misuse, match="under way"):
        await app.run(beside, id="r")


@scenario
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

    app = await machine.boot()
    run = await app.start(tidy, id="r")
    while machine.status("r") not in ("completed", "failed"):
        await machine.advance(1)
    assert await run.result() == 3
    assert len(taken(machine)) == 4
    assert machine.replay("r").differences == []


@scenario
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
@scenario
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
@scenario
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


@scenario
async def test_the_blocking_one_in_an_async_workflow_says_what_to_write(machine: Machine) -> None:
    @workflow(name="checkpoint-blocked")
    async def blocked() -> None:
        blocking.checkpoint(1)

    app = await machine.boot()
    with pytest.raises(Misuse, match=r"await everstep\.checkpoint"):
        await app.run(blocked, id="r")


@scenario
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


# -- the state's class changes ----------------------------------------------------------------------------------------


def with_state(**fields: Any) -> Any:
    """Declare the same loop with another class for its state."""
    namespace = {"__annotations__": {name: type(value) for name, value in fields.items()}}
    required = {name for name, value in fields.items() if value == "required"}
    namespace["__annotations__"] |= dict.fromkeys(required, str)
    Shape = dataclass(type("Shape", (), namespace | {n: v for n, v in fields.items() if n not in required}))

    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        state: Any = await everstep.checkpoint(Shape(**dict.fromkeys(required, "given")))
        while state.turn < 6:
            await add(state.turn)
            state.turn += 1
            state = await everstep.checkpoint(state)
        return int(state.turn)

    return shaped


@scenario
async def test_a_state_that_no_longer_decodes_holds_the_run_and_the_right_code_goes_on(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0))
    with_state(must="required", turn=0)
    app = await machine.worker()
    await machine.until_status("r", "held")
    hold = machine.hold("r")
    assert hold.reason == "diverged"
    assert "accept" not in hold.resolutions
    assert "checkpoint 4" in hold.summary
    (difference,) = machine.report("r")["differences"]
    assert difference["what"] == "state"
    assert "value.must" in difference["now"]
    assert "no default" in difference["now"]
    assert NOTES == []
    await machine.stop(app)
    with_state(turn=0)
    app = await machine.worker()
    await machine.until_status("r", "completed")
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 3", "add 4", "add 5"]


@scenario
async def test_a_state_of_another_kind_is_not_taken_for_the_new_one(machine: Machine) -> None:
    @workflow(name="checkpoint-shaped")
    async def plain() -> int:
        state = await everstep.checkpoint({"turn": 0})
        while state["turn"] < 6:
            await add(state["turn"])
            state = await everstep.checkpoint({"turn": state["turn"] + 1})
        return state["turn"]

    await killed_at(machine, "add 3", plain)
    with_state(turn=0)
    await machine.worker()
    await machine.until_status("r", "held")
    assert "is a dict" in machine.report("r")["differences"][0]["now"]


@scenario
async def test_a_compatible_change_of_the_state_goes_on(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0, gone=1))
    with_state(turn=0, new="default")
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 3", "add 4", "add 5"]


@scenario
async def test_code_without_its_checkpoints_is_held_as_diverged(machine: Machine) -> None:
    await killed_at(machine, "add 3", with_state(turn=0))

    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        for turn in range(6):
            await add(turn)
        return 6

    await machine.worker()
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "diverged"
    assert machine.report("r")["differences"][0]["recorded"] == "checkpoint 1"


@scenario
async def test_code_that_got_its_checkpoints_under_way_goes_on_and_uses_them_from_then_on(machine: Machine) -> None:
    @workflow(name="checkpoint-shaped")
    async def shaped() -> int:
        for turn in range(6):
            await add(turn)
        return 6

    await killed_at(machine, "add 3", shaped)
    GATES["add 5"] = Gate()
    with_state(turn=0)
    app = await machine.worker()
    await GATES["add 5"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    first = taken(machine)[0]
    assert machine.bodies("r", "checkpoint_taken")[0].number == 5, "those before were passed in the replay"
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 5"]
    assert first > 8
    judged(machine)


def before_the_loop(prompt: str, published: str) -> Any:
    """Declare a loop with something before it."""

    @workflow(name="checkpoint-prefaced")
    async def prefaced() -> int:
        await ask(prompt)
        everstep.publish(published, 1)
        state = 0
        while state < 6:
            state = await everstep.checkpoint(state)
            state += 1 + 0 * await add(state)
        return state

    return prefaced


@step(effect="read")
async def ask(prompt: str) -> str:
    return prompt


@scenario
async def test_what_the_code_asks_for_before_its_first_checkpoint_is_compared_as_ever(machine: Machine) -> None:
    await killed_at(machine, "add 3", before_the_loop("why", "name"))
    before_the_loop("why", "another")
    await machine.worker()
    await machine.until_status("r", "held")
    (difference,) = machine.report("r")["differences"]
    assert (difference["what"], difference["recorded"]) == ("name", "publish 'name'")
    assert NOTES == []


@scenario
async def test_what_a_person_accepted_before_a_checkpoint_stays_accepted(machine: Machine) -> None:
    await killed_at(machine, "add 3", before_the_loop("why", "name"))
    before_the_loop("why not", "name")
    app = await machine.worker()
    await machine.until_status("r", "held")
    GATES["add 5"] = Gate()
    await app.resolve("r", "accept")
    await GATES["add 5"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 6
    assert NOTES == ["add 5"], "from a checkpoint that was taken after the answer"


# -- with the other verbs ---------------------------------------------------------------------------------------------


@step
async def risky(number: int) -> int:
    NOTES.append(f"risky {number} {everstep.key()}")
    if f"risky {number}" in GATES:
        await GATES[f"risky {number}"].wait()
    if "broken" in GATES or f"broken {number}" in GATES:
        raise ValueError(number)
    return number


@workflow
async def risking(numbers: list[int], fatal: int) -> list[str]:
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        number = state.todo.pop(0)
        state.seen.append(str(await (risky(number) if number == fatal else add(number))))
        state = await everstep.checkpoint(state)
    return state.seen


@scenario
async def test_a_retry_goes_on_from_the_newest_checkpoint_before_the_failure(machine: Machine) -> None:
    GATES["broken"] = Gate()
    app = await machine.boot()
    run = await app.start(risking, list(range(8)), 5, id="r")
    with pytest.raises(ValueError, match="5"):
        await run.result(timeout=60)
    GATES.clear()
    first_key = NOTES[-1].split()[-1]
    NOTES.clear()
    await app.retry("r")
    assert await run.result(timeout=60) == [str(number) for number in range(8)]
    assert [note.rpartition(" ")[0] for note in NOTES] == ["risky 5", "add", "add"]
    assert NOTES[0].split()[-1] == first_key, "another attempt at the same step"
    assert machine.replay("r").differences == []
    judged(machine)


@workflow
async def handling(numbers: list[int], extras: int) -> list[str]:
    """After a failure it goes on for a few turns, with checkpoints, and then raises it."""
    error: BaseException | None = None
    state = Sum(numbers)
    while state.todo:
        state = await everstep.checkpoint(state)
        number = state.todo.pop(0)
        try:
            state.seen.append(str(await (add(number) if error else risky(number))))
        except ValueError as caught:
            error, state.todo = caught, list(range(100, 100 + extras))
    if error is not None:
        raise error
    return state.seen


@pytest.mark.parametrize("extras", [1, 2, 4])
@scenario
async def test_a_checkpoint_that_a_retry_voids_is_never_used(machine: Machine, extras: int) -> None:
    """With few of them an older one is kept that counts, with many there is none, and all is replayed."""
    app = await machine.boot()
    GATES["broken 3"] = Gate()
    run = await app.start(handling, [0, 1, 2, 3, 4, 5], extras, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    assert len(taken(machine)) == 4 + extras, "with those of the handler"
    GATES.clear()
    NOTES.clear()
    GATES["risky 3"] = Gate()
    await app.retry("r")
    await GATES["risky 3"].reached.wait()
    jumped = app.drivers["r"].execution.checkpoints.has_jumped  # type: ignore[union-attr]
    assert jumped == (extras < 3)
    GATES["risky 3"].opened.set()
    assert await run.result(timeout=60) == ["0", "1", "2", "3", "4", "5"], "the handler's work no longer counts"
    assert [note.split()[1] for note in NOTES] == ["3", "4", "5"]
    assert "checkpoint_damaged" not in machine.kinds("r")
    assert machine.replay("r").differences == []
    judged(machine)


@scenario
async def test_after_a_retry_a_crash_uses_the_checkpoints_of_the_new_branch_with_its_keys(machine: Machine) -> None:
    GATES["broken"] = Gate()
    app = await machine.boot()
    run = await app.start(risking, list(range(8)), 3, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    GATES.clear()
    await machine.stop(app)
    GATES["add 6"] = Gate()
    app = await machine.worker()
    await app.retry("r")
    await GATES["add 6"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    entropy = app.drivers["r"].execution.entropy
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == [str(number) for number in range(8)]
    assert NOTES == ["add 6", "add 7"]
    (retried,) = machine.bodies("r", "run_retried")
    assert entropy == retried.entropy
    assert machine.replay("r").differences == []
    judged(machine)


@scenario
async def test_a_restart_knows_nothing_of_the_old_checkpoints(machine: Machine) -> None:
    app = await machine.boot()
    await app.run(summing, [1, 2, 3], id="r")
    NOTES.clear()
    GATES["add 20"] = Gate()
    await app.start(summing, [10, 20, 30], id="r", on_existing="restart")
    await GATES["add 20"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 60
    assert NOTES == ["add 20", "add 30"]
    assert machine.store.checkpoint("r", 1) is not None, "the old ones stay with the old history"


@workflow
async def cleaning(numbers: list[int]) -> int:
    state = await everstep.checkpoint(Sum(numbers))
    try:
        while state.todo:
            state.total += await add(state.todo.pop(0))
            state = await everstep.checkpoint(state)
    finally:
        while state.seen != ["clean"] * 3:
            await add(-1)
            state = await everstep.checkpoint(Sum([], state.total, [*state.seen, "clean"]))
    return state.total


@scenario
async def test_a_cancelled_loop_cleans_up_across_a_crash_from_before_the_cancel(machine: Machine) -> None:
    GATES["add 3"], GATES["add -1"] = Gate(), Gate()
    app = await machine.boot()
    await app.start(cleaning, list(range(6)), id="r")
    await GATES["add 3"].reached.wait()
    await app.cancel("r")
    await GATES["add -1"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    before = taken(machine)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    assert NOTES == ["add -1"] * 3
    assert taken(machine) == before, "a run that is about to end records none"
    judged(machine)


@scenario
async def test_a_loop_that_follows_its_cancel_by_itself_records_none_on_the_way(machine: Machine) -> None:
    @workflow(name="checkpoint-graceful")
    async def graceful() -> int:
        state = 0
        while state < 10:
            state = await everstep.checkpoint(state)
            try:
                await add(state)
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            state += 1
        return state

    GATES["add 3"], GATES["add 6"] = Gate(), Gate()
    app = await machine.boot()
    await app.start(graceful, id="r")
    await GATES["add 3"].reached.wait()
    await app.cancel("r")
    await GATES["add 6"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    assert await app.get("r").result(timeout=60) == 10
    assert NOTES == ["add 6", "add 7", "add 8", "add 9"]
    assert len(taken(machine)) == 4
    judged(machine)


@scenario
async def test_a_checkpoint_stays_when_the_end_beside_it_is_taken_back_for_a_cancel(machine: Machine) -> None:
    """The last checkpoint and the end go into one unit, and a cancel is in the inbox that nobody has seen yet."""
    GATES["add 2"] = Gate()
    app = await machine.boot()
    await app.start(summing, [0, 1, 2], id="r")
    await GATES["add 2"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    freeze(app)  # so that it does not see the cancel before its end is refused
    machine.store.commit([Post("r", "cancel", value=encode_body(CancelRequested(reason="late")), at=1)])
    GATES["add 2"].opened.set()
    with pytest.raises(RunCancelled):
        await app.get("r").result(timeout=60)
    assert machine.kinds("r")[-3:] == ["checkpoint_taken", "cancel_requested", "run_cancelled"]
    assert damaged_checkpoints(machine.store, machine.row("r"), load_verified(machine.store, machine.row("r"))) == []
    judged(machine)


@workflow
async def reading_after(turns: int, extras: int) -> int:
    """Its turns are quick reads; after a failure it does a few effects, and then raises it."""
    error: BaseException | None = None
    state = Sum(list(range(turns)))
    while state.todo:
        state = await everstep.checkpoint(state)
        number = state.todo.pop(0)
        try:
            state.total += await (add(number) if number >= 100 else risky(number) if number == 3 else peek(number))
        except ValueError as caught:
            error, state.todo = caught, list(range(100, 100 + extras))
    if error is not None:
        raise error
    return state.total


@scenario
async def test_which_calls_were_recorded_before_a_retry_says_nothing_about_those_after_it(machine: Machine) -> None:
    app = await machine.boot()
    GATES["broken"] = Gate()
    run = await app.start(reading_after, 9, 4, id="r")
    with pytest.raises(ValueError, match="3"):
        await run.result(timeout=60)
    voided = [body.number for body in machine.bodies("r", "checkpoint_taken")][1:]
    assert voided == [5, 6, 7, 8]
    GATES.clear()
    await app.retry("r")
    assert await run.result(timeout=60) == sum(range(9))
    assert [body.number for body in machine.bodies("r", "checkpoint_taken")][5:] == [5], "the others were quick reads"
    assert machine.replay("r").differences == []
    judged(machine)


@scenario
async def test_the_time_of_a_run_with_a_timeout_is_counted_from_its_start_also_after_a_jump(machine: Machine) -> None:
    @workflow(name="checkpoint-timed", timeout=100)
    async def timed() -> int:
        state = await everstep.checkpoint(0)
        while state < 50:
            await asyncio.sleep(15)
            state = await everstep.checkpoint(state + 1)
        return state

    app = await machine.boot()
    await app.start(timed, id="r")
    for count in range(2, 6):
        await machine.advance(15)
        await machine.until(lambda count=count: len(taken(machine)) == count)
    await machine.rest(app)
    await machine.kill(app)
    app = await machine.worker()
    for count in (6, 7):
        await machine.advance(15)
        await machine.until(lambda count=count: len(taken(machine)) == count)
    checkpoint = app.drivers["r"].execution.checkpoints
    assert checkpoint is not None
    assert (checkpoint.has_jumped, checkpoint.number) == (True, 7)
    await machine.advance(15)
    with pytest.raises(RunTimedOut):
        await app.get("r").result(timeout=60)
    assert len(taken(machine)) == 7


@workflow
async def parent_of_loops(numbers: list[int]) -> int:
    state = await everstep.checkpoint(Sum(numbers))
    while state.todo:
        state.total += await summing([state.todo.pop(0), 1])
        state = await everstep.checkpoint(state)
    return state.total


@scenario
async def test_parents_and_children_both_go_on_from_their_checkpoints(machine: Machine) -> None:
    await killed_at(machine, "add 30", parent_of_loops, [10, 20, 30, 40])
    app = await machine.worker()
    await machine.until_status("r.6", "completed")
    await machine.advance(1)
    assert await app.get("r").result(timeout=60) == 104
    assert NOTES == ["add 30", "add 1", "peek 1000", "add 40", "add 1"]
    children = [row.id for row in machine.store.children("r")]
    assert len(children) == 4, "ids of children go on where they were"
    judged(machine)


# -- what arrives -----------------------------------------------------------------------------------------------------


@workflow
async def listening(turns: int) -> list[str]:
    state = await everstep.checkpoint(Sum([]))
    while len(state.seen) < turns:
        await peek(len(state.seen))
        state.seen.append(await everstep.receive("word", str))
        state = await everstep.checkpoint(state, every=1)
    return state.seen


@scenario
async def test_signals_that_arrived_before_the_checkpoint_are_received_after_it(machine: Machine) -> None:
    GATES["peek 1"], GATES["peek 2"] = Gate(), Gate()
    app = await machine.boot()
    await app.start(listening, 6, id="r")
    for number in range(5):
        await app.signal("r", "word", f"w{number}")
    await GATES["peek 1"].reached.wait()
    await machine.until(lambda: len(machine.bodies("r", "signal_received")) == 5)
    GATES["peek 1"].opened.set()
    await GATES["peek 2"].reached.wait()
    await machine.until(lambda: app.drivers["r"].writer.all_is_durable)
    assert max(event.seq for event in machine.events("r") if event.kind == "signal_received") < taken(machine)[-1]
    await machine.kill(app)
    GATES.clear()
    NOTES.clear()
    app = await machine.worker()
    await app.signal("r", "word", "w5")
    assert await app.get("r").result(timeout=60) == [f"w{number}" for number in range(6)]
    assert NOTES == ["peek 2", "peek 3", "peek 4", "peek 5"]
    judged(machine)


@scenario
async def test_a_checkpoint_is_not_taken_while_the_code_has_not_seen_all_that_is_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that is recorded while an expensive outcome waits for the disk stands before the checkpoint."""
    GATES["peek 0"] = Gate()
    app = await machine.boot()
    await app.start(listening, 2, id="r")
    await GATES["peek 0"].reached.wait()
    driver = app.drivers["r"]
    await machine.until(lambda: driver.writer.all_is_durable)
    ((number, attempt),) = driver.attempts.running.items()
    app.committer._busy = True  # the disk is slow
    driver.attempts._known.pop(number)
    driver.attempts.finish(attempt)
    driver.deliver("step_completed", "peek", StepCompleted(number, raw(app, 0), "", 1, 9.0), expensive=True)
    driver.deliver("signal_received", "", SignalReceived(1, "word", raw(app, "w0"), ""))
    driver.deliver("signal_received", "", SignalReceived(2, "word", raw(app, "w1"), ""))
    assert len(driver._unapplied) == 3
    app.committer._busy = False
    app.committer._soon()
    GATES.clear()
    assert await app.get("r").result(timeout=60) == ["w0", "w1"]
    kinds = machine.kinds("r")
    early = kinds.index("signal_received")
    assert kinds[early : early + 3] == ["signal_received", "signal_received", "signal_awaited"]
    for body in machine.bodies("r", "checkpoint_taken"):
        assert body.number != 2, "the code had not seen the second signal"
    judged_replays(machine)


def raw(app: App, value: Any) -> Any:
    import msgspec

    return msgspec.Raw(app.codec.encode(value))


def judged_replays(machine: Machine) -> None:
    assert machine.replay("r").differences == []


# -- facts about the outside ------------------------------------------------------------------------------------------


@scenario
async def test_facts_taken_in_the_loop_are_compared_before_a_run_goes_on_from_a_checkpoint(machine: Machine) -> None:
    path = machine.folder / "fact.txt"
    path.write_text("as it was")

    @workflow(name="checkpoint-watching")
    async def watching() -> int:
        state = await everstep.checkpoint(0)
        while state < 4:
            await everstep.expect(witness.file(path))
            await add(state)
            state = await everstep.checkpoint(state + 1)
        await everstep.receive("go")
        return state

    app = await machine.boot()
    await app.start(watching, id="r")
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    path.write_text("as it is now")
    app = await machine.worker()
    await app.signal("r", "go")
    await machine.until_status("r", "held")
    assert machine.hold("r").reason == "drift"
    path.write_text("as it was")
    await app.resolve("r", "retry")
    assert await app.get("r").result(timeout=60) == 4
    assert machine.kinds("r").count("witness_taken") == 4


@pytest.mark.parametrize("where", ["before the first", "in the loop"])
@scenario
async def test_a_fact_that_only_the_code_can_observe_belongs_before_the_first_checkpoint(
    machine: Machine, where: str
) -> None:
    @workflow(name="checkpoint-observing")
    async def observing() -> int:
        fact = witness.value("tide", lambda: "high")
        if where == "before the first":
            await everstep.expect(fact)
        state = await everstep.checkpoint(0)
        if where == "in the loop":
            await everstep.expect(fact)
        while state < 4:
            await add(state)
            state = await everstep.checkpoint(state + 1)
        await everstep.receive("go")
        return state

    app = await machine.boot()
    run = await app.start(observing, id="r")
    if where == "in the loop":
        with pytest.raises(Misuse, match="`expect` it before the first checkpoint, or `release` it"):
            await run.result(timeout=60)
        return
    await machine.until_status("r", "waiting")
    await machine.rest(app)
    await machine.kill(app)
    app = await machine.worker()
    await app.signal("r", "go")
    assert await app.get("r").result(timeout=60) == 4


@scenario
async def test_a_run_with_facts_whose_step_is_due_again_later_goes_on(machine: Machine) -> None:
    """A run that remembers facts leaves memory whenever it rests, and comes back for what is due."""

    @workflow(name="checkpoint-facts-and-time")
    async def facts_and_time() -> str:
        await everstep.expect(witness.file(machine.folder / "none"))
        await asyncio.sleep(5)
        await slow_to_succeed()
        return "done"

    @step(retry=everstep.Retry(attempts=3, first=10, jitter=0.0))
    async def slow_to_succeed() -> None:
        if everstep.current().attempt < 3:
            raise RuntimeError

    app = await machine.boot()
    run = await app.start(facts_and_time, id="r")
    await machine.rest(app)
    for _ in range(12):
        await machine.advance(5)
    assert await run.result(timeout=60) == "done"


# -- nothing is forgotten ---------------------------------------------------------------------------------------------

KEPT = {
    "_calls": "calls",
    "_visits": "visits",
    "_random": "random",
    "entropy": "entropy",
    "branch": "branch",
    "patches": "patches",
    "witnesses": "facts",
    "kept": "kept",
    "_receiving": "signals",
    "loop": "now",
    "checkpoints": "number",
    "caution": "caution",
    "unseen_workers": "unseen_workers",
    "_saga": "is_undoable",
    "books": "books",
}
"""What an execution remembers, and the field of the engine's part that it is kept in."""
NOT_KEPT = {
    "place": "it is every execution's",
    "workflow": "it is the code's",
    "run": "it is the run's",
    "generation": "it is the run's",
    "codec": "it is the app's",
    "lookup": "it is the store's",
    "steps": "none is open",
    "begun": "none is open",
    "children": "none is open",
    "copied_children": "it is about the replay",
    "followed": "it is about the replay",
    "new_patches": "they are recorded before",
    "failures": "errors that the code still holds come from before the first checkpoint",
    "replaying": "it is about the replay",
    "unapplied": "there are none",
    "unwinding": "it is about leaving memory",
    "wants_places": "it is about the replay",
    "ended": "the code goes on",
    "cancel": "a run that is being cancelled takes none",
    "rollback": "a run that is being undone takes none",
    "main": "it is the code itself",
    "refusal": "a run to which the machine refused something is taken up again",
    "_issued": "what was asked for before is recorded before",
    "_cancel_came_too_late": "a run that is being cancelled takes none",
}
"""What need not be kept, and why."""
KEPT_OF_A_REPLAY = {"published", "accepted", "first_checkpoint", "retried"}
NOT_KEPT_OF_A_REPLAY = {"execution", "differences", "fresh", "attempts", "cancel_at", "spins"}


@scenario
async def test_all_that_a_run_remembers_is_kept_in_a_checkpoint_or_has_a_reason_not_to_be(machine: Machine) -> None:
    """Whoever gives an execution something new to remember decides here whether a resume from a checkpoint needs it."""
    execution = Execution(
        declared(summing),
        run="r",
        generation=1,
        codec=machine.store,
        lookup=bytes.fromhex,  # type: ignore[arg-type]
    )
    # Annotations: what few runs have stands at the class, and is an execution's own once it is set.
    assert set(vars(execution)) | set(Execution.__annotations__) == set(KEPT) | set(NOT_KEPT)
    assert set(KEPT.values()) <= set(checkpoints.EnginePart.__struct_fields__)
    assert set(Replayed.__struct_fields__) == KEPT_OF_A_REPLAY | NOT_KEPT_OF_A_REPLAY


@scenario
async def test_an_error_that_is_raised_again_after_a_checkpoint_is_still_a_steps(machine: Machine) -> None:
    @workflow(name="checkpoint-raising")
    async def raising() -> None:
        error: BaseException | None = None
        try:
            await failing()
        except StepError as caught:
            error = caught
        state = await everstep.checkpoint(0)
        while state < 4:
            await add(state)
            state = await everstep.checkpoint(state + 1)
        assert error is not None
        raise error

    @step
    async def failing() -> None:
        raise type("Unknown", (Exception,), {})("odd")

    GATES["add 3"] = Gate()
    await killed_at(machine, "add 3", raising)
    app = await machine.worker()
    with pytest.raises(StepError):
        await app.get("r").result(timeout=60)
    (failed,) = machine.bodies("r", "run_failed")
    assert failed.call == 1
