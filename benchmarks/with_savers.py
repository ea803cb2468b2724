"""One graph of LangGraph with a checkpointer, ours or a stock one; `durability="sync"`, a commit waits for the disk.

`python with_savers.py stock-steps FOLDER` is a measurement (see measuring.py), of BENCH_STEPS steps.
"""

import itertools
import operator
import os
import random
import statistics
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from measuring import Figures, Stopwatch, expect, main
from place import POSTGRES, url_of

STEPS = int(os.environ.get("BENCH_STEPS", "1000"))
APPENDED_BYTES = 1_000

Node = Callable[["State"], dict[str, Any]]


class State(TypedDict, total=False):
    x: int
    until: int
    items: Annotated[list[str], operator.add]


@contextmanager
def saver_in(folder: Path, whose: str) -> Iterator[Any]:
    """Give a checkpointer."""
    if whose == "everstep":
        from everstep.integrations.langgraph import EverstepSaver

        with EverstepSaver(url_of(folder, "everstep")) as saver:
            yield saver
    elif POSTGRES:
        from langgraph.checkpoint.postgres import PostgresSaver

        with PostgresSaver.from_conn_string(POSTGRES) as saver:
            saver.setup()
            yield saver
    else:
        from langgraph.checkpoint.sqlite import SqliteSaver

        with SqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
            saver.setup()
            expect(saver.conn.execute("PRAGMA synchronous").fetchone(), (2,), "synchronous=FULL")
            yield saver


def run(saver: Any, node: Node, given: State, steps: int) -> None:
    """Go through a node until it has been visited so many times."""
    graph = StateGraph(State)
    graph.add_node("act", node)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: "act" if state["x"] < state["until"] else END, ["act", END])
    config: Any = {"configurable": {"thread_id": "bench"}, "recursion_limit": steps + 10}
    app: Any = graph.compile(checkpointer=saver)
    expect(app.invoke({**given, "until": steps}, config, durability="sync")["x"], steps, "visits of the node")


def take_steps(folder: Path, whose: str) -> Figures:
    """Steps that change a number."""
    moments: list[float] = []

    def act(state: State) -> dict[str, Any]:
        moments.append(time.perf_counter())
        return {"x": state["x"] + 1}

    with saver_in(folder, whose) as saver, Stopwatch() as watch:
        run(saver, act, {"x": 0}, STEPS)
    gaps = [1000 * (after - before) for before, after in itertools.pairwise(moments)]
    return {**watch.rate(STEPS), "p50_milliseconds": statistics.median(gaps)}


def append(folder: Path, whose: str) -> Figures:
    """Steps that append a text that cannot be made smaller to a list."""
    chance = random.Random(1)

    def grow(state: State) -> dict[str, Any]:
        return {"x": state["x"] + 1, "items": ["".join(chance.choices(string.ascii_letters, k=APPENDED_BYTES))]}

    with saver_in(folder, whose) as saver, Stopwatch() as watch:
        run(saver, grow, {"x": 0, "items": []}, STEPS)
    return watch.rate(STEPS)


def one_more(folder: Path, whose: str) -> Figures:
    """One more step of a thread that another process has left, by the clock of the machine."""

    def act(state: State) -> dict[str, Any]:
        return {"x": state["x"] + 1}

    with saver_in(folder, whose) as saver:
        run(saver, act, {}, STEPS + 1)
    return {"ended": time.time()}


WAYS = {"steps": take_steps, "append": append, "more": one_more}

if __name__ == "__main__":
    main(
        {f"{whose}-{name}": partial(way, whose=whose) for whose in ("everstep", "stock") for name, way in WAYS.items()}
    )
