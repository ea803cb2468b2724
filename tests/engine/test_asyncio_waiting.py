"""Plain asyncio in workflows: what waits. Each workflow lives once, and again from every prefix of its history."""

import asyncio
import sys
from asyncio import as_completed, wait_for

import pytest

from everstep import workflow
from tests.engine.lives import add, echo, fail, hang, prove, prove_life

DAY = 86_400.0


def test_sleep_is_a_durable_timer_and_returns_its_result() -> None:
    @workflow
    async def flow() -> list[float | str]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        word = await asyncio.sleep(DAY, "awake")
        return [word, loop.time() - began]

    life = prove_life(flow)
    assert life.value == ["awake", DAY]
    assert life.kinds() == ["run_started", "timer_started", "timer_fired", "run_completed"]


def test_sleep_zero_and_less_only_lets_others_run_and_records_nothing() -> None:
    @workflow
    async def flow() -> list[str]:
        order: list[str] = []

        async def one(name: str) -> None:
            order.append(f"{name}1")
            await asyncio.sleep(0)
            order.append(f"{name}2")
            await asyncio.sleep(-1)
            order.append(f"{name}3")

        await asyncio.gather(one("a"), one("b"))
        return order

    life = prove_life(flow)
    assert life.value == ["a1", "b1", "a2", "b2", "a3", "b3"]
    assert life.kinds() == ["run_started", "run_completed"]


def test_sleep_forever_is_a_timer_that_can_be_cancelled() -> None:
    @workflow
    async def flow() -> str:
        forever = asyncio.create_task(asyncio.sleep(float("inf")))
        await asyncio.sleep(1)
        forever.cancel()
        try:
            await forever
        except asyncio.CancelledError:
            return "cancelled"
        return "?"

    assert prove(flow) == "cancelled"


