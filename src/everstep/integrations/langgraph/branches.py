"""Branches of a thread: what is done again when a person goes back in time, and what is not when a checkpoint is lost.

A thread that continues from an older checkpoint runs the same nodes in supersteps of the same numbers again. So the
place of a call includes its branch: the checkpoint that the branch leaves, and how many branches left it before. It
does not depend on the ids of the branch's own checkpoints, so it is the same when those are lost.

Continuing from a checkpoint that nothing has continued from is no branch, also if the checkpoint is named. But
LangGraph copies it then, and the copy has the number of a superstep: those numbers are skipped. A copy is in the branch
of its original; so if another copy of that has continued, continuing from this one is a branch as well.
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

from everstep.adapters import SavedState
from everstep.errors import Damaged
from everstep.integrations.langgraph.states import Body, body_of
from everstep.integrations.langgraph.threads import Loaded, Threads

KNOWN_MAX: Final = 10_000
"""The maximum number of checkpoints whose branches are remembered."""
COPY: Final = "fork"
CHANGE: Final = "update"
BY_PERSONS: Final = (COPY, CHANGE)
"""The sources of checkpoints that a person makes, outside of a running graph."""


class Standing(NamedTuple):
    """The place of a checkpoint, or of a running graph, in its thread."""

    branch: str = ""
    skipped: int = 0
    """How many numbers of supersteps belong to copies of checkpoints."""


class Running:
    """A running graph, and where it began."""

    def __init__(self, loop: Any, standing: Standing) -> None:
        self._loop = ref(loop)
        self.standing = standing

    @property
    def loop(self) -> Any:
        """LangGraph's loop, or None if it has ended."""
        return self._loop()


