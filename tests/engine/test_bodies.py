"""Bodies of steps are tasks of the application's loop: what they see, and what becomes of those that never begin."""

import asyncio
import contextvars
from contextlib import suppress
from typing import Any

import everstep
from everstep import step, workflow

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


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


@step(name="cancels_tasks", effect="read")
async def cancels_tasks() -> None:
    own = asyncio.current_task()
    others = asyncio.all_tasks() - {own}

    def cancel_those_that_have_not_begun() -> None:
        for task in asyncio.all_tasks() - others - {own}:
            CANCELLED.append(task.get_name())
            task.cancel()

    asyncio.get_running_loop().call_soon(cancel_those_that_have_not_begun)


CANCELLED: list[str] = []


@workflow(name="loses_a_task")
async def loses_a_task() -> str:
    await cancels_tasks()
    return await noted("after all")


def test_a_body_whose_task_is_cancelled_before_its_first_line_is_run_later() -> None:
    async def main() -> None:
        STARTED.clear()
        CANCELLED.clear()
        async with everstep.open("memory:") as app:
            assert await app.run(loses_a_task) == "after all"
        assert CANCELLED == ["noted"]
        assert STARTED == ["after all"]

    asyncio.run(main())
