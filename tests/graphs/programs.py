"""Graphs in processes of their own, to be killed: `python programs.py CASE FOLDER`.

Every body leaves a line in `notes.txt` of its folder before it does anything: its visit and what it was given. With
KILL_IN=visit the process kills itself there, once.
"""

import asyncio
import json
import operator
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import everstep
from everstep import step

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


@dataclass
class State:
    skip: bool = False
    words: list[str] = field(default_factory=list)
    laps: int = 0
    left: str = ""
    right: str = ""
    inner: int = 0
    answer: Any = None


def append(name: str, text: str) -> None:
    """Add a line to a file, in one write."""
    descriptor = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def note(given: Any) -> None:
    """Say that a body was begun, and with what; and die here, if that is wanted."""
    visit = everstep.current().step
    append("notes.txt", json.dumps([visit, asdict(given) if isinstance(given, State) else given]))
    if os.environ.get("KILL_IN") == visit:
        os.kill(os.getpid(), signal.SIGKILL)


def adding(name: str, seconds: float = 0.0, **options: Any) -> Any:
    """Return a step that adds its name to the words."""

    @step(name=name, **options)
    async def add(state: State) -> dict[str, Any]:
        if seconds:
            await asyncio.sleep(seconds)
        note(state)
        return {"words": [name]}

    return add


def new_graph(name: str, **options: Any) -> everstep.Graph[State]:
    return everstep.Graph(name, state=State, reduce={"words": operator.add}, **options)


def skipping() -> everstep.Graph[State]:
    graph = new_graph("skipping")
    for name in ("a", "b", "c"):
        graph.node(adding(name), name=name)
    graph.edge("a", "b", when=lambda s: not s.skip)
    graph.edge("a", "c", when=lambda s: s.skip)
    graph.edge("b", "c")
    return graph


def joining(most: int | None = None) -> everstep.Graph[State]:
    graph = new_graph("joining", max_concurrency=most)
    for name, seconds in (("l", 0.0), ("r", 0.1 if most is None else 0.0), ("j", 0.0)):
        graph.node(adding(name, seconds), name=name)
    graph.edge("l", "j")
    graph.edge("r", "j")
    return graph


def counting() -> everstep.Graph[State]:
    graph = new_graph("counting", budget=everstep.Budget(usd=10.0, steps=100))

    @step(effect="read", cost={"usd": 0.5, "tokens": 100})
    async def ask(state: State) -> dict[str, Any]:
        note(state)
        everstep.charge(usd=0.25, tokens=40)
        return {"words": ["asked"]}

    for name in ("one", "two", "three"):
        graph.node(ask, name=name)
    graph.edge("one", "two")
    graph.edge("two", "three")
    return graph


def routing() -> everstep.Graph[State]:
    """Its condition asks something that is another after the crash. Something is always under way."""
    graph = new_graph("routing")
    for name, seconds in (("slow", 0.1), ("a", 0.0), ("left", 0.0), ("right", 0.0), ("end", 0.0)):
        graph.node(adding(name, seconds), name=name)
    graph.edge("slow", "end")
    graph.edge("a", "left", when=lambda s: os.environ.get("WAY", "left") == "left")
    graph.edge("a", "right", when=lambda s: os.environ.get("WAY", "left") != "left")
    graph.edge("left", "end")
    graph.edge("right", "end")
    return graph


def reading() -> everstep.Graph[State]:
    """Nodes that only read: their steps would otherwise begin before anything is durable."""
    graph = new_graph("reading")
    for name in ("a", "b", "c", "d"):
        graph.node(adding(name, effect="read"), name=name)
    graph.edge("a", "b")
    graph.edge("a", "c")
    graph.edge("b", "d")
    graph.edge("c", "d")
    return graph


def failing() -> everstep.Graph[State]:
    graph = new_graph("failing")

    @graph.node(name="shaky", effect="repeat", retry=everstep.Retry(attempts=3, first=0.01))
    async def shaky(state: State) -> dict[str, Any]:
        note(state)
        append("tries.txt", "tried")
        if (FOLDER / "tries.txt").read_text().count("tried") < 2:
            raise RuntimeError("not yet")
        return {"words": ["shaky"]}

    graph.node(adding("after"), name="after")
    graph.edge("shaky", "after")
    return graph


