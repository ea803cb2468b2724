"""An agent of LangGraph in a process that tests kill: it asks a model, charges, waits for a person, and ships.

It is run by `nursery.py`, as `main(store, ledger, entries, durability, action)`. Started again, it goes on as LangGraph
says: with the input if the thread has no checkpoint, with the answer if it was interrupted, else with nothing.
"""

import json
import operator
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import everstep
from everstep import Done, NotDone
from everstep.integrations.langgraph import EverstepSaver
from everstep.testing.ledger import apply, ask

WHERE: dict[str, str] = {}


class State(TypedDict):
    amount: int
    log: Annotated[list[str], operator.add]


def find_charge(key: str, amount: int) -> Done | NotDone:
    path = Path(WHERE["entries"])
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [one for one in lines if (one["kind"], one["effect"], one["key"]) == ("applied", "charge", key)]
    return Done(f"charge-{found[0]['digest'][:12]}") if found else NotDone()


@everstep.step(effect="read")
def ask_model(prompt: str) -> str:
    return ask(WHERE["ledger"], "model", everstep.key(), prompt)


@everstep.step(effect="once", probe=find_charge)
def charge(amount: int) -> str:
    return apply(WHERE["ledger"], "charge", everstep.key(), amount)


@everstep.step
def ship(amount: int) -> str:
    return apply(WHERE["ledger"], "ship", everstep.key(), amount)


def plan(state: State) -> dict[str, Any]:
    return {"log": [ask_model("what to do"), ask_model(f"with {state['amount']}")]}


def pay(state: State) -> dict[str, Any]:
    receipt = charge(state["amount"])
    answer = interrupt({"charged": state["amount"], "receipt": receipt})
    return {"log": [receipt, str(answer), ship(state["amount"])]}


def end(state: State) -> dict[str, Any]:
    return {"log": [ask_model("done")]}


def graph_for(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("pay", pay)
    graph.add_node("end", end)
    graph.add_edge(START, "plan").add_edge("plan", "pay").add_edge("pay", "end")
    return graph.compile(checkpointer=saver)


CONFIG: Any = {"configurable": {"thread_id": "order 1"}}


def go_on(app: Any, durability: Any) -> Any:
    """Do what comes next in the thread, as a program does that was started again."""
    state = app.get_state(CONFIG)
    if state.created_at is None:
        return app.invoke({"amount": 5, "log": []}, CONFIG, durability=durability)
    if state.interrupts:
        return app.invoke(Command(resume=True), CONFIG, durability=durability)
    # `state.next` does not tell whether it has ended: a node whose writes are saved is not in it.
    return app.invoke(None, CONFIG, durability=durability)


def main(store: str, ledger: str, entries: str, durability: str, action: str) -> None:
    """Go on as far as it goes (`run`), or only to the next interrupt (`once`)."""
    WHERE.update(ledger=ledger, entries=entries)
    with EverstepSaver(store, lease=float(os.environ.get("SHOP_LEASE", "30"))) as saver:
        app = graph_for(saver)
        result = go_on(app, durability)
        while action == "run" and "__interrupt__" in result:
            result = go_on(app, durability)
    print(json.dumps(result.get("log")))
    sys.stdout.flush()
