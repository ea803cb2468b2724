"""Plain asyncio in workflows: what tasks share and how they end. Each lives again from every prefix of its history."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.app.app import App
from everstep.testing.clock import FakeClock
from tests.engine.lives import RUN, add, echo, fail, hang, play, prove, prove_life, settle
from tests.lasting import LastingStore

COLOUR: ContextVar[str] = ContextVar("colour", default="none")


def test_a_task_group_waits_for_all_its_tasks() -> None:
    @workflow
    async def flow() -> list[int]:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(echo(1))
            second = group.create_task(asyncio.sleep(10, 2))
            third = group.create_task(asyncio.to_thread(add, 1, 2))
        return [first.result(), second.result(), third.result()]

    assert prove(flow) == [1, 2, 3]


def test_a_failing_task_cancels_its_siblings_which_may_clean_up_durably() -> None:
    @workflow
    async def flow() -> list[Any]:
        told: list[Any] = []

        async def sibling(name: str) -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                told.append(await echo(f"{name} cleaned up"))
                raise

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(sibling("a"))
                group.create_task(sibling("b"))
                group.create_task(fail("broken"))
        except* ValueError as errors:
            told.append([str(error) for error in errors.exceptions])
        return told

    assert prove(flow) == ["a cleaned up", "b cleaned up", ["broken"]]


def test_a_task_group_s_failure_is_the_run_s_failure_and_keeps_its_members() -> None:
    @workflow
    async def flow() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail("one"))
            group.create_task(fail("two"))

    error = prove_life(flow).error
    assert isinstance(error, ExceptionGroup)
    assert [str(one) for one in error.exceptions] in (["one"], ["one", "two"])


def test_task_groups_nest_and_the_inner_failure_reaches_the_outer_one() -> None:
    @workflow
    async def flow() -> list[str]:
        told: list[str] = []
        try:
            async with asyncio.TaskGroup() as outer:
                slow = outer.create_task(asyncio.sleep(500))
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(echo("fine"))
                    inner.create_task(fail("inner"))
        except* ValueError as errors:
            told.append(repr(errors.exceptions))
        told.append(f"slow was cancelled: {slow.cancelled()}")
        return told

    assert prove(flow) == [
        "(ExceptionGroup('unhandled errors in a TaskGroup', [ValueError('inner')]),)",
        "slow was cancelled: True",
    ]


def test_a_queue_hands_items_from_producers_to_consumers_in_order() -> None:
    @workflow
    async def flow() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        done: list[int] = []

        async def consume() -> None:
            while True:
                item = await queue.get()
                done.append(await echo(item * 10))
                queue.task_done()

        consumers = [asyncio.create_task(consume()) for _ in range(3)]
        for number in range(7):
            await queue.put(number)
        await queue.join()
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        return done

    assert prove(flow) == [0, 10, 20, 30, 40, 50, 60]


def test_priority_and_last_in_first_out_queues_keep_their_orders() -> None:
    @workflow
    async def flow() -> list[int]:
        priority: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        stack: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for number in await echo([3, 1, 2]):
            await priority.put(number)
            await stack.put(number)
        await asyncio.sleep(1)
        return [await queue.get() for queue in (priority, stack) for _ in range(3)]

    assert prove(flow) == [1, 2, 3, 2, 1, 3]


def test_an_event_wakes_all_that_wait_for_it_in_the_order_of_waiting() -> None:
    @workflow
    async def flow() -> list[str]:
        event, order = asyncio.Event(), list[str]()

        async def waiter(name: str) -> None:
            await event.wait()
            order.append(await echo(name))

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(waiter(name))
            await asyncio.sleep(5)
            event.set()
        return order

    assert prove(flow) == ["a", "b", "c"]


def test_a_lock_lets_one_task_in_at_a_time_across_steps() -> None:
    @workflow
    async def flow() -> list[str]:
        lock, told = asyncio.Lock(), list[str]()

        async def careful(name: str) -> None:
            async with lock:
                told.append(f"{name} in")
                await echo(name)
                await asyncio.sleep(1)
                told.append(f"{name} out")

        await asyncio.gather(careful("a"), careful("b"))
        return told

    assert prove(flow) == ["a in", "a out", "b in", "b out"]


def test_a_condition_is_notified() -> None:
    @workflow
    async def flow() -> list[int]:
        condition, stock, sold = asyncio.Condition(), list[int](), list[int]()

        async def buyer() -> None:
            async with condition:
                await condition.wait_for(lambda: bool(stock))
                sold.append(stock.pop(0))

        async with asyncio.TaskGroup() as group:
            group.create_task(buyer())
            group.create_task(buyer())
            for number in range(2):
                item = await echo(number)
                async with condition:
                    stock.append(item)
                    condition.notify_all()
        return sold

    assert prove(flow) == [0, 1]


def test_a_semaphore_bounds_how_many_steps_run_at_once() -> None:
    running: set[int] = set()
    most = 0

    @step
    async def busy(number: int) -> int:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.discard(number)
        return number

    @workflow
    async def flow() -> list[int]:
        semaphore = asyncio.Semaphore(2)

        async def bounded(number: int) -> int:
            async with semaphore:
                return await busy(number)

        return list(await asyncio.gather(*(bounded(number) for number in range(5))))

    assert prove(flow) == [0, 1, 2, 3, 4]
    assert most == 2


def test_a_barrier_lets_all_go_when_the_last_has_come() -> None:
    @workflow
    async def flow() -> list[str]:
        barrier, told = asyncio.Barrier(3), list[str]()

        async def runner(name: str, seconds: int) -> None:
            await asyncio.sleep(seconds)
            told.append(f"{name} came")
            async with barrier as place:
                told.append(f"{name} went {place}")

        await asyncio.gather(runner("a", 3), runner("b", 1), runner("c", 2))
        return told

    assert prove(flow)[:3] == ["b came", "c came", "a came"]


def test_a_shielded_step_goes_on_when_its_waiter_is_cancelled() -> None:
    @workflow
    async def flow() -> list[str]:
        told: list[str] = []
        inner = asyncio.ensure_future(asyncio.sleep(50, "inner went on"))

        async def waiter() -> None:
            try:
                await asyncio.shield(inner)
            except asyncio.CancelledError:
                told.append("waiter cancelled")
                raise

        task = asyncio.create_task(waiter())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        told.append(await inner)
        return told

    assert prove(flow) == ["waiter cancelled", "inner went on"]


def test_a_cancelled_task_may_refuse_with_uncancel() -> None:
    @workflow
    async def flow() -> list[Any]:
        async def stubborn() -> str:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                assert task is not None
                left = task.uncancel()
                await asyncio.sleep(1)
                return f"{error.args[0]}, {left} left, {task.cancelling()} pending"
            return "?"

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        return [task.cancel("please stop"), await task, task.cancel()]

    assert prove(flow) == [True, "please stop, 0 left, 0 pending", False]


def test_a_cancelled_step_call_is_recorded_and_its_body_is_cancelled() -> None:
    @workflow
    async def flow() -> str:
        task = asyncio.create_task(hang("cancel me"))
        await asyncio.sleep(2)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "?"

    life = prove_life(flow)
    assert life.value == "cancelled"
    assert [body.step_call for body in life.bodies("step_cancelled")] == [
        body.call for body in life.bodies("step_started")
    ]


def test_a_task_that_is_cancelled_before_it_began_calls_no_step() -> None:
    @workflow
    async def flow() -> bool:
        task = asyncio.create_task(echo("never"))
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    life = prove_life(flow)
    assert life.value is True
    assert "step_started" not in life.kinds()


def test_a_step_that_is_asked_for_and_cancelled_in_one_breath_never_runs() -> None:
    begun: list[str] = []

    @step
    async def effect(name: str) -> None:
        begun.append(name)

    @workflow
    async def flow() -> bool:
        task = asyncio.create_task(effect("never"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert prove(flow) is True
    assert begun == []


def test_async_generators_await_steps_and_timers() -> None:
    @workflow
    async def flow() -> list[int]:
        async def numbers() -> AsyncIterator[int]:
            for number in range(3):
                await asyncio.sleep(1)
                yield await echo(number)

        return [number async for number in numbers()]

    assert prove(flow) == [0, 1, 2]


def test_an_abandoned_async_generator_does_nothing_behind_the_code_s_back() -> None:
    cleaned: list[str] = []

    @step
    async def clean(name: str) -> None:
        cleaned.append(name)

    @workflow
    async def flow() -> int:
        async def numbers() -> AsyncIterator[int]:
            try:
                for number in range(3):
                    yield await echo(number)
            finally:
                await clean("numbers")

        async for number in numbers():
            if number == 1:
                break
        await asyncio.sleep(1)
        return number

    life = prove_life(flow)
    assert life.value == 1
    assert [name for kind, name, _ in life.commands() if kind == "step_started"] == ["echo", "echo#2"]
    assert cleaned == []  # neither during the run nor when it left memory


def test_an_async_generator_that_is_closed_cleans_up_durably() -> None:
    @workflow
    async def flow() -> list[Any]:
        told: list[Any] = []

        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
                yield 2
            finally:
                told.append(await echo("closed"))

        generator = numbers()
        told.append(await anext(generator))
        await generator.aclose()  # type: ignore[attr-defined]
        return told

    assert prove(flow) == [1, "closed"]


def test_many_async_generators_do_not_pile_up_in_memory() -> None:
    @workflow
    async def flow() -> int:
        async def one(number: int) -> AsyncIterator[int]:
            yield number

        total = 0
        for number in range(5_000):
            async for value in one(number):
                total += value
        await everstep.receive("never")
        return total

    async def main() -> int:
        app = await App(LastingStore(), clock=FakeClock()).open()
        await app.start(flow, id=RUN)
        await settle(app)
        held = len(app.drivers[RUN].execution.loop._asyncgens._begun)
        await app.close()
        return held

    assert asyncio.run(main()) < 1_000


def test_async_context_managers_enter_and_leave_in_order() -> None:
    @workflow
    async def flow() -> list[str]:
        told: list[str] = []

        @asynccontextmanager
        async def room(name: str) -> AsyncIterator[str]:
            told.append(await echo(f"enter {name}"))
            try:
                yield name
            finally:
                told.append(await echo(f"leave {name}"))

        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(room("a"))
                async with room("b"):
                    await asyncio.sleep(1)
                    raise KeyError("out")
        except KeyError:
            told.append("caught")
        return told

    assert prove(flow) == ["enter a", "enter b", "leave b", "leave a", "caught"]


def test_a_task_that_nobody_waits_for_goes_on_as_long_as_the_run_does() -> None:
    @workflow
    async def flow() -> list[str]:
        told: list[str] = []

        async def ticker() -> None:
            while True:
                await asyncio.sleep(10)
                told.append(await echo("tick"))

        asyncio.create_task(ticker())  # noqa: RUF006  # the engine holds it
        await asyncio.sleep(25)
        return told

    life = prove_life(flow)
    assert life.value == ["tick", "tick"]
    assert life.kinds()[-1] == "run_completed"


def test_an_error_that_nobody_retrieves_is_logged_and_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    @workflow
    async def flow() -> str:
        asyncio.create_task(fail("lost"))  # noqa: RUF006
        await asyncio.sleep(10)
        return "fine"

    async def main() -> str:
        clock = FakeClock()
        app = await App(LastingStore(), clock=clock).open()
        run = await app.start(flow, id=RUN)
        await settle(app)
        gc.collect()
        assert "lost" in caplog.text
        await play(app, clock)
        result = await run.result()
        await app.close()
        return result

    assert asyncio.run(main()) == "fine"


def test_to_thread_calls_def_steps_concurrently() -> None:
    @workflow
    async def flow() -> list[int]:
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(
            asyncio.to_thread(add, 1, 1), asyncio.to_thread(add, a=2, b=2), loop.run_in_executor(None, add, 3, 3)
        )
        return list(results)

    assert prove(flow) == [2, 4, 6]


def test_context_variables_belong_to_their_run_and_reach_its_tasks() -> None:
    @workflow
    async def flow(colour: str) -> list[str]:
        seen = [COLOUR.get()]
        COLOUR.set(colour)
        await echo(1)
        seen.append(COLOUR.get())

        async def other() -> str:
            before = COLOUR.get()
            COLOUR.set("changed")
            await asyncio.sleep(1)
            return f"{before} {COLOUR.get()}"

        seen += await asyncio.gather(other(), other())
        seen.append(COLOUR.get())
        return seen

    COLOUR.set("outside")
    assert prove(flow, "red") == ["none", "red", "red changed", "red changed", "red"]
    assert prove(flow, "blue") == ["none", "blue", "blue changed", "blue changed", "blue"]


def test_ids_of_concurrent_steps_follow_the_program_and_not_their_speed() -> None:
    @step(name="turns", effect="read")
    async def turns(count: int) -> int:
        for _ in range(count):
            await asyncio.sleep(0)
        return count

    @workflow
    async def flow() -> list[int]:
        first = await asyncio.gather(*(turns(count) for count in (9, 5, 1)))
        second = await asyncio.gather(*(turns(count) for count in (2, 8)))
        return [*first, *second]

    life = prove_life(flow)
    assert life.value == [9, 5, 1, 2, 8]
    started = [
        (event.step, body.preview)
        for event, body in zip(
            [e for e in life.events if e.kind == "step_started"], life.bodies("step_started"), strict=True
        )
    ]
    assert started == [
        ("turns", "[[9]]"),
        ("turns#2", "[[5]]"),
        ("turns#3", "[[1]]"),
        ("turns#4", "[[2]]"),
        ("turns#5", "[[8]]"),
    ]


def test_the_run_s_clock_stands_still_while_code_runs_and_never_goes_back() -> None:
    @workflow
    async def flow() -> list[bool]:
        times = []
        for _ in range(3):
            times.append(everstep.now())
            assert everstep.now() == times[-1]
            await asyncio.sleep(1)
        return [later > earlier for earlier, later in itertools.pairwise(times)]

    assert prove(flow) == [True, True]


def test_chance_is_the_same_in_every_life_and_another_in_every_run() -> None:
    @workflow
    async def flow() -> list[Any]:
        first = everstep.random().random()
        await echo(first)
        return [first, everstep.random().randrange(10**9), everstep.uuid(), await echo(str(everstep.uuid()))]

    one, other = prove(flow), prove(flow)
    assert one[2].version == 4
    assert all(a != b for a, b in zip(one, other, strict=True))
