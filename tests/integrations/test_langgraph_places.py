"""Where a call of a step is: in graphs that nodes run, and in tasks, each call has a place of its own."""

from typing import Any

import pytest
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep.integrations.langgraph import EverstepSaver, tools
from tests.integrations.charging import DONE, THREAD, State, charge


@everstep.tool(effect="once")
def pay(amount: int) -> str:
    """Pay."""
    DONE.append(amount)
    return f"paid {amount}"


def one_node(node: Any, saver: Any = None) -> Any:
    graph = StateGraph(State)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile(checkpointer=saver)


@pytest.mark.parametrize("asks", [True, False])
def test_each_graph_that_a_node_runs_does_its_own_work_once(asks: bool, saver: EverstepSaver) -> None:
    def inner(state: State) -> State:
        receipt = charge(5)
        if asks:
            interrupt("go on?")
        return {"log": [receipt]}

    nested = one_node(inner)

    def node(state: State) -> State:
        return {"log": [one for _ in range(3) for one in nested.invoke({"amount": 1})["log"]]}

    app = one_node(node, saver)
    ended = app.invoke({"amount": 1}, THREAD)
    while "__interrupt__" in ended:
        ended = app.invoke(Command(resume=True), THREAD)
    assert ended["log"] == ["charged 5"] * 3
    assert DONE == [5, 5, 5]


@task
def charging(amount: int) -> str:
    return charge(amount)


@task
def charging_twice(amount: int) -> list[str]:
    return [charging(amount).result(), charge(amount)]


def lose_all(saver: EverstepSaver) -> None:
    saver.threads.forget_states("t", [(row.namespace, row.id) for row in saver.threads.rows("t", None)])


@pytest.mark.parametrize("kind", ["node", "entrypoint"])
def test_what_tasks_did_is_not_done_again_when_checkpoints_were_lost(kind: str, saver: EverstepSaver) -> None:
    def work(state: Any) -> Any:
        done = [charging(1).result(), *charging_twice(1).result(), charging(1).result()]
        return {"log": done}

    app: Any = one_node(work, saver) if kind == "node" else entrypoint(checkpointer=saver)(work)
    app.invoke({"amount": 1}, THREAD)
    assert DONE == [1, 1, 1, 1]
    lose_all(saver)
    assert app.invoke({"amount": 1}, THREAD)["log"] == ["charged 1"] * 4
    assert DONE == [1, 1, 1, 1]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_tool_that_a_task_calls_does_not_wait_for_a_checkpoint_that_never_comes(
    durability: Any, saver: EverstepSaver
) -> None:
    [tool] = tools([pay])

    @task
    def call_tool(call: Any) -> Any:
        return tool.invoke(call).content

    @entrypoint(checkpointer=saver)
    def agent(amounts: list[int]) -> Any:
        calls = [{"name": "pay", "args": {"amount": one}, "id": f"call-{one}", "type": "tool_call"} for one in amounts]
        paid = [one.result() for one in [call_tool(call) for call in calls]]
        return [*paid, interrupt("enough?")]

    agent.invoke([1, 2], THREAD, durability=durability)
    assert agent.invoke(Command(resume="yes"), THREAD, durability=durability) == ["paid 1", "paid 2", "yes"]
    assert sorted(DONE) == [1, 2]


def test_a_list_with_a_filter_reads_only_the_values_of_what_it_gives(
    saver: EverstepSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = one_node(lambda state: {"log": ["x" * 1000]}, saver)
    for _ in range(3):
        app.invoke({"amount": 1}, THREAD)
    loaded: list[str] = []
    load = saver.threads.load
    monkeypatch.setattr(saver.threads, "load", lambda thread, row: loaded.append(row.id) or load(thread, row))
    assert len([*saver.list(THREAD, filter={"step": 1})]) == len(loaded) == 1
