"""A thread is run by one call at a time, and given back however its graph ends. Two savers act as two processes."""

import asyncio
import copy
import gc
import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict
from unittest.mock import Mock

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.errors import EmptyInputError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep.errors import Damaged, Misuse, ThreadActive
from everstep.integrations.langgraph import EverstepSaver
from tests.waiting import wait_until

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    log: Annotated[list[Any], operator.add]


@pytest.fixture
def savers(url: str) -> Iterator[tuple[EverstepSaver, EverstepSaver]]:
    with EverstepSaver(url) as one, EverstepSaver(url) as other:
        yield one, other


@pytest.fixture
def both(file_url: str) -> Iterator[tuple[EverstepSaver, EverstepSaver]]:
    with EverstepSaver(file_url) as one, EverstepSaver(file_url) as other:
        yield one, other


def app(node: Callable[..., Any], saver: EverstepSaver, **options: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("first", lambda state: {"log": ["first"]})
    graph.add_node("node", node)
    graph.add_edge(START, "first").add_edge("first", "node")
    return graph.compile(checkpointer=saver, **options)


def test_another_is_refused_while_it_runs_and_told_who_runs_it(savers: tuple[EverstepSaver, EverstepSaver]) -> None:
    one, other = savers
    begun, go_on = threading.Event(), threading.Event()

    def node(state: State) -> State:
        begun.set()
        assert go_on.wait(20)
        return {"log": ["node"]}

    results: list[Any] = []
    running = threading.Thread(target=lambda: results.append(app(node, one).invoke({"log": []}, CONFIG)))
    running.start()
    assert begun.wait(20)
    theirs = app(node, other)
    for act in (
        lambda: theirs.invoke(Command(resume=1), CONFIG),
        lambda: asyncio.run(theirs.ainvoke({"log": ["mine"]}, CONFIG)),
        lambda: theirs.update_state(CONFIG, {"log": ["mine"]}),
        lambda: other.delete_thread("t"),
    ):
        with pytest.raises(ThreadActive, match="is being run by") as refused:
            act()
        assert refused.value.owner == one.ground.worker
    assert theirs.get_state(CONFIG).values == {"log": ["first"]}
    go_on.set()
    running.join()
    assert results == [{"log": ["first", "node"]}]
    assert theirs.invoke({"log": ["more"]}, CONFIG)["log"] == ["first", "node", "more", "first", "node"]


def ends_by_itself(state: State) -> State:
    return {"log": ["node"]}


def is_interrupted(state: State) -> State:
    return {"log": [interrupt("?")]}


def raises(state: State) -> State:
    raise ZeroDivisionError


async def never_ends(state: State) -> State:
    await asyncio.sleep(3600)
    return {}


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("node", [ends_by_itself, is_interrupted, raises, never_ends])
def test_it_is_given_back_however_the_graph_ends(
    node: Any, use_async: bool, durability: Any, both: tuple[EverstepSaver, EverstepSaver]
) -> None:
    one, other = both
    for options in ({}, {"interrupt_before": ["node"]}):
        made = app(node, one, **options)
        try:
            if use_async or node is never_ends:
                asyncio.run(asyncio.wait_for(made.ainvoke({"log": []}, CONFIG, durability=durability), 0.2))
            else:
                made.invoke({"log": []}, CONFIG, durability=durability)
        except (ZeroDivisionError, TimeoutError):
            pass
        there = one.ground.saved.owner("t")
        assert there is not None
        assert there.owner is None
    app(ends_by_itself, other).invoke({"log": []}, CONFIG)
    assert other.ground.saved.owner("t").epoch > there.epoch  # type: ignore[union-attr]


# -- two calls of one process ---------------------------------------------------------------------------------------
@everstep.step(effect="once")
def pay(amount: int) -> str:
    PAID.append(amount)
    return f"paid {amount}"


PAID: list[int] = []


class Slow:
    """A graph that asks a person, and whose node then takes as long as the test wants."""

    def __init__(self, saver: EverstepSaver) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.answers: list[Any] = []
        PAID.clear()

        def node(state: State) -> State:
            answer = interrupt("pay?")
            self.answers.append(answer)
            self.begun.set()
            assert self.go_on.wait(20)
            return {"log": [pay(5) if answer else "refused"]}

        self.app = app(node, saver)
        self.app.invoke({"log": []}, CONFIG)


def test_of_two_answers_to_one_interrupt_in_one_process_the_second_is_refused(url: str) -> None:
    with EverstepSaver(url) as saver, ThreadPoolExecutor(1) as pool:
        slow = Slow(saver)
        first = pool.submit(slow.app.invoke, Command(resume=False), CONFIG)
        assert slow.begun.wait(20)
        told: list[ThreadActive] = []
        for act in (
            lambda: slow.app.invoke(Command(resume=True), CONFIG),
            lambda: asyncio.run(slow.app.ainvoke(Command(resume=True), CONFIG)),
            lambda: list(slow.app.stream(Command(resume=True), CONFIG)),
            lambda: slow.app.update_state(CONFIG, {"log": ["mine"]}),
            lambda: asyncio.run(slow.app.aupdate_state(CONFIG, {"log": ["mine"]})),
            lambda: saver.delete_thread("t"),
            lambda: saver.copy_thread("other", "t"),
            lambda: saver.prune(["t"]),
        ):
            with pytest.raises(ThreadActive, match="another call in this process") as refused:
                act()
            told.append(refused.value)
        assert {one.owner for one in told} == {saver.ground.worker}
        assert slow.app.get_state(CONFIG).values == {"log": ["first"]}
        slow.go_on.set()
        assert first.result()["log"] == ["first", "refused"]
        assert (slow.answers, PAID) == ([False], [])
        assert next(one.values["log"] for one in slow.app.get_state_history(CONFIG)) == ["first", "refused"]
        assert saver.ground.saved.owner("t").owner is None  # type: ignore[union-attr]


def test_of_two_tasks_with_one_interrupt_the_second_is_refused(saver: EverstepSaver) -> None:
    PAID.clear()

    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def node(state: State) -> State:
            answer = interrupt("pay?")
            begun.set()
            await go_on.wait()
            return {"log": [pay(5) if answer else "refused"]}

        made = app(node, saver)
        await made.ainvoke({"log": []}, CONFIG)
        first = asyncio.create_task(made.ainvoke(Command(resume=True), CONFIG))
        await begun.wait()
        for one in (copy.copy(saver), saver):
            with pytest.raises(ThreadActive, match="another call in this process"):
                await app(node, one).ainvoke(Command(resume=False), CONFIG)
        go_on.set()
        assert (await first)["log"] == ["first", "paid 5"]

    asyncio.run(main())
    assert PAID == [5]


def test_two_savers_on_one_app_are_one_process(file_url: str) -> None:
    with everstep.open(file_url) as shared, ThreadPoolExecutor(1) as pool:
        slow = Slow(EverstepSaver(shared))
        first = pool.submit(slow.app.invoke, Command(resume=True), CONFIG)
        assert slow.begun.wait(20)
        with EverstepSaver(shared) as other, pytest.raises(ThreadActive, match="another call in this process"):
            app(ends_by_itself, other).invoke(None, CONFIG)
        slow.go_on.set()
        assert first.result()["log"] == ["first", "paid 5"]


def test_what_a_graph_does_by_itself_at_the_same_time_is_not_refused(url: str) -> None:
    """Subgraphs, parallel nodes, graphs that nodes run, their reads and changes of the thread, and plain reads."""
    with EverstepSaver(url) as saver:
        inner = app(ends_by_itself, saver)
        seen: list[Any] = []

        def node(state: State, config: RunnableConfig) -> State:
            mine = inner.invoke({"log": []})["log"]  # on the same thread, in a namespace of its own
            other: Any = {"configurable": {"thread_id": f"of {config['metadata']['langgraph_node']}"}}
            own = inner.invoke({"log": []}, other)["log"]
            seen.append(whole.get_state(CONFIG).values)
            if len(seen) == 1:
                whole.update_state(CONFIG, {"log": []})
            return {"log": [len(mine), len(own)]}

        graph = StateGraph(State)
        for name in ("a", "b", "c"):
            graph.add_node(name, node)
            graph.add_edge(START, name)
        graph.add_node("sub", app(ends_by_itself, True))  # type: ignore[arg-type]
        graph.add_edge(START, "sub")
        whole: Any = graph.compile(checkpointer=saver)
        turns: list[Any] = [{"log": []}, None]
        for given in turns:
            assert len(whole.invoke(given, CONFIG)["log"]) >= 6
        asyncio.run(whole.ainvoke({"log": []}, CONFIG))
        assert len(seen) == 6


# -- what is left early ---------------------------------------------------------------------------------------------
def test_a_stream_that_is_left_early_is_ended_by_whoever_comes_next(saver: EverstepSaver) -> None:
    made = app(ends_by_itself, saver)
    for _ in made.stream({"log": []}, CONFIG):
        break
    assert made.invoke({"log": []}, CONFIG)["log"]

    async def main() -> None:
        async for _ in made.astream({"log": []}, CONFIG):
            break
        await made.ainvoke({"log": []}, CONFIG)  # nothing was awaited in between
        stream = made.astream({"log": []}, CONFIG)
        await anext(stream)
        del stream
        await made.ainvoke({"log": []}, CONFIG)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(app(never_ends, saver).ainvoke({"log": []}, CONFIG), 0.1)
        await made.ainvoke({"log": []}, CONFIG)

    asyncio.run(main())


def test_a_stream_that_is_kept_runs_until_it_is_closed(saver: EverstepSaver) -> None:
    made = app(ends_by_itself, saver)
    kept = made.stream({"log": []}, CONFIG)
    next(kept)
    with pytest.raises(ThreadActive, match="until it is closed"):
        made.invoke({"log": []}, CONFIG)
    kept.close()
    made.invoke({"log": []}, CONFIG)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_a_graph_whose_loop_was_closed_under_it_keeps_nothing(saver: EverstepSaver) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    running = loop.create_task(app(never_ends, saver).ainvoke({"log": []}, CONFIG))
    while saver.ground.saved.owner("t") is None or len(app(never_ends, saver).get_state(CONFIG).next) == 0:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    made = app(ends_by_itself, saver)
    assert made.invoke({"log": []}, CONFIG)["log"][-1] == "node"
    assert saver.ground.saved.owner("t").owner is None  # type: ignore[union-attr]
    assert not running.done()
    del running
    gc.collect()  # what asyncio says about that is not about the next test


def test_a_graph_that_goes_with_the_garbage_gives_its_thread_back(both: tuple[EverstepSaver, EverstepSaver]) -> None:
    one, other = both
    kept: list[Any] = [app(ends_by_itself, one).stream({"log": []}, CONFIG)]
    next(kept[0])
    kept.append(kept)
    gc.disable()
    try:
        with one.ground._lock_of("t"):  # the garbage is collected where locks are held
            del kept
            gc.collect()
    finally:
        gc.enable()
    wait_until(lambda: one.ground.saved.owner("t").owner is None, "the thread is given back")  # type: ignore[union-attr]
    app(ends_by_itself, other).invoke({"log": []}, CONFIG)


# -- calls that fail while they begin -------------------------------------------------------------------------------
def asks_twice(saver: EverstepSaver) -> Any:
    graph = StateGraph(State)
    for name in ("a", "b"):
        graph.add_node(name, lambda state: {"log": [interrupt("?")]})
        graph.add_edge(START, name)
    return graph.compile(checkpointer=saver)


def call(made: Any, given: Any, config: Any, use_async: bool, **options: Any) -> Any:
    return asyncio.run(made.ainvoke(given, config, **options)) if use_async else made.invoke(given, config, **options)


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_a_call_that_langgraph_refuses_as_it_begins_gives_its_thread_back(
    use_async: bool, durability: Any, both: tuple[EverstepSaver, EverstepSaver]
) -> None:
    one, other = both
    made = asks_twice(one)
    kept: list[BaseException] = []  # with its frames, as whoever is told in an `except` has it
    empty: Any = {"configurable": {"thread_id": "empty"}}
    with pytest.raises(EmptyInputError) as failed:
        call(made, None, empty, use_async, durability=durability)
    kept.append(failed.value)
    asked = call(made, {"log": []}, CONFIG, use_async)["__interrupt__"]
    strict: Any = {"configurable": {"thread_id": "t", "__pregel_strict_resume": True}}
    for given, config in (
        (Command(resume="x"), CONFIG),
        (Command(resume={"0" * 32: "x"}), strict),
        (Command(), CONFIG),
    ):
        try:
            call(made, given, config, use_async, durability=durability)
        except Exception as error:  # noqa: BLE001 - which it is differs between releases of LangGraph
            kept.append(error)
    assert len(kept) >= 3
    for thread in ("t", "empty"):
        assert (there := one.ground.saved.owner(thread)) is None or there.owner is None
    answers = Command(resume={one.id: "yes" for one in asked})
    assert call(asks_twice(other), answers, CONFIG, use_async)["log"] == ["yes", "yes"]
    assert call(asks_twice(other), {"log": []}, empty, use_async)["__interrupt__"]


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_a_call_whose_checkpoint_cannot_be_read_gives_its_thread_back(
    use_async: bool, both: tuple[EverstepSaver, EverstepSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = both
    made = app(ends_by_itself, one)
    made.invoke({"log": []}, CONFIG)
    kept: list[BaseException] = []
    for broken in ("find", "writes"):
        with monkeypatch.context() as patched:
            patched.setattr(one.threads, broken, Mock(side_effect=Damaged("It is not what was written.")))
            with pytest.raises(Damaged) as failed:
                call(made, {"log": []}, CONFIG, use_async)
        kept.append(failed.value)
        assert one.ground.saved.owner("t").owner is None  # type: ignore[union-attr]
        assert call(made, {"log": []}, CONFIG, use_async)["log"]
    assert call(app(ends_by_itself, other), {"log": []}, CONFIG, use_async)["log"]


@pytest.mark.parametrize("stopped", ["before", "after"])
def test_a_call_that_is_cut_off_while_it_takes_its_thread_gives_it_back(
    stopped: str, both: tuple[EverstepSaver, EverstepSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the right on a thread, which goes on with that when the call has ended already."""
    one, other = both
    made = app(ends_by_itself, one)
    taking, go_on = threading.Event(), threading.Event()
    take = one.ground._try_to_take

    def slowly(thread: str) -> Any:
        verdict = take(thread) if stopped == "after" else None
        taking.set()
        assert go_on.wait(60)
        return verdict or take(thread)

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(one.ground, "_try_to_take", slowly)
            running = asyncio.create_task(made.ainvoke({"log": []}, CONFIG))
            await asyncio.to_thread(taking.wait, 60)
            running.cancel()
            await asyncio.sleep(0)
            running.cancel()  # whoever is in a hurry says it again
            with pytest.raises(asyncio.CancelledError):
                await running
        go_on.set()
        assert (await made.ainvoke({"log": []}, CONFIG))["log"]

    asyncio.run(main())
    wait_until(lambda: one.ground.saved.owner("t").owner is None, "the thread is given back")  # type: ignore[union-attr]
    assert app(ends_by_itself, other).invoke({"log": []}, CONFIG)["log"]


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_no_checkpoint_that_a_call_goes_back_to_keeps_the_thread(
    use_async: bool, durability: Any, both: tuple[EverstepSaver, EverstepSaver]
) -> None:
    one, _ = both
    made = asks_twice(one)
    call(made, {"log": []}, CONFIG, use_async, durability=durability)
    kept: list[BaseException] = []
    for state in list(made.get_state_history(CONFIG)):
        try:
            call(made, None, state.config, use_async, durability=durability)
        except EmptyInputError as error:
            kept.append(error)
        assert one.ground.saved.owner("t").owner is None  # type: ignore[union-attr]


# -- an app that is closed ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("calls", ["a step", "nothing"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_a_graph_whose_app_is_closed_under_it_is_told_so_and_can_go_on_elsewhere(
    use_async: bool, calls: str, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    PAID.clear()

    def node(state: State) -> State:
        if not go_on.is_set():
            begun.set()
            assert go_on.wait(60)
        return {"log": [pay(5) if calls == "a step" else "node"]}

    with ThreadPoolExecutor(1) as pool:
        with everstep.open(url) as shared:
            saver = EverstepSaver(shared)
            made = app(node, saver)
            running = pool.submit(call, made, {"log": []}, CONFIG, use_async)
            assert begun.wait(60)
        go_on.set()
        with pytest.raises(Misuse, match="closed"):
            running.result(60)
    uses: list[Callable[[], Any]] = [
        lambda: call(made, {"log": []}, CONFIG, use_async),
        lambda: made.get_state(CONFIG),
        shared.list,
        shared.get("r").status,
    ]
    for use in uses:
        with pytest.raises(Misuse, match="closed"):
            use()
    shared.close()
    assert "cannot be given back" not in caplog.text
    with EverstepSaver(url) as other:
        assert app(node, other).invoke(None, CONFIG)["log"][0] == "first"
    assert len(PAID) == (calls == "a step")


def test_a_saver_that_is_closed_says_so(file_url: str) -> None:
    saver = EverstepSaver(file_url)
    made = app(ends_by_itself, saver)
    made.invoke({"log": []}, CONFIG)
    saver.close()
    for use_async in (False, True):
        with pytest.raises(Misuse, match="closed"):
            call(made, {"log": []}, CONFIG, use_async)
