"""LangGraph with its savers, `durability="sync"`: each step is saved before the next one begins."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from measuring import AT_A_TIME, RUN_STEPS, RUNS, STEPS, Figures, ManyRuns, Stopwatch, expect, main
from place import POSTGRES, SETTINGS, Weight, ask, settings_text
from psycopg.rows import dict_row
from with_sqlite import durability_text

CONNECTIONS = 10
"""W2: those of the pool that its documentation advises for more than one thread."""
POOLED: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}


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
def graph_in(folder: Path, *, connections: int = 1) -> Iterator[tuple[Any, str]]:
    """Give a graph with the blocking saver, and what decides about its durability."""
    if POSTGRES:
        from langgraph.checkpoint.postgres import PostgresSaver

        with PostgresSaver.from_conn_string(POSTGRES) as saver:
            saver.setup()
            found = settings_text(*saver.conn.execute(SETTINGS).fetchone().values())
            if connections == 1:
                yield looping(act, saver), found
                return
        from psycopg_pool import ConnectionPool

        with ConnectionPool(POSTGRES, min_size=connections, kwargs=POOLED) as pool:
            yield looping(act, PostgresSaver(pool)), found
        return
    from langgraph.checkpoint.sqlite import SqliteSaver

    with SqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        saver.setup()
        journal_mode = saver.conn.execute("PRAGMA journal_mode").fetchone()[0]
        synchronous = saver.conn.execute("PRAGMA synchronous").fetchone()[0]
        yield looping(act, saver), durability_text(journal_mode, synchronous, sqlite3.sqlite_version)


@asynccontextmanager
async def async_graph_in(folder: Path, *, connections: int = 1) -> AsyncIterator[Any]:
    """Give a graph with the saver for asyncio."""
    if POSTGRES:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        async with AsyncPostgresSaver.from_conn_string(POSTGRES) as saver:
            await saver.setup()
            if connections == 1:
                yield looping(act_async, saver)
                return
        from psycopg_pool import AsyncConnectionPool

        async with AsyncConnectionPool(POSTGRES, min_size=connections, kwargs=POOLED) as pool:
            yield looping(act_async, AsyncPostgresSaver(pool))
        return
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async with AsyncSqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        yield looping(act_async, saver)


def checkpoints(folder: Path) -> int:
    """Return how many checkpoints a second connection sees."""
    return int(ask(folder, "langgraph", "SELECT count(*) FROM checkpoints")[0])


# -- W1 ----------------------------------------------------------------------------------------------------------------
def one_long_run(folder: Path) -> Figures:
    with graph_in(folder) as (graph, settings):
        graph.invoke(begin(10), run_of("warm", 10), durability="sync")
        before, weight = checkpoints(folder), Weight(folder)
        with Stopwatch() as watch:
            result = graph.invoke(begin(STEPS), run_of("measured", STEPS), durability="sync")
        expect(result["x"], STEPS, "the result")
        expect(checkpoints(folder) - before >= STEPS, True, "a checkpoint for each step in the database")
        found = {**watch.rate(STEPS), "settings": settings}
    return {**found, **weight.figures(STEPS, 10)}


async def one_long_run_async(folder: Path) -> Figures:
    async with async_graph_in(folder) as graph:
        await graph.ainvoke(begin(10), run_of("warm", 10), durability="sync")
        before = checkpoints(folder)
        with Stopwatch() as watch:
            result = await graph.ainvoke(begin(STEPS), run_of("measured", STEPS), durability="sync")
        expect(result["x"], STEPS, "the result")
        expect(checkpoints(folder) - before >= STEPS, True, "a checkpoint for each step in the database")
        return watch.rate(STEPS)


# -- W2 ----------------------------------------------------------------------------------------------------------------
def many_short_runs(folder: Path) -> Figures:
    with graph_in(folder, connections=CONNECTIONS) as (graph, _), ThreadPoolExecutor(AT_A_TIME) as pool:

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
    async with async_graph_in(folder, connections=CONNECTIONS) as graph:
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
