"""A body's first turn is taken without a task of its own; nobody can tell, except by the clock."""

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.run.eager_start import FirstTurns, take_first_turn
from tests.waiting import DEADLINE_SECONDS

Traced = Callable[[list[Any], "asyncio.Future[Any]"], Awaitable[None]]
COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


# -- the same as under a task ----------------------------------------------------------------------------------------
async def ends_at_once(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    trace.append("ended")


async def asks_for_its_task(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    task = asyncio.current_task()
    assert task is not None
    trace += [task.get_name(), task.cancelling(), task.done(), task.get_loop() is asyncio.get_running_loop()]
    trace += [task in asyncio.all_tasks(), isinstance(task, asyncio.Task), "coro=" in repr(task), {task: 1}[task]]
    await asyncio.sleep(0)
    trace.append(asyncio.current_task() is task)


async def keeps_its_task(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    task = asyncio.current_task()
    for _ in range(3):
        await asyncio.sleep(0)
        trace.append(asyncio.current_task() is task)
    trace.append(task in asyncio.all_tasks())


async def yields(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    for number in range(3):
        trace.append(number)
        await asyncio.sleep(0)


async def waits(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    try:
        trace.append(await shared)
    except asyncio.CancelledError as error:
        trace.append(("cancelled", error.args))
        raise
    finally:
        trace.append("cleaned up")


async def waits_for_a_task_that_does_not_give_up(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    async def stubborn() -> str:
        with suppress(asyncio.CancelledError):
            await shared
        return "all the same"

    trace.append(await asyncio.create_task(stubborn()))


async def waits_in_a_group(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("one of them")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(60)
    except* ValueError as error:
        trace.append(str(error.exceptions[0]))


async def waits_in_time(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    try:
        async with asyncio.timeout(0.05) as limit:
            await asyncio.sleep(60)
    except TimeoutError:
        trace.append(("late", limit.expired()))
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(60), 0.05)
    trace.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]


async def cancels_itself(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel("enough")
    trace.append(task.cancelling())
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as error:
        trace.append(error.args)
        trace.append(task.uncancel())
    await asyncio.sleep(0)
    trace.append("went on")


async def cancels_itself_and_ends(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    trace.append("ended")


async def raises_at_once(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    with suppress(LookupError):
        raise LookupError
    trace.append("raised")


async def has_generators(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(0)
            yield 2
        finally:
            trace.append("closed")

    async with aclosing(numbers()) as opened:
        async for number in opened:
            await asyncio.sleep(0)
            trace.append(number)


async def awaits_wrongly(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    class Wrong:
        def __await__(self) -> Any:
            yield 5

    try:
        await Wrong()
    except RuntimeError as error:
        trace.append("bad yield" in str(error))


async def awaits_what_belongs_elsewhere(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    elsewhere = asyncio.new_event_loop()
    try:
        await elsewhere.create_future()
    except RuntimeError as error:
        trace.append("different loop" in str(error))
    finally:
        elsewhere.close()


async def paints(trace: list[Any], shared: "asyncio.Future[Any]") -> None:
    trace.append(COLOUR.get())
    COLOUR.set("red")
    await asyncio.sleep(0)
    trace.append(COLOUR.get())


BODIES: list[Traced] = [
    ends_at_once,
    asks_for_its_task,
    keeps_its_task,
    yields,
    waits,
    waits_for_a_task_that_does_not_give_up,
    waits_in_a_group,
    waits_in_time,
    cancels_itself,
    cancels_itself_and_ends,
    raises_at_once,
    has_generators,
    awaits_wrongly,
    awaits_what_belongs_elsewhere,
    paints,
]


async def traced(body: Traced, cancelled_after: int | None, *, first_turn: bool) -> list[Any]:
    """Run a body, cancel its task after some turns, then let what it waits for be done; return what it saw."""
    loop = asyncio.get_running_loop()
    trace: list[Any] = []
    shared = loop.create_future()
    tasks: list[asyncio.Task[Any]] = []
    ended = asyncio.Event()

    async def perform() -> None:
        if cancelled_after is not None:
            tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await body(trace, shared)
            trace.append("end")
        except BaseException as error:  # noqa: BLE001
            trace.append(type(error))
        finally:
            ended.set()

    context = contextvars.copy_context()
    if first_turn:
        loop.call_soon(lambda: take_first_turn(perform(), loop, "the step", context))
    else:
        _made = asyncio.Task(perform(), loop=loop, name="the step", context=context)
    await asyncio.sleep(0)
    if cancelled_after is not None:
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        tasks[0].cancel("stop")
    else:
        loop.call_later(0.005, lambda: shared.done() or shared.set_result("shared"))
    await asyncio.wait_for(ended.wait(), 5)
    trace.append(shared.cancelled())
    return trace


RACING: list[Traced] = [
    waits_for_a_task_that_does_not_give_up,
    waits_in_a_group,
    cancels_itself,
    awaits_wrongly,
    awaits_what_belongs_elsewhere,
]
"""A body's task takes over a turn after its first one, so with these it is open whether a cancel comes first."""
CASES = [(body, turns) for body in BODIES for turns in (None, 0, 1, 2) if turns is None or body not in RACING]


@pytest.mark.parametrize(("body", "cancelled_after"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_a_body_sees_what_it_would_see_under_a_task(body: Traced, cancelled_after: int | None) -> None:
    async def main() -> None:
        under_a_task = await traced(body, cancelled_after, first_turn=False)
        assert await traced(body, cancelled_after, first_turn=True) == under_a_task

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize("turns", range(6))
def test_a_body_that_is_cancelled_cancels_what_it_waits_for_first(turns: int) -> None:
    async def main() -> list[Any]:
        return await traced(waits_for_a_task_that_does_not_give_up, turns, first_turn=True)

    stubborn, never_begun = ["all the same", "end", True], [asyncio.CancelledError, False]
    assert asyncio.run(main(), debug=True) in ([stubborn] if turns else [stubborn, never_begun])


def test_two_bodies_wait_for_one_future_in_their_first_turns() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        shared: asyncio.Future[str] = loop.create_future()
        seen: list[str] = []

        async def body() -> None:
            seen.append(await shared)

        def turns() -> None:
            for _ in range(3):
                take_first_turn(body(), loop, "step", contextvars.copy_context())
            shared.set_result("done")

        loop.call_soon(turns)
        await asyncio.sleep(0.01)
        return seen

    assert asyncio.run(main()) == ["done"] * 3


def test_a_task_that_was_kept_and_never_asked_can_be_awaited_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        kept: list[asyncio.Task[Any]] = []

        async def body() -> None:
            kept.append(asyncio.current_task())  # type: ignore[arg-type]

        loop.call_soon(lambda: take_first_turn(body(), loop, "step", contextvars.copy_context()))
        await asyncio.sleep(0.001)
        gc.collect()
        assert asyncio.current_task() is not kept[0]
        await asyncio.wait_for(kept[0], 1)
        assert kept[0].done()

    asyncio.run(main())


def test_an_interrupt_in_a_first_turn_reaches_the_loop_and_no_task_stays_current() -> None:
    async def body() -> None:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    loop.call_soon(lambda: take_first_turn(body(), loop, "step", contextvars.copy_context()))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert asyncio.current_task(loop) is None
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_bodies_that_lead_to_bodies_leave_the_loop_to_others() -> None:
    """They go on until others have had some turns, which they never have if the loop is not left to them."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        turns = FirstTurns(loop)
        ends, ticks = loop.time() + DEADLINE_SECONDS, 0

        class Endless:
            def begin(self, attempt: Any) -> Any:
                return self.perform()

            async def perform(self) -> None:
                if ticks < 6 and loop.time() < ends:
                    turns.add(self, None, "step", contextvars.copy_context())

            def goes_on(self, attempt: Any, task: Any) -> None:
                raise AssertionError("it never waits")

        turns.add(Endless(), None, "step", contextvars.copy_context())
        while ticks < 6 and loop.time() < ends:
            await asyncio.sleep(0)
            ticks += 1
        return ticks

    assert asyncio.run(main()) == 6


# -- in runs ---------------------------------------------------------------------------------------------------------
@step(name="painting", effect="read")
async def painting(colour: str) -> str:
    before = COLOUR.get()
    COLOUR.set(colour)
    return before


@workflow(name="painters")
async def painters() -> list[str]:
    return [await painting("red"), await painting("blue"), COLOUR.get()]


def test_what_a_body_sets_in_its_context_nobody_else_sees() -> None:
    async def main() -> None:
        COLOUR.set("green")
        async with everstep.open("memory:") as app:
            COLOUR.set("yellow")
            assert await app.run(painters) == ["green", "green", "none"]
            assert COLOUR.get() == "yellow"

    asyncio.run(main())


STARTED: list[str] = []


@step(name="noted", effect="read")
async def noted(name: str) -> str:
    STARTED.append(name)
    return name


@workflow(name="changes_its_mind")
async def changes_its_mind() -> str:
    other = asyncio.create_task(noted("unwanted"))
    first = asyncio.create_task(noted("first"))
    await asyncio.sleep(0)
    other.cancel()
    with suppress(asyncio.CancelledError):
        await other
    return await first


def test_a_step_that_was_cancelled_before_its_turn_never_begins() -> None:
    async def main() -> None:
        STARTED.clear()
        async with everstep.open("memory:") as app:
            run = await app.start(changes_its_mind)
            assert await run.result() == "first"
            assert STARTED == ["first"]

    asyncio.run(main())


@step(name="in_time", effect="read")
async def in_time() -> str:
    async with asyncio.timeout(0.005):
        await asyncio.sleep(60)
    return "never"


@step(name="in_groups", effect="read", timeout=5.0)
async def in_groups() -> int:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asyncio.sleep(0, number)) for number in range(3)]
    return sum(task.result() for task in tasks)


@workflow(name="uses_all_of_asyncio")
async def uses_all_of_asyncio() -> list[Any]:
    seen: list[Any] = [await in_groups()]
    try:
        await in_time()
    except TimeoutError:
        seen.append("late")
    return seen


def test_bodies_use_timeouts_and_groups_from_their_first_line_on() -> None:
    async def main() -> None:
        async with everstep.open("memory:") as app:
            assert await app.run(uses_all_of_asyncio) == [3, "late"]

    asyncio.run(main())


@workflow(name="many_reads")
async def many_reads(times: int) -> int:
    for number in range(times):
        await noted(str(number))
    return times


def test_the_outcomes_of_bodies_that_never_wait_are_recorded_in_order_and_none_is_early() -> None:
    async def main() -> None:
        async with everstep.open("memory:") as app:
            run = await app.start(many_reads, 200)
            assert await run.result() == 200
            events = [event for event in await run.history() if event.kind.startswith("step_")]
            assert [event.kind for event in events] == ["step_started", "step_completed"] * 200
            assert not any(event.body.get("early") for event in events)

    asyncio.run(main())
