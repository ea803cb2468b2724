"""Stopping is never an outcome: what stops a program leaves a run unfinished, wherever it is raised."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import everstep
from everstep import Done, Graph, NotDone, Retry, step, transaction, witness, workflow
from everstep.engine.app.app import App
from everstep.errors import RunHeld, StoreFull
from everstep.stores.brief import refuse_when_brief
from everstep.stores.protocol import Release
from everstep.testing.faulty_store import FaultyStore
from tests.engine.lives import add, echo
from tests.engine.resume_helpers import Machine
from tests.waiting import open_sqlite
from tests.worlds.ledger import NOTES

SICK: set[str] = set()
"""While something is in it, bodies and code are stopped."""
OUTCOMES = ("step_failed", "attempt_failed", "run_failed", "run_cancelled")


@pytest.fixture(autouse=True)
def sick() -> None:
    SICK.clear()
    SICK.add("sick")


STOPS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": lambda: asyncio.CancelledError("by hand"),
    "group": lambda: BaseExceptionGroup("several", [ValueError("one"), SystemExit(3)]),
}
ON_THE_LOOP = [name for name in STOPS if name != "KeyboardInterrupt"]
"""On the main thread a `KeyboardInterrupt` is meant for the process: see test_signals_to_processes.py."""


def releases(operations: Any, **_: Any) -> bool:
    return any(isinstance(one, Release) for one in operations)


def stop_if_sick(stop: str, text: str = "begun") -> None:
    NOTES.append(text)
    if SICK:
        raise STOPS[stop]()


@step
async def on_loop(stop: str) -> str:
    await asyncio.sleep(0)
    stop_if_sick(stop)
    return "done"


@step(timeout=60)
async def on_loop_in_time(stop: str) -> str:
    stop_if_sick(stop)
    return "done"


@step(retry=Retry(attempts=5))
def on_thread(stop: str) -> str:
    stop_if_sick(stop)
    return "done"


@step(timeout=60)
def on_thread_in_time(stop: str) -> str:
    stop_if_sick(stop)
    return "done"


async def other_way(stop: str) -> str:
    stop_if_sick(stop)
    return "done"


@step(fallback=other_way)
async def with_fallback(stop: str) -> str:
    raise OSError("always")


def undo(done: Any, stop: str) -> None:
    stop_if_sick(stop, "undone")


@step(compensate=undo)
def undoable(stop: str) -> str:
    return "made"


@workflow
async def flow(name: str, stop: str) -> str:
    await echo("before")
    if name in ("on_thread", "on_thread_in_time"):
        return str(await asyncio.to_thread(BODIES[name], stop))
    return str(await BODIES[name](stop))


BODIES: dict[str, Any] = {
    "on_loop": on_loop,
    "on_loop_in_time": on_loop_in_time,
    "on_thread": on_thread,
    "on_thread_in_time": on_thread_in_time,
    "with_fallback": with_fallback,
}


@workflow
async def failing_with_undo(stop: str) -> None:
    await asyncio.to_thread(undoable, stop)
    raise ValueError("so it is undone")


async def let_time_pass_until(machine: Machine, run: str, *statuses: str) -> None:
    """Let the pauses between two lives pass until a run has come to a status."""
    for _ in range(400):
        if machine.status(run) in statuses:
            return
        machine.clock.advance(1)
        await asyncio.sleep(0.01)
    raise AssertionError(f"{run} is {machine.status(run)}, and {machine.kinds(run)}")


async def is_poisoned_and_goes_on_when_cured(machine: Machine, app: App, run: str, *ends: str) -> str:
    """Check that a run is held without an outcome, harms no other, and comes to its end when nothing stops it."""
    await let_time_pass_until(machine, run, "held", "completed", "failed", "cancelled")
    assert not set(machine.kinds(run)) & set(OUTCOMES) - {"run_failed"} - set(ends), machine.kinds(run)
    hold = machine.hold(run)
    assert hold.reason == "poisoned"
    assert await app.run(plus, 1, 2) == 3, "nothing else was stopped"
    SICK.clear()
    await app.resolve(run, "retry")
    await let_time_pass_until(machine, run, "completed", "failed", "cancelled")
    return f"{machine.status(run)}: {hold.summary}"


@workflow
async def plus(a: int, b: int) -> int:
    return int(await asyncio.to_thread(add, a, b))


# -- bodies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *(("on_thread", stop) for stop in STOPS),
        *(("on_thread_in_time", stop) for stop in STOPS),
        *(("on_loop", stop) for stop in ON_THE_LOOP),
        *(("on_loop_in_time", stop) for stop in ON_THE_LOOP),
        *(("with_fallback", stop) for stop in ON_THE_LOOP),
    ],
)
async def test_a_stop_in_a_body_is_no_outcome_and_the_third_in_a_row_holds_the_run(
    machine: Machine, name: str, stop: str
) -> None:
    app, _ = await machine.start(flow, name, stop, id="r")
    allowed = ("attempt_failed",) if name == "with_fallback" else ()
    ended = await is_poisoned_and_goes_on_when_cured(machine, app, "r", *allowed)
    assert ended.startswith("completed: this run was stopped 3 times in a row")
    assert "raised" in ended
    assert len(NOTES) == 4


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stop_in_a_compensation_leaves_the_undoing_unfinished(machine: Machine, stop: str) -> None:
    app, _ = await machine.start(failing_with_undo, stop, id="r")
    ended = await is_poisoned_and_goes_on_when_cured(machine, app, "r", "step_failed")
    assert ended.startswith("failed: ")
    assert NOTES == ["undone"] * 4
    assert machine.kinds("r", "step_failed") == []


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stop_in_an_atomic_body_rolls_it_back_and_is_no_outcome(machine: Machine, stop: str) -> None:
    database = open_sqlite(machine.folder / "till.db")
    database.execute("CREATE TABLE sales (amount INTEGER)")
    database.commit()

    @transaction(machine.folder / "till.db")
    def sell(connection: Any) -> str:
        connection.execute("INSERT INTO sales VALUES (100)")
        stop_if_sick(stop)
        return "sold"

    @workflow
    async def selling() -> str:
        return str(await asyncio.to_thread(sell))

    app, _ = await machine.start(selling, id="r")
    assert (await is_poisoned_and_goes_on_when_cured(machine, app, "r")).startswith("completed: ")
    assert database.execute("SELECT amount FROM sales").fetchall() == [(100,)]
    database.close()


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stop_in_a_once_body_is_a_doubt(machine: Machine, stop: str, is_async: bool) -> None:
    if is_async and stop == "KeyboardInterrupt":
        pytest.skip("it is meant for the process")

    @step(effect="once", retry=Retry(attempts=5))
    def pay() -> str:
        stop_if_sick(stop)
        return "paid"

    @step(effect="once", retry=Retry(attempts=5))
    async def pay_on_loop() -> str:
        stop_if_sick(stop)
        return "paid"

    @workflow
    async def paying() -> str:
        return await pay_on_loop() if is_async else await asyncio.to_thread(pay)

    app, run = await machine.start(paying, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "in-doubt"
    assert NOTES == ["begun"]
    SICK.clear()
    await app.resolve("r", "done", value="paid by hand")
    assert await run.result(timeout=60) == "paid by hand"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_probe_that_is_stopped_does_not_know_and_is_asked_again(machine: Machine, is_async: bool) -> None:
    def ask(key: str) -> Done | NotDone:
        stop_if_sick("SystemExit", "asked")
        return Done("paid")

    async def ask_on_loop(key: str) -> Done | NotDone:
        return ask(key)

    @step(effect="once", probe=ask_on_loop if is_async else ask)
    async def pay() -> str:
        raise OSError("the line is dead")

    @workflow
    async def paying() -> str:
        return await pay()

    _, run = await machine.start(paying, id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    assert machine.bodies("r", "probe_answered")[0].answer == "unknown"
    SICK.clear()
    await let_time_pass_until(machine, "r", "completed")
    assert await run.result() == "paid"


# -- workflow code ---------------------------------------------------------------------------------------------------
@workflow
async def code_on_loop() -> str:
    await echo(1)
    stop_if_sick("SystemExit")
    return "done"


@workflow
def code_on_stack() -> str:
    add(1, 2)
    stop_if_sick("SystemExit")
    return "done"


@workflow
async def code_at_once() -> str:
    stop_if_sick("SystemExit")
    return "done"


@workflow
async def code_with_tasks() -> str:
    async def part(number: int) -> None:
        await echo(number)
        if number == 2:
            stop_if_sick("SystemExit")

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(part(number))
    return "done"


@workflow
async def code_that_raises_generator_exit() -> str:
    await echo(1)
    stop_if_sick("GeneratorExit")
    return "done"


code_in_a_graph: Graph[Any] = Graph("code_in_a_graph")


@code_in_a_graph.node
async def node(state: dict[str, Any]) -> dict[str, Any]:
    await echo(1)
    stop_if_sick("SystemExit")
    return {"said": "done"}


CODE: dict[str, Any] = {
    one.name: one
    for one in (code_on_loop, code_on_stack, code_at_once, code_with_tasks, code_that_raises_generator_exit)
}


@pytest.mark.parametrize("name", [*CODE, "code_in_a_graph"])
async def test_a_stop_in_workflow_code_is_no_outcome_and_the_third_in_a_row_holds_the_run(
    machine: Machine, name: str
) -> None:
    app = await machine.boot()
    if name == "code_in_a_graph":
        await app.start(code_in_a_graph, {}, id="r")
    else:
        await app.start(CODE[name], id="r")
    ended = await is_poisoned_and_goes_on_when_cured(machine, app, "r")
    assert ended.startswith("completed: this run was stopped 3 times in a row")
    assert "workflow code raised" in ended


async def test_what_code_asked_for_in_the_turn_in_which_it_was_stopped_is_not_done(machine: Machine) -> None:
    @step
    async def tell(text: str) -> str:
        NOTES.append(text)
        return text

    @workflow
    async def telling() -> str:
        await echo(1)
        telling = asyncio.create_task(tell("too early" if SICK else "told"))
        await asyncio.sleep(0)
        stop_if_sick("SystemExit", "code")
        return await telling

    _, run = await machine.start(telling, id="r")
    await machine.until(lambda: NOTES)
    SICK.clear()
    await let_time_pass_until(machine, "r", "completed", "held")
    assert await run.result() == "told"
    assert NOTES == ["code", "code", "told"]


# -- cancellation that nobody asked the run for ----------------------------------------------------------------------
@step
async def waits() -> str:
    NOTES.append("begun")
    if SICK:
        await asyncio.Event().wait()
    return "done"


@step(timeout=1000)
async def turns_cancelling_into_an_error() -> str:
    NOTES.append("begun")
    try:
        if SICK:
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ConnectionError("the connection was closed") from None
    return "done"


@workflow
async def waiting() -> str:
    return await waits()


@workflow
async def hears() -> str:
    return await everstep.receive("word", str)


@workflow
async def stopping_on_loop() -> str:
    return await on_loop("SystemExit")


@workflow
async def waiting_with_an_error() -> str:
    return await turns_cancelling_into_an_error()


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


@pytest.mark.parametrize("which", [waiting, waiting_with_an_error])
async def test_an_application_that_cancels_all_its_tasks_leaves_runs_unfinished_and_they_go_on(
    machine: Machine, which: Any
) -> None:
    app, run = await machine.start(which, id="r")
    await machine.until(lambda: NOTES)
    cancel_all_tasks()
    await machine.until(lambda: "r" not in app.drivers)
    SICK.clear()
    await let_time_pass_until(machine, "r", "completed", "failed", "held")
    assert await run.result(timeout=60) == "done"
    assert not set(machine.kinds("r")) & set(OUTCOMES)


@pytest.mark.parametrize("stop", ["cancelled", "SystemExit"])
async def test_a_stopped_run_goes_on_although_the_store_refuses_for_a_while_to_take_it_back(
    machine: Machine, stop: str
) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store())
    fault = store.fail("commit", after=False, error=StoreFull("no room"), count=2, when=releases)
    run = await app.start(waiting if stop == "cancelled" else stopping_on_loop, id="r")
    await machine.until(lambda: NOTES)
    if stop == "cancelled":
        cancel_all_tasks()
    await machine.until(lambda: "r" not in app.drivers)
    SICK.clear()
    await let_time_pass_until(machine, "r", "completed", "failed", "held")
    assert await run.result(timeout=60) == "done"
    assert fault.fired


async def test_an_inbox_that_a_thread_reads_while_the_application_cancels_its_tasks_is_taken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, run = await machine.start(hears, id="r")
    await machine.rest(app)
    gate, inbox = threading.Event(), app.store.inbox

    def read_slowly(run: str) -> Any:
        refuse_when_brief()
        gate.wait(60)
        return inbox(run)

    monkeypatch.setattr(app.store, "inbox", read_slowly)
    await run.signal("word", "heard")
    await machine.until(lambda: "r" in app.drivers and app.drivers["r"]._is_reading)
    cancel_all_tasks()
    await asyncio.sleep(0)
    gate.set()
    assert await run.result(timeout=60) == "heard"


async def test_a_stop_whose_release_was_committed_and_not_acknowledged_counts_once(machine: Machine) -> None:
    store = FaultyStore(machine.open_store())
    app = await machine.boot(store=store.as_store())
    fault = store.fail("commit", after=True, error=StoreFull("no room"), count=2, when=releases)
    await app.start(stopping_on_loop, id="r")
    await machine.until(lambda: fault.fired == 2)
    await machine.until(lambda: machine.row("r").owner is None)
    assert machine.row("r").deaths == 1


async def test_an_application_that_ends_by_cancelling_its_tasks_counts_nothing_against_its_runs(
    machine: Machine,
) -> None:
    for life in range(5):
        app, _ = await machine.start(waiting, id="r")
        await machine.until(lambda life=life: len(NOTES) == life + 1)
        cancel_all_tasks()
        await machine.until(lambda app=app: "r" not in app.drivers)
        await machine.stop(app)
        assert machine.row("r").owner is None
        assert machine.row("r").deaths == 0
    SICK.clear()
    app, run = await machine.start(waiting, id="r")
    assert await run.result(timeout=60) == "done"


async def test_a_once_body_whose_task_is_cancelled_by_the_application_is_in_doubt(machine: Machine) -> None:
    @step(effect="once")
    async def pay() -> str:
        NOTES.append("begun")
        await asyncio.Event().wait()
        return "paid"

    @workflow
    async def paying() -> str:
        return await pay()

    _, run = await machine.start(paying, id="r")
    await machine.until(lambda: NOTES)
    cancel_all_tasks()
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "in-doubt"
    assert NOTES == ["begun"]


async def test_a_stop_lets_a_once_body_beside_it_come_to_its_end(machine: Machine) -> None:
    go_on = asyncio.Event()

    @step(effect="once")
    async def pay() -> str:
        NOTES.append("paying")
        await go_on.wait()
        NOTES.append("paid")
        return "paid"

    @workflow
    async def both() -> str:
        paying = asyncio.create_task(pay())
        await on_loop("SystemExit")
        return await paying

    app, run = await machine.start(both, id="r")
    await machine.until(lambda: sorted(NOTES) == ["begun", "paying"])
    await asyncio.sleep(0)
    go_on.set()
    await machine.until(lambda: "r" not in app.drivers)
    assert "step_doubted" not in machine.kinds("r")
    SICK.clear()
    await let_time_pass_until(machine, "r", "completed", "held")
    assert await run.result() == "paid"
    assert NOTES.count("paying") == NOTES.count("paid") == 1


# -- other functions of a user's -------------------------------------------------------------------------------------
async def test_on_hold_callbacks_that_exit_end_nothing(machine: Machine) -> None:
    @workflow
    async def stuck() -> None:
        await asyncio.Event().wait()

    def exits(hold: Any) -> None:
        NOTES.append("told")
        raise SystemExit(3)

    async def exits_later(hold: Any) -> None:
        await asyncio.sleep(0)
        NOTES.append("told later")
        raise SystemExit(3)

    app = await machine.boot(on_hold=[exits, exits_later])
    with pytest.raises(RunHeld):
        await app.run(stuck)
    await machine.until(lambda: NOTES == ["told", "told later"])
    assert await app.run(plus, 1, 2) == 3


# -- functions and objects that the engine asks ----------------------------------------------------------------------
@step(cost=lambda stop: stop_if_sick(stop) or {"usd": 0.1})  # type: ignore[func-returns-value]
async def priced(stop: str) -> str:
    return "done"


@workflow(budget=everstep.Budget(usd=1))
async def pays(stop: str) -> str:
    return await priced(stop)


@pytest.mark.parametrize("stop", [name for name in ON_THE_LOOP if name != "group"])
async def test_a_stop_in_a_cost_function_is_no_outcome_and_the_third_in_a_row_holds_the_run(
    machine: Machine, stop: str
) -> None:
    app, _ = await machine.start(pays, stop, id="r")
    ended = await is_poisoned_and_goes_on_when_cured(machine, app, "r")
    assert ended.startswith("completed: this run was stopped 3 times in a row")


async def test_a_witness_that_exits_cannot_be_observed(
    machine: Machine,
) -> None:
    SICK.clear()

    def fact() -> int:
        stop_if_sick("SystemExit", "observed")
        return 1

    @workflow
    async def watching() -> str:
        await everstep.expect(witness.value("fact", fact))
        return str(await everstep.receive("word", str))

    app, run = await machine.start(watching, id="r")
    await machine.until(lambda: "r" not in app.drivers)
    SICK.add("sick")
    await run.signal("word", "go")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "drift"
    assert await app.run(plus, 1, 2) == 3


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_judge_that_exits_leaves_the_decision_to_a_person(machine: Machine, is_async: bool) -> None:
    facts = [1]

    def judge(before: Any, after: Any) -> str:
        raise SystemExit(3)

    async def judge_on_loop(before: Any, after: Any) -> str:
        await asyncio.sleep(0)
        raise SystemExit(3)

    @workflow
    async def watching() -> str:
        await everstep.expect(witness.value("fact", lambda: facts[0]), on_drift=judge_on_loop if is_async else judge)
        return str(await everstep.receive("word", str))

    app, run = await machine.start(watching, id="r")
    await machine.until(lambda: "r" not in app.drivers)
    facts[0] = 2
    await run.signal("word", "go")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "drift"
    assert await app.run(plus, 1, 2) == 3
