"""`def` workflows: the same durability without `await`, and without a thread for each run."""

import asyncio
import contextvars
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import blocking, step, workflow
from everstep.engine.app.app import App
from everstep.errors import Misuse
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, add, echo, prove, prove_life, settle
from tests.engine.processes import notes, run
from tests.lasting import LastingStore

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


@step
def double(number: int) -> int:
    return number * 2


@step
def broken(text: str) -> None:
    raise ValueError(text)


def test_steps_are_called_like_functions() -> None:
    @workflow
    def flow(number: int) -> int:
        return add(double(number), double(number + 1))

    life = prove_life(flow, 5)
    assert life.value == 22
    assert life.kinds().count("step_started") == 3


def test_an_async_step_cannot_be_called_without_await() -> None:
    @workflow
    def flow() -> Any:
        return echo(1)

    error = prove_life(flow).error
    assert type(error) is Misuse
    assert "return echo(1)" in str(error)
    assert "make the workflow `async`" in str(error)


def test_sleep_is_a_durable_timer() -> None:
    @workflow
    def flow() -> float:
        began = everstep.now()
        blocking.sleep(86_400)
        return (everstep.now() - began).total_seconds()

    life = prove_life(flow)
    assert life.value == 86_400
    assert "timer_started" in life.kinds()


def test_receive_waits_for_signals_in_order_and_times_out() -> None:
    @workflow
    def flow() -> list[Any]:
        told: list[Any] = [blocking.receive("word", str), blocking.receive("word", str)]
        try:
            blocking.receive("never", str, timeout=60)
        except TimeoutError:
            told.append("timed out")
        return told

    assert prove(flow, signals=[("word", "a"), ("word", "b")], same_commands=False) == ["a", "b", "timed out"]


def test_gather_runs_functions_concurrently_and_keeps_their_order() -> None:
    @workflow
    def flow() -> list[Any]:
        order: list[str] = []

        def slow() -> str:
            blocking.sleep(10)
            order.append("slow")
            return "slow"

        def quick() -> int:
            order.append("quick")
            return double(4)

        return [*blocking.gather(slow, quick, lambda: double(1)), order]

    assert prove(flow) == ["slow", 8, 2, ["quick", "slow"]]


def test_gather_nests_and_raises_the_first_error() -> None:
    @workflow
    def flow() -> list[Any]:
        def inner() -> list[Any]:
            return blocking.gather(lambda: double(1), lambda: double(2))

        found = blocking.gather(inner, lambda: double(3))
        try:
            blocking.gather(lambda: broken("one"), lambda: blocking.sleep(5))
        except ValueError as error:
            found.append(str(error))
        return found

    assert prove(flow) == [[2, 4], 6, "one"]


def test_gather_of_nothing_is_nothing() -> None:
    @workflow
    def flow() -> list[Any]:
        return blocking.gather()

    assert prove(flow) == []


def test_a_step_s_error_is_raised_where_it_was_called_and_finally_blocks_run() -> None:
    @workflow
    def flow() -> list[str]:
        told: list[str] = []
        try:
            try:
                broken("inner")
            finally:
                told.append(str(double(1)))
        except ValueError as error:
            told.append(str(error))
        return told

    assert prove(flow) == ["2", "inner"]


def test_a_step_is_called_from_deep_inside_plain_functions_and_generators() -> None:
    @workflow
    def flow() -> list[int]:
        def numbers() -> Any:
            for number in range(3):
                yield double(number)

        return sorted((value for value in numbers()), key=lambda value: -double(value))

    assert prove(flow) == [4, 2, 0]


def test_children_are_started_and_waited_for() -> None:
    @workflow
    def child(number: int) -> int:
        return double(number)

    @workflow
    def flow() -> list[Any]:
        started = blocking.start(child, 3, id="the-child")
        return [started.id, child(1), started.result()]

    async def main() -> Any:
        clock = FakeClock()
        app = await App(LastingStore(), clock=clock).open()
        result = await (await app.start(flow, id=RUN)).result(timeout=60)
        await app.close()
        return result

    assert asyncio.run(main()) == ["the-child", 2, 6]


def test_an_async_workflow_calls_a_def_workflow_as_a_child_by_to_thread() -> None:
    @workflow
    def child(number: int) -> int:
        return double(number)

    @workflow
    async def flow() -> int:
        return await asyncio.to_thread(child, 4)

    async def main() -> Any:
        app = await App(LastingStore(), clock=FakeClock()).open()
        result = await (await app.start(flow, id=RUN)).result(timeout=60)
        await app.close()
        return result

    assert asyncio.run(main()) == 8


def test_time_chance_and_published_values_work() -> None:
    @workflow
    def flow() -> list[Any]:
        first = everstep.random().random()
        everstep.publish("first", first)
        double(1)
        return [first, str(everstep.uuid()), everstep.now().isoformat()[:4], everstep.current().run]

    assert prove(flow)[2:] == ["2033", RUN]


