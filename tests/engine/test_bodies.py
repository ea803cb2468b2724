"""Bodies of steps that never wait share a task of the application's loop; each sees what it would see in its own."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

import everstep
from everstep import step, workflow
from everstep.engine.run.attempts import BodyTasks
from tests.waiting import DEADLINE_SECONDS
from tests.waiting import wait_on_loop_until as until

Traced = Callable[[list[Any], "asyncio.Future[Any]"], Awaitable[None]]
COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Run:
    """The bodies of a run that does not exist."""

    def __init__(self) -> None:
        self.running: dict[int, Any] = {}
        self.stumbled: list[BaseException] = []

    def stumble(self, error: BaseException) -> None:
        self.stumbled.append(error)


class Bodies:
    """Lets coroutines run as the bodies of steps do."""

    def __init__(self) -> None:
        self.run = Run()
        self.tasks = BodyTasks(asyncio.get_running_loop(), contextvars.copy_context())

    def add(self, body: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context | None = None) -> Any:
        number = len(self.run.running)
        attempt = SimpleNamespace(bodies=self.run, call=SimpleNamespace(call=number), step="the step", task=None)
        self.run.running[number] = attempt
        performs: Any = lambda attempt: body()  # noqa: E731
        self.tasks.add(performs, cast(Any, attempt), context or contextvars.copy_context())
        return attempt


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


async def traced(body: Traced, cancelled_after: int | None, *, shares_a_task: bool) -> list[Any]:
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
    if shares_a_task:
        Bodies().add(perform, context)
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


CASES = [(body, turns) for body in BODIES for turns in (None, 0, 1, 2)]


@pytest.mark.parametrize(("body", "cancelled_after"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_a_body_sees_what_it_would_see_under_a_task(body: Traced, cancelled_after: int | None) -> None:
    async def main() -> None:
        under_a_task = await traced(body, cancelled_after, shares_a_task=False)
        assert await traced(body, cancelled_after, shares_a_task=True) == under_a_task

    asyncio.run(main(), debug=True)


@pytest.mark.parametrize("turns", range(6))
def test_a_body_that_is_cancelled_cancels_what_it_waits_for_first(turns: int) -> None:
    async def main() -> list[Any]:
        return await traced(waits_for_a_task_that_does_not_give_up, turns, shares_a_task=True)

    stubborn, never_begun = ["all the same", "end", True], [asyncio.CancelledError, False]
    assert asyncio.run(main(), debug=True) in ([stubborn] if turns else [stubborn, never_begun])


def test_bodies_that_wait_for_one_future_all_get_it() -> None:
    async def main() -> list[str]:
        shared: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        seen: list[str] = []

        async def body() -> None:
            seen.append(await shared)

        bodies = Bodies()
        for _ in range(3):
            bodies.add(body)
        await asyncio.sleep(0.01)
        shared.set_result("done")
        await until(lambda: len(seen) == 3)
        return seen

    assert asyncio.run(main()) == ["done"] * 3


async def test_a_task_that_was_kept_can_be_awaited_later() -> None:
    kept: list[asyncio.Task[Any]] = []

    async def body() -> None:
        kept.append(asyncio.current_task())  # type: ignore[arg-type]

    Bodies().add(body)
    await until(lambda: bool(kept))
    await asyncio.wait_for(kept[0], DEADLINE_SECONDS)
    assert kept[0].done()


async def test_bodies_whose_task_is_cancelled_before_it_begins_begin_in_another_one() -> None:
    begun: list[int] = []

    async def body() -> None:
        begun.append(1)

    bodies, others = Bodies(), asyncio.all_tasks()
    for _ in range(3):
        bodies.add(body)
    for task in asyncio.all_tasks() - others:
        task.cancel()
    await until(lambda: len(begun) == 3)


async def test_a_body_that_cancels_its_task_and_ends_takes_no_other_with_it() -> None:
    begun: list[int] = []

    async def cancels() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]

    async def body() -> None:
        await asyncio.sleep(0)
        begun.append(1)

    bodies = Bodies()
    for one in (cancels, body, cancels, body):
        bodies.add(one)
    await until(lambda: len(begun) == 2)


async def test_a_body_that_cannot_begin_is_told_to_its_run_and_keeps_no_other_waiting() -> None:
    ended: list[int] = []

    async def broken() -> None:
        raise ValueError("broken")

    async def body() -> None:
        await asyncio.sleep(0)
        ended.append(1)

    bodies = Bodies()
    for one in (body, broken, body):
        bodies.add(one)
    await until(lambda: len(ended) == 2)
    assert [type(error) for error in bodies.run.stumbled] == [ValueError]


def test_an_interrupt_in_a_body_reaches_the_loop_and_no_task_stays_current() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        asyncio.get_running_loop().call_later(0, Bodies().add, interrupt)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert asyncio.current_task(loop) is None
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_bodies_that_lead_to_bodies_leave_the_loop_to_others() -> None:
    """They go on until others have had some turns, which they never have if the loop is not left to them."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        bodies = Bodies()
        ends, ticks = loop.time() + DEADLINE_SECONDS, 0

        async def endless() -> None:
            if ticks < 6 and loop.time() < ends:
                bodies.add(endless)

        bodies.add(endless)
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


async def test_what_a_body_sets_in_its_context_nobody_else_sees() -> None:
    COLOUR.set("green")
    async with everstep.open("memory:") as app:
        COLOUR.set("yellow")
        assert await app.run(painters) == ["green", "green", "none"]
        assert COLOUR.get() == "yellow"


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


async def test_a_step_that_was_cancelled_before_its_turn_never_begins() -> None:
    STARTED.clear()
    async with everstep.open("memory:") as app:
        run = await app.start(changes_its_mind)
        assert await run.result() == "first"
        assert STARTED == ["first"]


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


async def test_bodies_use_timeouts_and_groups_from_their_first_line_on() -> None:
    async with everstep.open("memory:") as app:
        assert await app.run(uses_all_of_asyncio) == [3, "late"]


@workflow(name="many_reads")
async def many_reads(times: int) -> int:
    for number in range(times):
        await noted(str(number))
    return times


async def test_the_outcomes_of_bodies_that_never_wait_are_recorded_in_order_and_none_is_early() -> None:
    async with everstep.open("memory:") as app:
        run = await app.start(many_reads, 200)
        assert await run.result() == 200
        events = [event for event in await run.history() if event.kind.startswith("step_")]
        assert [event.kind for event in events] == ["step_started", "step_completed"] * 200
        assert not any(event.body.get("early") for event in events)
