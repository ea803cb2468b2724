"""A thread is run by one process at a time, and given back however its graph ends. Two savers act as two processes."""

import asyncio
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from everstep.errors import ThreadActive
from everstep.integrations.langgraph import EverstepSaver

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


def test_two_calls_of_one_process_may_run_a_thread(savers: tuple[EverstepSaver, EverstepSaver]) -> None:
    one, other = savers

    async def node(state: State) -> State:
        await asyncio.sleep(0.05)
        return {"log": ["node"]}

    async def both() -> None:
        made = app(node, one)
        await asyncio.gather(made.ainvoke({"log": []}, CONFIG), made.ainvoke({"log": []}, CONFIG))

    asyncio.run(both())
    assert app(node, other).get_state(CONFIG).values["log"]
    assert one.ground.saved.owner("t").owner is None  # type: ignore[union-attr]
