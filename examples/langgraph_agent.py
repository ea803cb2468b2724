"""An agent of LangGraph: it searches, asks a person, and books. Everstep is its checkpointer.

The model is scripted, so this needs no account and no network. Try it in an empty folder:

    python langgraph_agent.py           # kill it whenever you like, and start it again
    python langgraph_agent.py yes       # the answer of the person, when it waits for one

Answers of the model that were recorded are not asked for again, and the hotel is booked once: also when the process is
killed while it books, when a node is run again from its top, and when two processes answer at the same time.
"""

import sys
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

import everstep
from everstep.integrations.langgraph import EverstepSaver, ask_model, tools


class ScriptedModel(BaseChatModel):
    """Stands for your model."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> "ScriptedModel":
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        with open("model.log", "a") as log:
            log.write(f"{len(messages)} messages\n")
        said = sum(message.type == "ai" for message in messages)
        script = [
            AIMessage("", tool_calls=[{"name": "search", "args": {"city": "Lisbon"}, "id": "call-1"}]),
            AIMessage("", tool_calls=[{"name": "book", "args": {"hotel": "Aurora", "nights": 2}, "id": "call-2"}]),
            AIMessage("You have a room in the Aurora."),
        ]
        return ChatResult(generations=[ChatGeneration(message=script[said])])


@everstep.step(effect="read")
def search(city: str) -> str:
    """Search hotels in a city."""
    return f"In {city}: Aurora, Bela Vista."


# A booking must never happen twice. The receiver here is a file for each key, so a probe can look whether it did.
def find_booking(key: str, hotel: str, nights: int) -> everstep.Done | everstep.NotDone:
    path = Path(f"booking-{key[:8]}.txt")
    return everstep.Done(path.read_text()) if path.exists() else everstep.NotDone()


@everstep.step(effect="once", probe=find_booking)
def book(hotel: str, nights: int) -> str:
    """Book a hotel."""
    booked = f"{hotel}, {nights} nights"
    with open("bookings.log", "a") as log:
        log.write(f"{booked}\n")
    Path(f"booking-{everstep.key()[:8]}.txt").write_text(booked)
    return booked


TOOLS = tools([search, book])
MODEL = ScriptedModel().bind_tools(TOOLS)


def think(state: MessagesState) -> dict[str, Any]:
    answer = ask_model(MODEL, state["messages"])
    for call in answer.tool_calls:
        if call["name"] == "book" and interrupt(f"Book {call['args']}?") != "yes":
            return {"messages": [AIMessage("Then I book nothing.")]}
    return {"messages": [answer]}


def agent(saver: EverstepSaver) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile(checkpointer=saver)


def main(answers: list[str]) -> None:
    thread: Any = {"configurable": {"thread_id": "trip-1"}}
    with EverstepSaver() as saver:
        app = agent(saver)
        state = app.get_state(thread)
        if state.created_at is None:
            given: Any = {"messages": [HumanMessage("A hotel in Lisbon, please.")]}
        else:
            given = Command(resume=answers[0]) if state.interrupts and answers else None  # else it goes on
        result = app.invoke(given, thread)
    for asked in result.get("__interrupt__", []):
        print(f"{asked.value} Answer with: python langgraph_agent.py yes")
        return
    print(result["messages"][-1].content)


if __name__ == "__main__":
    main(sys.argv[1:])
