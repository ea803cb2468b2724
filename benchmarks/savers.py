"""Checkpointers of LangGraph side by side: Everstep's and the stock ones, on SQLite and on PostgreSQL, in one run.

    .venv-bench/bin/python benchmarks/savers.py [--quick] [--rounds N] [--sqlite]

Each figure is of a process of its own with a store of its own; the systems take turns. Every step is saved before the
next one begins (`durability="sync"`), and every commit waits for the disk. Results go to benchmarks/results/savers.md.
"""

import argparse
import itertools
import json
import operator
import os
import random
import sqlite3
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypedDict

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "savers.md"
SYSTEMS = {
    "sqlite": ("Everstep on SQLite", "langgraph-checkpoint-sqlite"),
    "postgres": ("Everstep on PostgreSQL", "langgraph-checkpoint-postgres"),
}
STEPS, LONG, GROWING, KILOBYTE = 1000, 10_000, 800, 1000
THREAD = "bench"


class State(TypedDict, total=False):
    x: int
    until: int
    items: Annotated[list[str], operator.add]


# -- in a process of its own --------------------------------------------------------------------------------------
@contextmanager
def saver_of(system: str, url: str) -> Iterator[Any]:
    """Give a saver that waits for the disk with each commit."""
    if system.startswith("Everstep"):
        from everstep.integrations.langgraph import EverstepSaver

        with EverstepSaver(url) as saver:
            yield saver
    elif "postgres" in system:
        from langgraph.checkpoint.postgres import PostgresSaver

        with PostgresSaver.from_conn_string(url) as saver:
            saver.setup()
            yield saver
    else:
        from langgraph.checkpoint.sqlite import SqliteSaver

        connection = sqlite3.connect(url.removeprefix("sqlite:///"), check_same_thread=False)
        connection.execute("PRAGMA synchronous = FULL")
        yield SqliteSaver(connection)
        connection.close()


def graph_of(saver: Any, node: Any) -> Any:
    from langgraph.graph import END, START, StateGraph

    graph = StateGraph(State)
    graph.add_node("act", node)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: "act" if state["x"] < state["until"] else END, ["act", END])
    return graph.compile(checkpointer=saver)


def run(app: Any, given: Any, steps: int) -> Any:
    config: Any = {"configurable": {"thread_id": THREAD}, "recursion_limit": steps + 100}
    return app.invoke(given, config, durability="sync")


def measure(system: str, url: str, what: str, steps: int) -> dict[str, float]:
    """Measure one thing in this process."""
    begun = time.perf_counter()
    moments: list[float] = []
    chance = random.Random(1)

    def act(state: State) -> dict[str, Any]:
        moments.append(time.perf_counter())
        return {"x": state["x"] + 1}

    def grow(state: State) -> dict[str, Any]:
        return {"x": state["x"] + 1, "items": ["".join(chance.choices(string.ascii_letters, k=KILOBYTE))]}

    with saver_of(system, url) as saver:
        if what == "resume":  # one more step of a thread that another process has made
            state = run(graph_of(saver, act), {"until": steps + 1}, steps)
            assert state["x"] == steps + 1
            return {"ms": (time.perf_counter() - begun) * 1000}
        started = time.perf_counter()
        state = run(graph_of(saver, grow if what == "grow" else act), {"x": 0, "until": steps, "items": []}, steps)
        seconds = time.perf_counter() - started
        assert state["x"] == steps
    gaps = [(b - a) * 1000 for a, b in itertools.pairwise(moments)]
    return {"steps/s": steps / seconds, "p50 ms": statistics.median(gaps) if gaps else 0.0}


# -- the parent ---------------------------------------------------------------------------------------------------
def in_process(system: str, url: str, what: str, steps: int) -> dict[str, float]:
    """Measure it in a process of its own."""
    command = [sys.executable, __file__, "--measure", system, url, what, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{system}, {what}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def bytes_of(folder: Path, server: Any, database: str) -> int:
    """Return what a store takes on the disk."""
    if not database:
        return sum(path.stat().st_size for path in folder.iterdir())
    from place import OWN_BYTES

    found: int = server.ask(OWN_BYTES, database=database)[0][0]
    return found


def one_round(kind: str, system: str, server: Any, plan: dict[str, int]) -> dict[str, float]:
    """Measure all of one system, each with a fresh store."""
    found: dict[str, float] = {}
    for what in ("steps", "long", "grow"):
        place = server.database() if server is not None else nullcontext("")
        with tempfile.TemporaryDirectory(dir=HERE.parent / "build") as made, place as database:
            folder = Path(made)
            url = server.uri(database) if kind == "postgres" else f"sqlite:///{folder}/store.db"
            figures = in_process(system, url, "grow" if what == "grow" else "steps", plan[what])
            if what == "steps":
                found |= figures
            elif what == "long":
                found["resume ms"] = in_process(system, url, "resume", plan[what])["ms"]
            else:
                found["bytes"] = bytes_of(folder, server, database)
                found["growing steps/s"] = figures["steps/s"]
    return found


def table(kind: str, found: dict[str, list[dict[str, float]]], plan: dict[str, int]) -> str:
    """Return a table of the medians."""

    def middle(system: str, name: str) -> float:
        return statistics.median(one[name] for one in found[system])

    rows = [
        (f"steps a second, {plan['steps']:,} steps of a small state", "steps/s", "{:,.0f}"),
        ("median of a step, ms", "p50 ms", "{:.2f}"),
        (f"a new process does step {plan['long'] + 1:,} of a thread, from its start, ms", "resume ms", "{:,.0f}"),
        (f"bytes on the disk, {plan['grow']} steps that append 1 KB to a list", "bytes", "{:,.0f}"),
        ("steps a second of these", "growing steps/s", "{:,.0f}"),
    ]
    ours, stock = SYSTEMS[kind]
    lines = [f"| {kind} | {ours} | {stock} |", "| --- | --- | --- |"]
    for text, name, form in rows:
        lines.append(f"| {text} | {form.format(middle(ours, name))} | {form.format(middle(stock, name))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of it, to see that it works")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sqlite", action="store_true", help="without PostgreSQL")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        system, url, what, steps = asked.measure
        print(json.dumps(measure(system, url, what, int(steps))))
        return
    part = 10 if asked.quick else 1
    plan = {"steps": STEPS // part, "long": LONG // part, "grow": GROWING // part}
    (HERE.parent / "build").mkdir(exist_ok=True)
    sections: list[str] = []
    for kind in ("sqlite",) if asked.sqlite else ("sqlite", "postgres"):
        if kind == "postgres":
            from server import started
        found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS[kind]}
        with started() if kind == "postgres" else nullcontext() as server:
            for _ in range(1 if asked.quick else asked.rounds):
                for system in SYSTEMS[kind]:
                    found[system].append(one_round(kind, system, server, plan))
        sections.append(table(kind, found, plan))
        print(sections[-1], flush=True)
    if not asked.quick:
        about = (
            f"Made by `benchmarks/savers.py` on {os.cpu_count()} cores; medians of {asked.rounds} rounds, in turn.\n"
        )
        RESULTS.write_text("# Checkpointers of LangGraph\n\n" + about + "\n" + "\n\n".join(sections) + "\n", "utf-8")


if __name__ == "__main__":
    main()
