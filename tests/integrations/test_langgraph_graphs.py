"""Graphs behave under an EverstepSaver as they do under LangGraph's own saver in memory."""

import asyncio
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Durability, RetryPolicy, Send, interrupt
from pydantic import BaseModel

from everstep.integrations.langgraph import EverstepSaver


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int


class Person(BaseModel):
    name: str


class State(TypedDict, total=False):
    log: Annotated[list[Any], operator.add]
    messages: Annotated[list[Any], add_messages]
    count: int
    thing: Any


class Log(TypedDict):
    log: Annotated[list[Any], operator.add]


Scenario = Callable[[Any, Any, dict[str, Any]], Any]
"""What is done with a saver: given how to invoke a graph, and a config."""


def note(name: str) -> Callable[[State], State]:
    return lambda state: {"log": [name]}


def straight(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def build(saver: Any) -> Any:
        made = StateGraph(State)
        for name in "abc":
            made.add_node(name, note(name))
        made.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
        return made.compile(checkpointer=saver)

    app = graph(build)
    yield invoke(app, {"log": ["in"], "thing": [Colour.RED, Point(1), Person(name="ann"), {1, 2}]}, config)
    yield invoke(app, {"log": ["again"]}, config)


def interrupted(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def ask(state: State) -> State:
        first = interrupt("first")
        return {"log": [first, interrupt("second")]}

    def build(saver: Any) -> Any:
        made = StateGraph(State)
        made.add_node("ask", ask)
        made.add_node("other", note("other"))
        made.add_node("end", note("end"))
        made.add_edge(START, "ask").add_edge(START, "other").add_edge(["ask", "other"], "end")
        return made.compile(checkpointer=saver)

    app = graph(build)
    yield invoke(app, {"log": []}, config)
    yield invoke(app, Command(resume=False), config)
    yield invoke(app, Command(resume={"a": 1}, update={"count": 3}), config)


def looping(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def talk(state: State) -> State:
        count = state.get("count", 0) + 1
        return {"messages": [AIMessage(f"answer {count}", id=f"ai-{count}")], "count": count}

    def build(saver: Any) -> Any:
        made = StateGraph(State)
        made.add_node("talk", talk)
        made.add_edge(START, "talk")
        made.add_conditional_edges("talk", lambda state: END if state["count"] % 5 == 0 else "talk")
        return made.compile(checkpointer=saver)

    app = graph(build)
    yield invoke(app, {"messages": [HumanMessage("hello", id="h-1")]}, config)
    yield invoke(app, {"messages": [HumanMessage("more", id="h-2"), AIMessage("changed", id="ai-2")]}, config)


def sending(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def build(saver: Any) -> Any:
        inner = StateGraph(State, output_schema=Log)
        inner.add_node("x", lambda state: {"log": [f"x{state['count']}"]})
        inner.add_node("y", lambda state: {"log": [interrupt("inner")] if state["count"] == 2 else ["y"]})
        inner.add_edge(START, "x").add_edge("x", "y")
        made = StateGraph(State)
        made.add_node("fan", note("fan"))
        made.add_node("sub", inner.compile())
        made.add_node("end", note("end"))
        made.add_edge(START, "fan").add_edge("sub", "end")
        made.add_conditional_edges("fan", lambda state: [Send("sub", {"count": n, "log": []}) for n in range(4)])
        return made.compile(checkpointer=saver)

    app = graph(build)
    yield invoke(app, {"log": []}, config)
    yield invoke(app, Command(resume="done"), config)


def failing(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    tried: list[int] = []

    def flaky(state: State) -> State:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("not yet")
        return {"log": ["flaky"]}

    def build(saver: Any) -> Any:
        made = StateGraph(State)
        made.add_node("good", note("good"))
        made.add_node(
            "flaky",
            flaky,
            retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=ValueError),
        )
        made.add_edge(START, "good").add_edge(START, "flaky")
        return made.compile(checkpointer=saver)

    app = graph(build)
    yield invoke(app, {"log": []}, config)
    yield invoke(app, None, config)


def travelling(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def build(saver: Any) -> Any:
        made = StateGraph(State)
        for name in "abc":
            made.add_node(name, note(name))
        made.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
        return made.compile(checkpointer=saver, interrupt_before=["c"])

    app = graph(build)
    yield invoke(app, {"log": ["x" * 200]}, config)
    past = [one.config for one in app.get_state_history(config)]
    yield [one.next for one in app.get_state_history(config)]
    if len(past) > 2:
        yield invoke(app, None, past[2])
        changed = app.update_state(past[1], {"log": ["changed" * 50]}, as_node="a")
        yield invoke(app, None, changed)
    yield invoke(app, None, config)
    yield [(one.values, one.next, one.metadata["step"]) for one in app.get_state_history(config)]


def functional(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    def build(saver: Any) -> Any:
        @task
        def double(n: int) -> int:
            return 2 * n

        @entrypoint(checkpointer=saver)
        def flow(n: int, *, previous: Any = None) -> Any:
            doubled = [double(one) for one in range(n)]
            return {"previous": previous, "sum": sum(one.result() for one in doubled), "answer": interrupt("sure?")}

        return flow

    app = graph(build)
    yield invoke(app, 4, config)
    yield invoke(app, Command(resume="yes"), config)
    yield invoke(app, 2, config)


def appended(state: list[Any], writes: Sequence[Any]) -> list[Any]:
    return [*(state or []), *(one for write in writes for one in write)]


class Deltas(TypedDict, total=False):
    log: Annotated[list[Any], DeltaChannel(appended, snapshot_frequency=4)]
    count: int


class SeldomWhole(TypedDict, total=False):
    log: Annotated[list[Any], DeltaChannel(appended, snapshot_frequency=7)]
    count: int


def build_deltas(saver: Any, state: type = Deltas) -> Any:
    made = StateGraph(state)
    made.add_node("a", lambda state: {"log": ["a" * 100], "count": state.get("count", 0) + 1})
    made.add_node("b", lambda state: {"log": [f"b{state['count']}"]})
    made.add_edge(START, "a").add_edge(START, "b").add_edge("b", "a")
    made.add_conditional_edges("a", lambda state: END if state["count"] % 7 == 0 else "b")
    return made.compile(checkpointer=saver)


def deltas(graph: Any, invoke: Any, config: dict[str, Any]) -> Any:
    app = graph(build_deltas)
    yield invoke(app, {"log": ["in"], "count": 0}, config)
    past = list(app.get_state_history(config))
    yield [(one.values, one.next) for one in past]
    yield invoke(app, None, past[len(past) // 2].config)
    yield invoke(app, {"log": ["again"]}, config)


SCENARIOS: dict[str, Scenario] = {
    one.__name__: one for one in (straight, interrupted, looping, sending, failing, travelling, functional, deltas)
}
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}")


def told(saver: Any, scenario: Scenario, durability: Durability, use_async: bool) -> list[str]:
    """Do what a scenario says, and return all that it gave and left behind, without what is random."""
    config = {"configurable": {"thread_id": f"thread {uuid4()}"}}
    apps: list[Any] = []

    def graph(build: Any) -> Any:
        apps.append(build(saver))
        return apps[-1]

    def invoke(app: Any, given: Any, where: Any) -> Any:
        try:
            if use_async:
                return asyncio.run(app.ainvoke(given, where, durability=durability))
            return app.invoke(given, where, durability=durability)
        except ValueError as error:
            return repr(error)

    found = list(scenario(graph, invoke, config))
    state = apps[0].get_state(config, subgraphs=True)
    found += [state.values, state.next, [(one.name, one.error, one.interrupts) for one in state.tasks]]
    listed = []
    for saved in saver.list(config):
        checkpoint = saved.checkpoint
        writes = [(channel, value) for _, channel, value in saved.pending_writes or []]
        listed.append((saved.metadata, checkpoint["channel_values"], sorted(checkpoint["channel_versions"]), writes))
    # In which order those of several namespaces are listed is not said anywhere.
    return [_UUID.sub("…", repr(one)) for one in found] + sorted(_UUID.sub("…", repr(one)) for one in listed)


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EverstepSaver]:
    with EverstepSaver(f"sqlite:///{tmp_path_factory.mktemp('graphs')}/everstep.db") as made:
        yield made


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_graph_does_the_same_as_with_langgraphs_own_saver(
    name: str, durability: Durability, use_async: bool, saver: EverstepSaver
) -> None:
    expected = told(InMemorySaver(), SCENARIOS[name], durability, use_async)
    assert told(saver, SCENARIOS[name], durability, use_async) == expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_so_it_does_on_postgresql(name: str, postgres_saver: EverstepSaver) -> None:
    for durability in ("sync", "exit"):
        expected = told(InMemorySaver(), SCENARIOS[name], durability, False)
        assert told(postgres_saver, SCENARIOS[name], durability, False) == expected


@pytest.mark.parametrize("count", range(7, 12))
def test_pruning_leaves_what_delta_channels_are_made_from(count: int, saver: EverstepSaver) -> None:
    config: Any = {"configurable": {"thread_id": f"pruned {count}"}}
    app = build_deltas(saver)
    app.invoke({"log": ["in"], "count": count}, {**config, "recursion_limit": 100})
    whole, before = app.get_state(config).values, len(list(saver.list(config)))
    saver.copy_thread(f"pruned {count}", f"copied {count}")
    saver.prune([f"pruned {count}"])
    assert app.get_state(config).values == whole
    assert len(list(saver.list(config))) < before
    app.invoke({"log": ["more"]}, config)
    assert app.get_state(config).values["log"][: len(whole["log"])] == whole["log"]
    assert app.get_state({"configurable": {"thread_id": f"copied {count}"}}).values == whole


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_deleting_what_a_run_made_changes_no_other_state(durability: Any, url: str) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    with EverstepSaver(url) as saver:
        app = build_deltas(saver, SeldomWhole)
        values = []
        for run in ("1", "2", "3", "4"):
            given = {"log": [f"in {run}"], "count": 5}
            app.invoke(given, {**config, "metadata": {"run_id": run}}, durability=durability)
            values.append(app.get_state(config).values)
        past = {one.config["configurable"]["checkpoint_id"]: one.values for one in app.get_state_history(config)}
        of_run = {row.id: row.origin for row in saver.ground.saved.states("t")}
        left = {"1", "2", "3", "4"}
        for run, newest in (("2", 3), ("1", 3), ("4", 2), ("3", None)):
            saver.delete_for_runs([run])
            left.discard(run)
            saver.copy_thread("t", "copy")
            for thread in ("t", "copy"):
                there = list(app.get_state_history({"configurable": {"thread_id": thread}}))
                ids = {one.config["configurable"]["checkpoint_id"]: one.values for one in there}
                assert ids == {id: value for id, value in past.items() if of_run[id] in left}
            assert app.get_state(config).values == ({} if newest is None else values[newest])
            for id in past.keys() - ids.keys():
                gone = {"configurable": {**config["configurable"], "checkpoint_ns": "", "checkpoint_id": id}}
                assert saver.get_tuple(gone) is None  # type: ignore[arg-type]
        assert saver.ground.saved.states("t") == []
        assert saver.ground.saved.series("t") == []


class Numbering(InMemorySaver):
    """One that counts versions, as those do which leave that to LangGraph."""

    def get_next_version(self, current: Any, channel: None) -> Any:
        return (current or 0) + 1


@pytest.mark.parametrize("stock", [InMemorySaver, Numbering])
def test_a_thread_that_another_saver_began_is_copied_and_goes_on(
    stock: type[InMemorySaver], saver: EverstepSaver
) -> None:
    made = StateGraph(State)
    made.add_node("a", note("a")).add_node("b", note("b"))
    made.add_edge(START, "a").add_edge("a", "b")
    theirs = stock()
    config: Any = {"configurable": {"thread_id": uuid4().hex}}
    made.compile(checkpointer=theirs, interrupt_before=["b"]).invoke({"log": ["in"]}, config)

    for one in reversed(list(theirs.list(config))):
        versions = one.checkpoint["channel_versions"]
        saver.put(
            one.parent_config or {"configurable": {**config["configurable"], "checkpoint_ns": ""}},
            one.checkpoint,
            one.metadata,
            versions,
        )

    graph = made.compile(checkpointer=saver)
    assert graph.invoke(None, config)["log"] == ["in", "a", "b"]
    assert graph.invoke({"log": ["again"]}, config)["log"] == ["in", "a", "b", "again", "a", "b"]