class Branches:
    """The branch of each checkpoint, and of each running graph."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Standing] = OrderedDict()
        self._leaving: dict[tuple[str, str], Standing] = {}
        """The places of running graphs by the checkpoint they continue from, where they differ from that
        checkpoint's place.
        """
        self._running: dict[str, Running] = {}
        """The graph that runs each thread here, or did last."""

    def begin(self, thread: str, loop: Any, found: Loaded | None, *, is_addressed: bool) -> None:
        """Record that a graph begins to run, from a named checkpoint or from the newest."""
        there = self._running.get(thread)
        if there is not None and there.loop is loop:
            return  # it looks for the newest one as well
        standing = self._begins(thread, loop, found, is_addressed) if found is not None else Standing()
        with self._lock:
            if len(self._running) >= KNOWN_MAX:
                self._running = {name: there for name, there in self._running.items() if there.loop is not None}
            self._running[thread] = Running(loop, standing)

    def _begins(self, thread: str, loop: Any, found: Loaded, is_addressed: bool) -> Standing:
        """Return the place of a graph that continues from a checkpoint."""
        id, standing = found.row.id, _standing_of(found.body)
        self._leaving.pop((thread, id), None)  # left by a graph that was cut off before it saved anything
        if not is_addressed or _answers(loop.input):
            return standing
        if (others := self._others(thread, id, "")) or self._is_overtaken(thread, found):
            standing = self._leaving[thread, id] = standing._replace(branch=f"{id}.{others}")
        elif (loop.input is None or isinstance(loop.input, Command)) and self._is_copied(thread, found):
            standing = self._leaving[thread, id] = standing._replace(skipped=standing.skipped + 1)
        return standing

    def _is_copied(self, thread: str, found: Loaded) -> bool:
        """Return True if LangGraph copies a checkpoint to continue from it: not one that a person made last."""
        newest = next(self._threads.rows(thread, "", page=1), None)
        is_newest = newest is None or newest.id == found.row.id
        copied = what_is_copied()
        return (found.body.source not in BY_PERSONS and copied.others) or (not is_newest and copied.older)

    def _is_overtaken(self, thread: str, found: Loaded) -> bool:
        """Return True if a copy's original has been continued by another graph in its branch."""
        if found.body.source != COPY:
            return False
        after = self._after(thread, found.row.parent)
        for row in after.get(found.row.parent, ()):
            body = self._body(thread, row) if row.id != found.row.id else None
            if body is not None and body.branch == found.body.branch and self._went_on(thread, row, after):
                return True
        return False

    def of_call(self, thread: str) -> Standing:
        """Return the place of the graph that a running node belongs to."""
        there = self._running.get(thread)
        return there.standing if there is not None and there.loop is not None else Standing()

    def of_state(self, thread: str, id: str, parent: str, source: str) -> Standing:
        """Return the place of a checkpoint that is about to be saved."""
        # No running graph makes a person's change.
        standing = self._leaving.pop((thread, parent), None) if source != CHANGE else None
        if standing is None:
            standing = self._of(thread, parent)
            # A copy does not continue with what a person changes, however far that came.
            if parent and source in BY_PERSONS and (others := self._others(thread, parent, id, with_copies=True)):
                standing = standing._replace(branch=f"{parent}.{source}.{others}")
        self._note(thread, id, standing)
        return standing

    def _of(self, thread: str, id: str) -> Standing:
        """Return the place of a saved checkpoint."""
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

    def _others(self, thread: str, parent: str, id: str, *, with_copies: bool = False) -> int:
        """Return how many other checkpoints continue from a checkpoint.

        A copy without a successor does not count: it has come no further than its original.
        """
        after = self._after(thread, parent)
        others = [row for row in after.get(parent, ()) if row.id != id]
        return len(others) if with_copies else sum(self._went_on(thread, row, after) for row in others)

    def _after(self, thread: str, id: str) -> dict[str, list[SavedState]]:
        """Return the checkpoints that are newer than one, by their parents."""
        after: dict[str, list[SavedState]] = {}
        for row in self._threads.rows(thread, ""):
            if row.id <= id:
                break
            after.setdefault(row.parent, []).append(row)
        return after

    def _went_on(self, thread: str, row: SavedState, after: dict[str, list[SavedState]]) -> bool:
        """Return True if a checkpoint is more than a copy, or has a successor."""
        body = self._body(thread, row)
        if body is None or body.source != COPY:
            return True
        return any(self._went_on(thread, one, after) for one in after.get(row.id, ()))


def _standing_of(body: Body) -> Standing:
    return Standing(body.branch, body.skipped)


class Copied(NamedTuple):
    """Which checkpoints LangGraph copies before it continues from them."""

    others: bool
    """Those that it has made itself in a superstep."""
    older: bool
    """Those that a person has made, if newer ones exist."""


@cache
def what_is_copied() -> Copied:
    """Find out which checkpoints the installed version of LangGraph copies.

    No documented property says so; and assuming it would give a version that does not copy the results of an earlier
    superstep. So it is tried once.
    """
    graph: Any = StateGraph(dict)
    graph.add_node("node", lambda state: state)
    graph.add_edge(START, "node")
    app = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["node"])
    thread: Any = {"configurable": {"thread_id": "a"}}

    def is_copied(where: Any) -> bool:
        before = {one.config["configurable"]["checkpoint_id"] for one in app.get_state_history(thread)}
        app.invoke(None, where)
        made = [
            one for one in app.get_state_history(thread) if one.config["configurable"]["checkpoint_id"] not in before
        ]
        return any(one.metadata.get("source") == COPY for one in made)

    def look() -> Copied:
        with tracing_context(enabled=False):
            app.invoke({"a": 1}, thread)
            first = app.get_state(thread).config
            others = is_copied(first)
            changed = app.update_state(first, {"a": 2})
            app.update_state(first, {"a": 3})
            return Copied(others, is_copied(changed))

    return Context().run(look)


def _answers(given: Any) -> bool:
    """Return True if a graph got the answer to an interrupt: that continues it, wherever it was asked."""
    return isinstance(given, Command) and given.resume is not None