def test_timers_fire_in_the_order_of_their_deadlines_whatever_the_order_of_their_creation() -> None:
    @workflow
    async def flow() -> list[int]:
        order: list[int] = []

        async def nap(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(*(nap(seconds) for seconds in (5, 1, 4, 2, 3)))
        return order

    assert prove(flow) == [1, 2, 3, 4, 5]


def test_gather_returns_results_in_the_order_of_its_arguments() -> None:
    @workflow
    async def flow() -> list[object]:
        return list(await asyncio.gather(echo(1), asyncio.sleep(3, 2), echo(3), asyncio.to_thread(add, 2, 2)))

    assert prove(flow) == [1, 2, 3, 4]


def test_gather_raises_the_first_error_and_the_others_go_on() -> None:
    @workflow
    async def flow() -> list[object]:
        other = asyncio.ensure_future(asyncio.sleep(5, "late"))
        try:
            await asyncio.gather(fail("first"), other)
        except ValueError as error:
            return [str(error), await other]
        return []

    assert prove(flow) == ["first", "late"]


def test_gather_returns_exceptions_among_results_if_asked() -> None:
    @workflow
    async def flow() -> list[str]:
        results = await asyncio.gather(echo(1), fail("two"), asyncio.sleep(1, 3), return_exceptions=True)
        return [f"{type(one).__name__} {one}" for one in results]

    assert prove(flow) == ["int 1", "ValueError two", "int 3"]


def test_wait_returns_the_first_completed_and_the_rest() -> None:
    @workflow
    async def flow() -> list[list[str]]:
        tasks = [asyncio.create_task(asyncio.sleep(n, f"slept {n}"), name=f"nap {n}") for n in (3, 1, 2)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        names = [sorted(task.get_name() for task in done), sorted(task.get_name() for task in pending)]
        done, pending = await asyncio.wait(pending)
        assert not pending
        return [*names, sorted(task.result() for task in done)]

    assert prove(flow) == [["nap 1"], ["nap 2", "nap 3"], ["slept 2", "slept 3"]]


def test_wait_iterates_its_sets_in_the_same_order_in_every_life() -> None:
    @workflow
    async def flow() -> list[int]:
        tasks = [asyncio.create_task(echo(n)) for n in range(20)]
        done, _ = await asyncio.wait(tasks)
        order = [task.result() for task in done]
        for number in order:  # the order becomes part of the history
            await echo(number)
        return order

    assert sorted(prove(flow)) == list(range(20))


def test_wait_with_first_exception_and_with_a_timeout() -> None:
    @workflow
    async def flow() -> list[int]:
        slow = asyncio.create_task(asyncio.sleep(10))
        bad = asyncio.create_task(fail("bad"))
        done, pending = await asyncio.wait([slow, bad], return_when=asyncio.FIRST_EXCEPTION)
        first = [len(done), len(pending), int(bad in done)]
        done, pending = await asyncio.wait([slow], timeout=2)
        return [*first, len(done), len(pending)]

    assert prove(flow) == [1, 1, 1, 0, 1]


def test_as_completed_yields_in_the_order_of_completion() -> None:
    @workflow
    async def flow() -> list[int]:
        return [await one for one in asyncio.as_completed([asyncio.sleep(n, n) for n in (3, 1, 2)])]

    assert prove(flow) == [1, 2, 3]


def test_as_completed_makes_its_tasks_in_the_order_of_its_arguments() -> None:
    @workflow
    async def flow() -> list[int]:
        return [await one for one in asyncio.as_completed([echo(n) for n in range(30)])]

    life = prove_life(flow, every_prefix=False)
    assert [body.preview for body in life.bodies("step_started")] == [f"[[{n}]]" for n in range(30)]
    assert sorted(life.value) == list(range(30))


def test_as_completed_that_was_imported_by_name_is_deterministic_too() -> None:
    @workflow
    async def flow() -> list[int]:
        return [await one for one in as_completed([echo(n) for n in range(30)])]

    life = prove_life(flow, every_prefix=False)
    assert [body.preview for body in life.bodies("step_started")] == [f"[[{n}]]" for n in range(30)]


def test_next_of_as_completed_gives_the_fastest() -> None:
    @workflow
    async def flow() -> str:
        return await next(iter(asyncio.as_completed([asyncio.sleep(9, "slow"), echo("fast")])))

    @workflow
    async def bare() -> str:
        return await next(asyncio.as_completed([asyncio.sleep(9, "slow"), echo("fast")]))  # type: ignore[call-overload]

    assert prove(flow) == "fast"
    assert prove(bare) == "fast"


def test_as_completed_with_a_timeout_gives_what_was_ready_and_then_times_out() -> None:
    @workflow
    async def flow() -> list[str]:
        found: list[str] = []
        for one in asyncio.as_completed([asyncio.sleep(1, "a"), asyncio.sleep(50, "b"), echo("c")], timeout=10):
            try:
                found.append(await one)
            except TimeoutError:
                found.append("late")
        return found

    assert prove(flow) == ["c", "a", "late"]


def test_async_for_over_as_completed_gives_the_tasks_themselves() -> None:
    @workflow
    async def flow() -> list[object]:
        tasks = [asyncio.create_task(asyncio.sleep(n, n), name=str(n)) for n in (2, 1)]
        found: list[object] = []
        async for task in asyncio.as_completed(tasks):  # type: ignore[attr-defined]
            found += [task.get_name(), task in tasks, await task]
        return found

    assert prove(flow) == ["1", True, 1, "2", True, 2]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there it is asyncio's own")
def test_outside_workflows_as_completed_is_asyncio_s_own() -> None:
    async def main() -> list[int]:
        tasks = [asyncio.create_task(asyncio.sleep(0, 1))]
        with pytest.raises(TypeError):
            aiter(asyncio.as_completed(tasks))  # type: ignore[call-overload]
        return [await one for one in as_completed([asyncio.sleep(0, 1)])]

    prove(_nothing)  # the engine's versions are in place now
    assert asyncio.run(main()) == [1]


@workflow
async def _nothing() -> None:
    return None


def test_timeout_interrupts_a_sleep_and_nests() -> None:
    @workflow
    async def flow() -> list[str]:
        told: list[str] = []
        try:
            async with asyncio.timeout(10):
                try:
                    async with asyncio.timeout(3):
                        await asyncio.sleep(100)
                except TimeoutError:
                    told.append("inner")
                await asyncio.sleep(100)
        except TimeoutError:
            told.append("outer")
        return told

    assert prove(flow) == ["inner", "outer"]


def test_timeout_can_be_moved_and_says_whether_it_expired() -> None:
    @workflow
    async def flow() -> list[object]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(1) as limit:
            limit.reschedule(loop.time() + 50)
            await asyncio.sleep(20)
        first = limit.expired()
        began = loop.time()
        try:
            async with asyncio.timeout_at(loop.time() + 5) as limit:
                await asyncio.sleep(50)
        except TimeoutError:
            pass
        return [first, limit.expired(), loop.time() - began]

    assert prove(flow) == [False, True, 5.0]


def test_a_timeout_cancels_a_step_that_takes_too_long() -> None:
    @workflow
    async def flow() -> str:
        try:
            async with asyncio.timeout(30):
                return await hang("too long")
        except TimeoutError:
            return await echo("gave up")

    life = prove_life(flow)
    assert life.value == "gave up"
    assert life.kinds().count("step_cancelled") == 1


def test_wait_for_returns_in_time_or_times_out() -> None:
    @workflow
    async def flow() -> list[str]:
        told = [await asyncio.wait_for(asyncio.sleep(1, "in time"), 5)]
        try:
            await asyncio.wait_for(asyncio.sleep(10, "never"), 5)
        except TimeoutError:
            told.append("late")
        told.append(await wait_for(echo("no limit"), None))
        return told

    assert prove(flow) == ["in time", "late", "no limit"]


def test_wait_for_without_time_gives_what_is_done_and_cancels_what_is_not() -> None:
    @workflow
    async def flow() -> list[str]:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result("done")
        told = [await asyncio.wait_for(done, 0)]

        async def stubborn() -> str:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                return "stubborn"
            return "?"

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        told.append(await asyncio.wait_for(task, 0))
        task = asyncio.create_task(asyncio.sleep(10, "?"))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(task, 0)
        except TimeoutError:
            told.append(f"late, cancelled: {task.cancelled()}")
        return told

    assert prove(flow) == ["done", "stubborn", "late, cancelled: True"]


def test_a_cancel_during_wait_for_is_a_cancel_and_no_timeout() -> None:
    @workflow
    async def flow() -> str:
        async def slow_to_stop() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(10)

        inner = asyncio.create_task(slow_to_stop())
        await asyncio.sleep(0)
        outer = asyncio.create_task(asyncio.wait_for(inner, 0))
        await asyncio.sleep(1)
        outer.cancel()
        try:
            await outer
        except asyncio.CancelledError:
            return "cancelled"
        except TimeoutError:
            return "timed out"
        return "?"

    assert prove(flow) == "cancelled"
