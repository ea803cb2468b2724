"""The same with LangGraph: `resume_langgraph.py FOLDER MARK STEPS`. It goes on from its newest checkpoint."""

import sys
import time
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from place import POSTGRES, is_empty

FOLDER, MARK, LAST = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


class State(TypedDict):
    x: int


def act(state: State) -> State:
    if state["x"] == LAST:
        MARK.write_text(str(time.time_ns()))
        time.sleep(600)
    return {"x": state["x"] + 1}


def saver_in(folder: Path, *, is_new: bool) -> Any:
    """Return the saver, whose tables are made if they are not there."""
    if not POSTGRES:
        from langgraph.checkpoint.sqlite import SqliteSaver

        return SqliteSaver.from_conn_string(f"{folder}/langgraph.db")
    from langgraph.checkpoint.postgres import PostgresSaver

    if is_new:
        with PostgresSaver.from_conn_string(POSTGRES) as saver:
            saver.setup()
    return PostgresSaver.from_conn_string(POSTGRES)


if __name__ == "__main__":
    is_new = is_empty(FOLDER)
    graph = StateGraph(State)
    graph.add_node("act", act)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: "act" if state["x"] <= LAST else END, ["act", END])
    with saver_in(FOLDER, is_new=is_new) as saver:
        settings = {"configurable": {"thread_id": "killed"}, "recursion_limit": LAST + 10}
        graph.compile(checkpointer=saver).invoke({"x": 0} if is_new else None, settings, durability="sync")
