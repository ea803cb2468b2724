"""Steps called where the context does not say what is running: recorded in workflow code, refused in a step's body."""

import asyncio
import contextvars
import functools
import multiprocessing.pool
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest

import everstep
from everstep import blocking, step, tool, transaction, workflow
from everstep.errors import Misuse
from tests.engine.resume_helpers import Machine

RAN: list[str] = []
"""Which bodies ran, by their own account."""


@pytest.fixture(autouse=True)
def forget() -> None:
    RAN.clear()


@step(effect="once")
async def charge(what: str = "charge") -> str:
    RAN.append(what)
    return what


@step(effect="once")
def pay(what: str = "pay") -> str:
    RAN.append(what)
    return what


@step(effect="read")
def look(what: str = "look") -> str:
    RAN.append(what)
    return what


@step(key="{what}")
def keyed(what: str = "keyed") -> str:
    RAN.append(what)
    return what


@tool(effect="once", approval=True)
async def wire(what: str = "wire") -> str:
    """Send money."""
    RAN.append(what)
    return what


@workflow(name="unseen_child")
async def child(what: str = "child") -> str:
    return await charge(what)


sell = transaction(everstep.STORE, name="sell")(lambda connection: RAN.append("sell"))  # type: ignore[func-returns-value]


# -- in workflow code --------------------------------------------------------------------------------------------------
async def called_in_a_task(function: Callable[[], Awaitable[str]]) -> str:
    async def main() -> str:
        return await function()

    return await asyncio.create_task(main(), context=Context())


async def called_in_a_group(function: Callable[[], Awaitable[str]]) -> str:
    async def main() -> str:
        return await function()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(main(), context=Context())
    return task.result()


async def called_in_a_callback(function: Callable[[], Awaitable[str]]) -> str:
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def back() -> None:
        made.set_result(asyncio.ensure_future(function()))

    asyncio.get_running_loop().call_soon(back, context=Context())
    task: asyncio.Future[str] = await made
    return await task


async def called_in_a_context(function: Callable[[], Awaitable[str]]) -> str:
    return await Context().run(function)


async def called_after_a_timer(function: Callable[[], Awaitable[str]]) -> str:
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.call_later(1, lambda: made.set_result(asyncio.ensure_future(function())), context=Context())
    task: asyncio.Future[str] = await made
    return await task


WAYS = (called_in_a_task, called_in_a_group, called_in_a_callback, called_in_a_context, called_after_a_timer)


async def finish(machine: Machine, run: Any) -> Any:
    """Let time pass until a run has ended."""
    ending = asyncio.ensure_future(run.result(timeout=60))
    while not ending.done():
        await machine.advance(1)
    return await ending


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_step_on_the_loop_of_a_workflow_is_recorded_whatever_the_context_says(
    machine: Machine, way: Any
) -> None:
    @workflow(name="flow")
    async def flow() -> str:
        first = await way(charge)
        await everstep.receive("go", str)
        return first

    app, _ = await machine.start(flow, id="r")
    while machine.status("r") != "waiting" or "step_completed" not in machine.kinds("r"):
        await machine.advance(1)
    await machine.kill(app)
    app = await machine.worker()
    await app.signal("r", "go", "on")
    assert await finish(machine, app.get("r")) == "charge"
    assert RAN == ["charge"], "a replay does not do it again"
    assert machine.kinds("r").count("step_completed") == 1


async def test_a_child_a_tool_and_a_signal_are_seen_there_as_well(machine: Machine) -> None:
    @workflow(name="flow")
    async def flow() -> list[Any]:
        told = called_in_a_task(lambda: everstep.receive("word", str))  # type: ignore[arg-type, return-value]
        return [await called_in_a_task(child), await called_in_a_task(wire), await told]

    _, run = await machine.start(flow, id="r")
    await machine.until(lambda: "approval_asked" in machine.kinds("r"))
    assert RAN == ["child"]
    await run.approve()
    await run.signal("word", "tides")
    assert await finish(machine, run) == ["child", "wire", "tides"]
    assert machine.kinds("r").count("child_started") == 1


async def test_a_def_workflow_records_what_is_called_in_an_empty_context(machine: Machine) -> None:
    @workflow(name="flow")
    def flow() -> str:
        said = Context().run(pay)
        blocking.receive("go", str)
        return said

    app, _ = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    await machine.kill(app)
    app = await machine.worker()
    await app.signal("r", "go", "on")
    assert await finish(machine, app.get("r")) == "pay"
    assert RAN == ["pay"]


async def test_a_context_of_workflow_code_does_not_make_other_code_its_workflow(machine: Machine) -> None:
    """It is used after the code has come to rest, by the application."""
    kept: list[Context] = []

    @workflow(name="flow")
    async def flow() -> str:
        kept.append(contextvars.copy_context())
        return await everstep.receive("go", str)

    _, run = await machine.start(flow, id="r")
    await machine.until_status("r", "waiting")
    for call in (charge, child):
        with pytest.raises(Misuse, match="not running"):
            await kept[0].run(call)
    await run.signal("go", "on")
    assert await finish(machine, run) == "on"
    assert RAN == []


# -- in a step's body --------------------------------------------------------------------------------------------------
def on_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def main() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001  # it is raised where the thread was started
            found.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def on_a_thread_of_a_thread(function: Callable[[], Any]) -> Any:
    return on_a_thread(functools.partial(on_a_thread, function))


