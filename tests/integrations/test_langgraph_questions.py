"""Approvals of tools that a model calls at the same time: each answer is for the call that a person was shown."""

import itertools
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

import everstep
from everstep.integrations.langgraph import EverstepSaver, ask_model, tools
from tests.worlds.ledger import DONE

LATE: list[int] = []
THREAD: Any = {"configurable": {"thread_id": "t"}}
SMALL, LARGE = 5, 1_000_000


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    LATE.clear()


def needs_approval(amount: int) -> bool:
    if amount in LATE:
        time.sleep(0.15)  # so the other call comes first
    return True


@everstep.tool(effect="once", approval=needs_approval)
def pay(amount: int) -> str:
    """Pay."""
    DONE.append(amount)
    return f"paid {amount}"


@dataclass
class Name:
    question: str


@tool
def ask_name(question: str) -> str:
    """Ask."""
    return f"is called {interrupt(Name(question))}"


def agent(saver: EverstepSaver, *amounts: int, asks: str = "") -> Any:
    calls: list[Any] = [
        {"name": "pay", "args": {"amount": one}, "id": f"call-{number}"} for number, one in enumerate(amounts)
    ]
    if asks:
        calls.insert(1, {"name": "ask_name", "args": {"question": asks}, "id": "call-ask"})
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]))
    graph = StateGraph(MessagesState)
    graph.add_node("think", lambda state: {"messages": [ask_model(model, state["messages"])]})
    graph.add_node("tools", ToolNode([*tools([pay]), ask_name]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(checkpointer=saver)


def shown(state: Any) -> int:
    [asked] = state["__interrupt__"]
    amount: int = asked.value["arguments"]["amount"]
    return amount


@pytest.mark.parametrize("late", [*itertools.product([SMALL, LARGE], repeat=3)])
def test_an_answer_is_for_the_call_that_was_shown_in_whatever_order_they_come(
    late: tuple[int, ...], saver: EverstepSaver
) -> None:
    app = agent(saver, SMALL, LARGE)
    LATE[:] = [late[0]]
    state = app.invoke({"messages": [("user", "pay")]}, THREAD)
    for one in late[1:]:
        LATE[:] = [one]
        approves = shown(state) == SMALL
        state = app.invoke(Command(resume=approves or "too much"), THREAD)
        assert LARGE not in DONE
    said = [one.content for one in state["messages"][2:]]
    assert said == [f"paid {SMALL}", "pay was refused by a person: too much.", "done"]
    assert DONE == [SMALL]


def test_a_question_stays_when_the_graph_is_run_again_without_an_answer(saver: EverstepSaver) -> None:
    app = agent(saver, SMALL, LARGE)
    LATE[:] = [LARGE]
    assert shown(app.invoke({"messages": [("user", "pay")]}, THREAD)) == SMALL
    LATE[:] = [SMALL]
    assert shown(app.invoke(None, THREAD)) == SMALL
    assert shown(app.invoke(Command(resume=True), THREAD)) == LARGE
    assert DONE == [SMALL]
    app.invoke(Command(resume=True), THREAD)
    assert DONE == [SMALL, LARGE]


def test_the_answer_to_what_another_tool_asks_approves_nothing(saver: EverstepSaver) -> None:
    app = agent(saver, SMALL, LARGE, asks="Who?")
    state = app.invoke({"messages": [("user", "pay")]}, THREAD)
    for _ in range(6):
        if "__interrupt__" not in state:
            break
        [asked] = state["__interrupt__"]
        is_approval = isinstance(asked.value, dict)
        assert is_approval or asked.value == Name("Who?")
        approves = not is_approval or asked.value["arguments"]["amount"] == SMALL
        state = app.invoke(Command(resume=approves), THREAD)
        assert LARGE not in DONE
    assert DONE == [SMALL]
    assert state["messages"][-1].content == "done"


def test_one_answer_is_for_one_of_two_calls_that_ask_the_same(saver: EverstepSaver) -> None:
    app = agent(saver, SMALL, SMALL)
    state = app.invoke({"messages": [("user", "pay")]}, THREAD)
    state = app.invoke(Command(resume=True), THREAD)
    assert shown(state) == SMALL
    assert DONE == [SMALL]
    state = app.invoke(Command(resume="once is enough"), THREAD)
    assert DONE == [SMALL]
    assert state["messages"][-1].content == "done"


@pytest.mark.parametrize(
    ("value", "seen"),
    [((1, 2), [1, 2]), (Name("Who?"), {"question": "Who?"}), ({1, 2}, {1, 2}), (datetime(2020, 1, 1, tzinfo=UTC), ...)],
)
def test_arguments_of_any_storable_type_are_shown_and_approved(value: Any, seen: Any, saver: EverstepSaver) -> None:
    @everstep.tool(effect="once", approval=True)
    def take(what: Name | tuple[int, int] | set[int] | datetime) -> str:
        """Take."""
        assert what == value
        return "taken"

    graph = StateGraph(MessagesState)
    graph.add_node("node", lambda state: {"messages": [("user", f"{interrupt('first')} {take(value)}")]})
    graph.add_edge(START, "node")
    app: Any = graph.compile(checkpointer=saver)
    app.invoke({"messages": []}, THREAD)
    [asked] = app.invoke(Command(resume="now"), THREAD)["__interrupt__"]
    assert asked.value["arguments"] == {"what": value if seen is ... else seen}
    assert app.invoke(Command(resume=True), THREAD)["messages"][-1].content == "now taken"