def test_context_variables_keep_their_values_across_waits() -> None:
    @workflow
    def flow() -> list[str]:
        PLACE.set("in the run")
        double(1)

        def other() -> str:
            before = PLACE.get()
            PLACE.set("in the other")
            blocking.sleep(1)
            return f"{before}, {PLACE.get()}"

        return [*blocking.gather(other, other), PLACE.get()]

    PLACE.set("outside")
    assert prove(flow) == ["in the run, in the other", "in the run, in the other", "in the run"]
    assert PLACE.get() == "outside"


def test_a_recursion_too_deep_fails_the_run_and_nothing_else() -> None:
    @workflow
    def flow() -> int:
        def deeper(number: int) -> int:
            return deeper(number + 1) + 1

        return deeper(0)

    assert isinstance(prove_life(flow).error, RecursionError)


def test_blocking_calls_say_where_they_belong() -> None:
    @workflow
    async def flow() -> str:
        try:
            blocking.sleep(1)
        except Misuse as error:
            return str(error)
        return "?"

    assert "await everstep.sleep" in prove(flow)
    for call in (
        lambda: blocking.sleep(1),
        lambda: blocking.receive("x"),
        blocking.gather,
        lambda: blocking.start("x"),
    ):
        with pytest.raises(Misuse):
            call()


def test_a_cancel_reaches_plain_code_as_cancelled_error_and_it_may_clean_up() -> None:
    told: list[Any] = []

    @workflow
    def flow() -> None:
        try:
            blocking.sleep(1000)
        except asyncio.CancelledError:
            told.append(double(21))
            raise

    async def main() -> str:
        clock = FakeClock()
        app = await App(LastingStore(), clock=clock).open()
        handle = await app.start(flow, id=RUN)
        await settle(app)
        await handle.cancel("enough")
        with pytest.raises(everstep.errors.RunCancelled):
            await handle.result(timeout=60)
        status = await handle.status()
        await app.close()
        return status

    assert asyncio.run(main()) == "cancelled"
    assert told == [42]


def test_a_def_workflow_dropped_from_memory_is_replayed_and_goes_on() -> None:
    @workflow
    def flow() -> list[Any]:
        before = double(1)
        word = blocking.receive("word", str)
        return [before, word, double(2)]

    async def main() -> list[Any]:
        store = LastingStore()
        app = await App(store, clock=FakeClock()).open()
        await app.start(flow, id=RUN)
        await settle(app)
        app.resting._evict(app.drivers[RUN])
        assert RUN not in app.drivers
        handle = app.get(RUN)
        await handle.signal("word", "again")
        result = await handle.result(timeout=60)
        kinds = [event.kind for event in await handle.history()]
        assert kinds.count("step_started") == 2
        await app.close()
        return result  # type: ignore[no-any-return]

    assert asyncio.run(main()) == [2, "again", 4]


async def test_five_hundred_def_workflows_wait_at_once_without_threads() -> None:
    @workflow
    def flow(number: int) -> int:
        blocking.sleep(60)
        word: int = blocking.receive("word", int)
        return number + word

    clock = FakeClock()
    app = await App(LastingStore(), clock=clock).open()
    before = threading.active_count()
    runs = [await app.start(flow, number, id=f"run-{number}") for number in range(500)]
    await settle(app)
    assert threading.active_count() <= before + 2  # the committer's, and the one that renews the lease
    clock.advance(60)
    await settle(app)
    await asyncio.gather(*(one.signal("word", 1000) for one in runs))
    results = await asyncio.gather(*(one.result(timeout=60) for one in runs))
    assert results == [number + 1000 for number in range(500)]
    assert threading.active_count() <= before + 2
    await app.close()


def test_a_killed_process_s_def_workflow_goes_on_in_the_next_one(tmp_path: Path) -> None:
    status, output = run("plain_def", tmp_path)
    assert status == 9, output
    assert output == "plain begins\n"
    (tmp_path / "second-life").touch()
    status, output = run("plain_def", tmp_path)
    assert status == 0, output
    assert output == "plain ends\n"  # what was printed before is not printed again
    told = notes(tmp_path)
    told[1:3] = sorted(told[1:3])  # these two run at the same time
    assert told == ["stamp ann", "stamp x", "stamp y", "stamp end", "['ANN', 'X', 'Y', 'go', 'END']"]


def test_code_that_waits_leaves_no_stack_behind_when_its_run_leaves_memory() -> None:
    told: list[str] = []

    @workflow
    def flow() -> None:
        try:
            blocking.sleep(1000)
        except Exception:  # noqa: BLE001
            told.append("caught")
        finally:
            told.append("finally")
            double(1)
            told.append("never")

    async def main() -> list[str]:
        app = await App(LastingStore(), clock=FakeClock()).open()
        handle = await app.start(flow, id=RUN)
        await settle(app)
        await app.close()
        return [event.kind for event in await handle.history()]

    assert asyncio.run(main()) == ["run_started", "timer_started"]
    assert told == ["finally"]
