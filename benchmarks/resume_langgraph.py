"""The same with LangGraph: `resume_langgraph.py FOLDER MARK STEPS`. It goes on from its newest checkpoint."""

import sys
import time
from pathlib import Path
from typing import TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

FOLDER, MARK, LAST = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


class State(TypedDict):
    x: int


def act(state: State) -> State:
    if state["x"] == LAST:
        MARK.write_text(str(time.time_ns()))
        time.sleep(600)
    return {"x": state["x"] + 1}


if __name__ == "__main__":
    is_new = not Path(FOLDER, "langgraph.db").exists()
    graph = StateGraph(State)
    graph.add_node("act", act)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: "act" if state["x"] <= LAST else END, ["act", END])
    with SqliteSaver.from_conn_string(f"{FOLDER}/langgraph.db") as saver:
        settings = {"configurable": {"thread_id": "killed"}, "recursion_limit": LAST + 10}
        graph.compile(checkpointer=saver).invoke({"x": 0} if is_new else None, settings, durability="sync")