def in_a_pool(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def mapped_in_a_pool(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda _: function(), range(2))
        return first


SHARED = ThreadPoolExecutor(2)
"""A pool of the application."""


def in_a_pool_of_the_application(function: Callable[[], Any]) -> Any:
    SHARED.submit(int).result()  # its thread is there before
    return SHARED.submit(function).result()


def in_a_pool_of_multiprocessing(function: Callable[[], Any]) -> Any:
    with multiprocessing.pool.ThreadPool(1) as pool:
        return pool.apply(function)


def by_a_timer(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def main() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001  # it is raised where the timer was started
            found.append(error)

    timer = threading.Timer(0, main)
    timer.start()
    timer.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def in_a_loop_on_a_thread(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    return on_a_thread(lambda: asyncio.run(main()))


def in_a_loop_in_a_context(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    def run() -> Any:
        with asyncio.Runner() as runner:
            return runner.run(main(), context=Context())

    return run()


def in_an_empty_context(function: Callable[[], Any]) -> Any:
    return Context().run(function)


def submitted_in_an_empty_context(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return Context().run(pool.submit, function).result()


BODY_WAYS = (
    on_a_thread,
    on_a_thread_of_a_thread,
    in_a_pool,
    mapped_in_a_pool,
    in_a_pool_of_the_application,
    in_a_pool_of_multiprocessing,
    by_a_timer,
    in_a_loop_on_a_thread,
    in_a_loop_in_a_context,
    in_an_empty_context,
    submitted_in_an_empty_context,
)


@pytest.mark.parametrize("effect", ["read", "repeat", "once"])
@pytest.mark.parametrize("way", BODY_WAYS, ids=lambda way: way.__name__)
async def test_a_step_that_needs_a_record_is_refused_in_whatever_a_body_starts(
    machine: Machine, way: Any, effect: Any
) -> None:
    @step(name="outer", effect=effect)
    def outer() -> str:
        told = []
        for inner in (pay, keyed, sell):
            with pytest.raises(Misuse, match=r"inside the step outer"):
                way(inner)
            told.append(inner.name)  # type: ignore[attr-defined]
        return f"{' '.join(told)}, and {way(look)}"

    @workflow(name="flow")
    async def flow() -> str:
        return await asyncio.to_thread(outer)

    _, run = await machine.start(flow, id="r")
    assert await run.result(timeout=60) == "pay keyed sell, and look"
    looks = 2 if way is mapped_in_a_pool else 1
    assert RAN.count("look") == len(RAN) == looks


async def task_with_an_empty_context(function: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await function()

    return await asyncio.create_task(main(), context=Context())


async def task_of_a_task_with_an_empty_context(function: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async def inner() -> Any:
            return await function()

        return await asyncio.create_task(inner())

    async with asyncio.TaskGroup() as group:
        task = group.create_task(main(), context=Context())
    return task.result()


async def in_the_default_executor(function: Callable[[], Awaitable[Any]]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(_awaited(function)))


async def on_a_thread_of_a_coroutine(function: Callable[[], Awaitable[Any]]) -> Any:
    return await asyncio.to_thread(on_a_thread, lambda: asyncio.run(_awaited(function)))


async def in_a_context_of_a_coroutine(function: Callable[[], Awaitable[Any]]) -> Any:
    return await Context().run(function)


async def _awaited(function: Callable[[], Awaitable[Any]]) -> Any:
    return await function()


ASYNC_WAYS = (
    task_with_an_empty_context,
    task_of_a_task_with_an_empty_context,
    in_the_default_executor,
    on_a_thread_of_a_coroutine,
    in_a_context_of_a_coroutine,
)


@pytest.mark.parametrize("way", ASYNC_WAYS, ids=lambda way: way.__name__)
async def test_a_once_step_is_refused_in_whatever_a_coroutine_of_a_body_starts(machine: Machine, way: Any) -> None:
    @step(name="outer")
    async def outer() -> str:
        try:
            await way(charge)
        except ExceptionGroup as group:
            return str(group.exceptions[0])
        except Misuse as error:
            return str(error)
        return "it was done"

    @workflow(name="flow")
    async def flow() -> str:
        return await outer()

    _, run = await machine.start(flow, id="r")
    assert "inside the step outer" in await run.result(timeout=60)
    assert RAN == []


# -- in the application ------------------------------------------------------------------------------------------------
async def test_the_application_calls_its_steps_as_plain_functions_while_runs_are_driven(machine: Machine) -> None:
    """Also on threads, in pools and in tasks of its own, and in a pool that a body was the first to use."""
    begun, ended = threading.Event(), threading.Event()
    late = ThreadPoolExecutor(1)

    @step(name="outer")
    def outer() -> str:
        late.submit(int).result()  # its thread is started by this body
        begun.set()
        assert ended.wait(20)
        return "done"

    @workflow(name="flow")
    async def flow() -> str:
        return await asyncio.to_thread(outer)

    _, run = await machine.start(flow, id="r")
    try:
        await asyncio.to_thread(begun.wait, 20)
        assert pay("main") == "main"
        assert await charge("awaited") == "awaited"
        assert await called_in_a_task(lambda: charge("task")) == "task"
        assert await asyncio.to_thread(pay, "to_thread") == "to_thread"
        assert await asyncio.to_thread(on_a_thread, lambda: pay("thread")) == "thread"
        assert await asyncio.wrap_future(SHARED.submit(pay, "pool")) == "pool"
        assert await asyncio.wrap_future(late.submit(pay, "late")) == "late"
    finally:
        ended.set()
    assert await run.result(timeout=60) == "done"
    assert RAN == ["main", "awaited", "task", "to_thread", "thread", "pool", "late"]
    late.shutdown()
