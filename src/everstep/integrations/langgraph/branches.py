"""Branches of a thread: what a person who goes back in time does anew, and what a lost checkpoint does not.

A thread that goes on from an older checkpoint runs the same nodes in supersteps of the same numbers again. So where a
call is also says in which branch: by the checkpoint that the branch leaves, and how many went on from there before. It
does not depend on the ids of the branch's own checkpoints, so it is the same when those are lost.

To go on from a checkpoint that nobody has gone on from is no branch, also if the checkpoint is named. But LangGraph
copies it then, and the copy has the number of a superstep: those numbers are skipped.
"""

import threading
from collections import OrderedDict
from contextvars import Context
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import ref

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command
from langsmith import tracing_context

from everstep.errors import Damaged
from everstep.integrations.langgraph.states import Body, body_of
from everstep.integrations.langgraph.threads import Loaded, Threads

KNOWN_MAX: Final = 10_000
"""The branches of so many checkpoints are remembered."""
COPY: Final = "fork"
BY_PERSONS: Final = (COPY, "update")
"""The sources of checkpoints that a person makes beside others."""


class Standing(NamedTuple):
    """Where in its thread a checkpoint is, or a graph that runs."""

    branch: str = ""
    skipped: int = 0
    """How many numbers of supersteps stand for copies of checkpoints."""


class Running:
    """A graph that runs here, and where it began."""

    def __init__(self, loop: Any, standing: Standing) -> None:
        self._loop = ref(loop)
        self.standing = standing

    @property
    def loop(self) -> Any:
        """LangGraph's, or None if it has ended."""
        return self._loop()


class Branches:
    """In which branch of its thread each checkpoint is, and each graph that runs."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Standing] = OrderedDict()
        self._leaving: dict[tuple[str, str], Standing] = {}
        """Where graphs that run here are, if that is not where the checkpoint is that they go on from, by that."""
        self._running: dict[str, list[Running]] = {}
        """The graphs that run here, by thread."""

    def begin(self, thread: str, loop: Any, found: Loaded | None, *, is_addressed: bool) -> None:
        """A graph begins to run, from a checkpoint that it was told or from the newest."""
        if any(there is loop for there, _ in self._here(thread)):
            return  # it looks for the newest one as well
        standing = self._begins(thread, loop, found, is_addressed) if found is not None else Standing()
        with self._lock:
            if len(self._running) >= KNOWN_MAX:
                self._running = {name: there for name, there in self._running.items() if any(one.loop for one in there)}
            self._running[thread] = [*(one for _, one in self._here(thread)), Running(loop, standing)]

    def _begins(self, thread: str, loop: Any, found: Loaded, is_addressed: bool) -> Standing:
        """Return where a graph is that goes on from a checkpoint."""
        id, standing = found.row.id, _standing_of(found.body)
        if not is_addressed or _answers(loop.input):
            return standing
        if others := self._others(thread, id, ""):
            standing = self._leaving[thread, id] = standing._replace(branch=f"{id}.{others}")
        elif loop.input is None and found.body.source not in BY_PERSONS and copies_what_is_named():
            standing = self._leaving[thread, id] = standing._replace(skipped=standing.skipped + 1)
        return standing

    def of_call(self, thread: str, configurable: dict[str, Any]) -> Standing:
        """Return where the graph is that a node which is running belongs to."""
        here = self._here(thread)
        if len(here) > 1:
            id = (configurable.get("checkpoint_map") or {}).get("")
            here = [(loop, one) for loop, one in here if _is_at(loop, id)] or here
        return here[-1][1].standing if here else Standing()

    def _here(self, thread: str) -> list[tuple[Any, Running]]:
        """Return the graphs that run a thread here, each with its loop, which then cannot go while it is looked at."""
        return [(loop, one) for one in self._running.get(thread, ()) if (loop := one.loop) is not None]

    def of_state(self, thread: str, id: str, parent: str, source: str) -> Standing:
        """Return where a checkpoint is that is about to be saved."""
        standing = self._leaving.pop((thread, parent), None)
        if standing is None:
            standing = self._of(thread, parent)
            if parent and source in BY_PERSONS and (others := self._others(thread, parent, id)):
                standing = standing._replace(branch=f"{parent}.{others}")
        self._note(thread, id, standing)
        return standing

    def _of(self, thread: str, id: str) -> Standing:
        """Return where a checkpoint is that was saved."""
        if not id:
            return Standing()
        standing = self._known.get((thread, id))
        if standing is None:
            body = self._body(thread, self._threads.ground.saved.state(thread, "", id))
            standing = _standing_of(body) if body is not None else Standing()
            self._note(thread, id, standing)
        return standing

    def _body(self, thread: str, row: Any) -> Body | None:
        try:
            return body_of(thread, row) if row is not None else None
        except Damaged:
            return None

    def _note(self, thread: str, id: str, standing: Standing) -> None:
        with self._lock:
            self._known[thread, id] = standing
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def _others(self, thread: str, parent: str, id: str) -> int:
        """Return how many checkpoints other than one go on from another. They are newer, so they come before it.

        A copy from which nobody has gone on does not count: whoever made it has not come further than the other one.
        """
        count = 0
        parents: set[str] = set()
        for row in self._threads.rows(thread, ""):
            if row.id <= parent:
                break
            if row.parent == parent and row.id != id:
                body = self._body(thread, row) if row.id not in parents else None
                count += body is None or body.source != COPY
            parents.add(row.parent)
        return count


def _standing_of(body: Body) -> Standing:
    return Standing(body.branch, body.skipped)


def _is_at(loop: Any, id: Any) -> bool:
    """Tell whether a graph is at a checkpoint. One that has just asked where it begins is at none yet."""
    checkpoint = getattr(loop, "checkpoint", None)
    return checkpoint is not None and checkpoint["id"] == id


@cache
def copies_what_is_named() -> bool:
    """Tell whether LangGraph, in the version that is installed, copies a checkpoint that it is told to go on from.

    It does not say so in any other way; and if it were taken for granted, a version that does not would be given what
    an earlier superstep came to. So that is looked at, once.
    """
    graph: Any = StateGraph(dict)
    graph.add_node("node", lambda state: state)
    graph.add_edge(START, "node")
    app = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["node"])
    thread: Any = {"configurable": {"thread_id": "a"}}

    def look() -> bool:
        with tracing_context(enabled=False):
            app.invoke({"a": 1}, thread)
            app.invoke(None, app.get_state(thread).config)
        return any(one.metadata.get("source") == COPY for one in app.get_state_history(thread))

    return Context().run(look)


def _answers(given: Any) -> bool:
    """Tell whether a graph was given the answer to an interrupt: that is to go on, wherever it was asked."""
    return isinstance(given, Command) and given.resume is not None
