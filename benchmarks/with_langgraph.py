"""LangGraph with its SQLite savers, `durability="sync"`: each step is saved before the next one begins."""

import asyncio
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from measuring import AT_A_TIME, RUN_STEPS, RUNS, STEPS, Figures, ManyRuns, Stopwatch, bytes_in, expect, main
from with_sqlite import durability_text


class State(TypedDict):
    x: int
    steps: int


def act(state: State) -> dict[str, int]:
    return {"x": state["x"] + 1}


async def act_async(state: State) -> dict[str, int]:
    return {"x": state["x"] + 1}


def looping(node: Any, saver: Any) -> Any:
    """Return a graph that goes through one node again and again."""
    graph = StateGraph(State)
    graph.add_node("act", node)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: "act" if state["x"] < state["steps"] else END, ["act", END])
    return graph.compile(checkpointer=saver)


def run_of(name: str, steps: int) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}, "recursion_limit": steps + 10}


def begin(steps: int) -> State:
    return {"x": 0, "steps": steps}


@contextmanager
def graph_in(folder: Path) -> Iterator[tuple[Any, str]]:
    """Give a graph with the blocking saver, and what decides about its durability."""
    with SqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        saver.setup()
        journal_mode = saver.conn.execute("PRAGMA journal_mode").fetchone()[0]
        synchronous = saver.conn.execute("PRAGMA synchronous").fetchone()[0]
        yield looping(act, saver), durability_text(journal_mode, synchronous, sqlite3.sqlite_version)


def checkpoints(folder: Path) -> int:
    """Return how many checkpoints a second connection sees."""
    connection = sqlite3.connect(f"file:{folder}/langgraph.db?mode=ro", uri=True)
    (found,) = connection.execute("SELECT count(*) FROM checkpoints").fetchone()
    connection.close()
    return int(found)


# -- W1 ----------------------------------------------------------------------------------------------------------------
def one_long_run(folder: Path) -> Figures:
    with graph_in(folder) as (graph, settings):
        graph.invoke(begin(10), run_of("warm", 10), durability="sync")
        before = checkpoints(folder)
        with Stopwatch() as watch:
            result = graph.invoke(begin(STEPS), run_of("measured", STEPS), durability="sync")
        expect(result["x"], STEPS, "the result")
        expect(checkpoints(folder) - before >= STEPS, True, "a checkpoint for each step in the database")
        found = {**watch.rate(STEPS), "settings": settings}
    return {**found, "step_bytes": bytes_in(folder) / (STEPS + 10)}


async def one_long_run_async(folder: Path) -> Figures:
    async with AsyncSqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        graph = looping(act_async, saver)
        await graph.ainvoke(begin(10), run_of("warm", 10), durability="sync")
        before = checkpoints(folder)
        with Stopwatch() as watch:
            result = await graph.ainvoke(begin(STEPS), run_of("measured", STEPS), durability="sync")
        expect(result["x"], STEPS, "the result")
        expect(checkpoints(folder) - before >= STEPS, True, "a checkpoint for each step in the database")
        return watch.rate(STEPS)


# -- W2 ----------------------------------------------------------------------------------------------------------------
def many_short_runs(folder: Path) -> Figures:
    with graph_in(folder) as (graph, _), ThreadPoolExecutor(AT_A_TIME) as pool:

        def one(number: int) -> int | None:
            if not runs.may_begin():
                return None
            found: int = graph.invoke(begin(RUN_STEPS), run_of(f"run-{number}", RUN_STEPS), durability="sync")["x"]
            return found

        graph.invoke(begin(10), run_of("warm", 10), durability="sync")
        runs = ManyRuns()
        with Stopwatch() as watch:
            for result in pool.map(one, range(RUNS)):
                if result is not None:
                    runs.count(result)
        return runs.figures(watch)


async def many_short_runs_async(folder: Path) -> Figures:
    async with AsyncSqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        graph = looping(act_async, saver)
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(number: int) -> None:
            async with gate:
                if runs.may_begin():
                    run = run_of(f"run-{number}", RUN_STEPS)
                    runs.count((await graph.ainvoke(begin(RUN_STEPS), run, durability="sync"))["x"])

        await graph.ainvoke(begin(10), run_of("warm", 10), durability="sync")
        runs = ManyRuns()
        with Stopwatch() as watch:
            await asyncio.gather(*(one(number) for number in range(RUNS)))
        return runs.figures(watch)


if __name__ == "__main__":
    main(
        {
            "w1-def": one_long_run,
            "w1-async": lambda folder: asyncio.run(one_long_run_async(folder)),
            "w2-def": many_short_runs,
            "w2-async": lambda folder: asyncio.run(many_short_runs_async(folder)),
        }
    )