def renaming() -> everstep.Graph[State]:
    """Between two deployments its second node gets another name."""
    graph = new_graph("renaming")
    second = os.environ.get("SECOND", "draft")
    for name in ("load", second, "check"):
        graph.node(adding(name), name=name)
    graph.edge("load", second)
    graph.edge(second, "check")
    if "MIGRATED" in os.environ:
        graph.migrate("draft is write", {"draft": "write"})
    return graph


def looping() -> everstep.Graph[State]:
    graph = new_graph("looping")

    @step
    async def lap(state: State) -> dict[str, Any]:
        note(state)
        return {"laps": state.laps + 1}

    graph.node(lap)
    graph.node(adding("check"), name="check")
    graph.edge(graph.start, "lap")
    graph.edge("lap", "check")
    graph.edge("check", "lap", when=lambda s: s.laps < 3)
    graph.edge("check", graph.end, when=lambda s: s.laps >= 3)
    return graph


def nesting() -> everstep.Graph[State]:
    inner = everstep.Graph("inner", state=State, reduce={})
    for name in ("first", "second"):

        @step(name=name)
        async def count(state: State) -> dict[str, Any]:
            note(state)
            return {"inner": state.inner + 1}

        inner.node(count, name=name)
    inner.edge("first", "second")
    outer = new_graph("nesting")
    outer.node(adding("before"), name="before")
    outer.node(inner)
    outer.node(adding("after"), name="after")
    outer.edge("before", "inner")
    outer.edge("inner", "after")
    return outer


def fanning() -> everstep.Graph[State]:
    graph = new_graph("fanning", max_concurrency=2)
    graph.node(adding("plan"), name="plan")

    @step
    async def look(item: int) -> dict[str, Any]:
        note(item)
        return {"words": [f"item {item}"]}

    graph.node(look)
    graph.node(adding("sum"), name="sum")
    graph.each("plan", "look", over=lambda s: range(4))
    graph.edge("look", "sum")
    return graph


def was_done(key: str, state: State) -> Any:
    """Ask the outside whether the approved work was done."""
    done = (FOLDER / "done.txt").read_text().splitlines() if (FOLDER / "done.txt").exists() else []
    return everstep.Done({"words": ["act"]}) if key in done else everstep.NotDone()


def approving() -> everstep.Graph[State]:
    """A person approves what is done once."""
    graph = new_graph("approving")
    graph.node(adding("draft"), name="draft")
    graph.approval("approve", lambda s: {"words": s.words}, into="answer", answer=bool)

    @graph.node(name="act")
    @step(effect="once", probe=was_done)
    async def act(state: State) -> dict[str, Any]:
        append("done.txt", everstep.key())
        note(state)
        return {"words": ["act"]}

    graph.edge("draft", "approve")
    graph.edge("approve", "act", when=lambda s: s.answer)
    graph.edge("approve", graph.end, when=lambda s: not s.answer)
    return graph


CASES: dict[str, Callable[[], everstep.Graph[State]]] = {
    "skipping": skipping,
    "skipped": skipping,
    "joining": joining,
    "queued": lambda: joining(1),
    "counting": counting,
    "routing": routing,
    "reading": reading,
    "failing": failing,
    "renaming": renaming,
    "looping": looping,
    "nesting": nesting,
    "fanning": fanning,
    "approving": approving,
}


def main() -> None:
    case = sys.argv[1]
    state = State(skip=case == "skipped")
    url = os.environ.get("STORE_URL") or str(FOLDER / "everstep.db")
    if case == "approving":
        ended = run_and_approve(CASES[case](), state, url)
    else:
        ended = everstep.run(CASES[case](), state, id="g", url=url)
    print(json.dumps(asdict(ended)))


def run_and_approve(graph: everstep.Graph[State], state: State, url: str) -> State:
    """Run a graph, and say yes to whatever it asks."""
    with everstep.open(url) as app:
        run = app.start(graph, state, id="g")
        while run.status() in ("queued", "running", "waiting"):
            for asked in run.approvals():
                run.approve(True, id=asked.id)
            time.sleep(0.01)
        return run.result(timeout=60)


if __name__ == "__main__":
    main()
