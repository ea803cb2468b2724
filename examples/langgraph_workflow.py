"""An agent of LangGraph inside a workflow: its graph runs in a run of Everstep, and needs no checkpointer.

The model is scripted, so this needs no account and no network. Try it in an empty folder:

    python langgraph_workflow.py        # kill it whenever you like, and start it again
    everstep crashtest langgraph_workflow.py '"Lisbon"' --files '*.txt'

Each answer of the model and each call of a tool is a step of the run. So it has all that workflows have: timers,
signals, budgets, and a crash test that kills it at every boundary.
"""

from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import everstep
from everstep.integrations.langgraph import aask_model, tools


class ScriptedModel(BaseChatModel):
    """Stands for your model."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> "ScriptedModel":
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        said = sum(message.type == "ai" for message in messages)
        used = {"input_tokens": 20 * len(messages), "output_tokens": 10, "total_tokens": 20 * len(messages) + 10}
        script = [
            AIMessage("", tool_calls=[{"name": "search", "args": {"city": "Lisbon"}, "id": "call-1"}]),
            AIMessage("", tool_calls=[{"name": "book", "args": {"hotel": "Aurora", "nights": 2}, "id": "call-2"}]),
            AIMessage("You have a room in the Aurora."),
        ]
        answer = script[said].model_copy(update={"usage_metadata": used})
        return ChatResult(generations=[ChatGeneration(message=answer)])


@everstep.step(effect="read")
async def search(city: str) -> str:
    """Search hotels in a city."""
    return f"In {city}: Aurora, Bela Vista."


@everstep.step
async def book(hotel: str, nights: int) -> str:
    """Book a hotel."""
    # The key is the same in every attempt at this call. The file stands for a service that knows it, and books once.
    Path("booking.txt").write_text(f"{hotel}, {nights} nights")
    return f"{hotel} is booked"


TOOLS = tools([search, book])
MODEL = ScriptedModel().bind_tools(TOOLS)


async def think(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await aask_model(MODEL, state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("think", think)
builder.add_node("tools", ToolNode(TOOLS))
builder.add_edge(START, "think")
builder.add_conditional_edges("think", tools_condition)
builder.add_edge("tools", "think")
graph = builder.compile()


@everstep.workflow(budget=everstep.Budget(tokens=5_000))
async def assistant(city: str) -> str:
    asked = {"messages": [HumanMessage(f"Book me a hotel in {city}, two nights.")]}
    return str((await graph.ainvoke(asked))["messages"][-1].content)


if __name__ == "__main__":
    print(everstep.run(assistant, "Lisbon", id="trip-1"))
