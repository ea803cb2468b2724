"""Branches of a thread: what a person who goes back in time does anew, and what a lost checkpoint does not.

A thread that goes on from an older checkpoint runs the same nodes in supersteps of the same numbers again. So where a
call is also says in which branch: by the checkpoint that the branch leaves, and how many went on from there before. It
does not depend on the ids of the branch's own checkpoints, so it is the same when those are lost.

To go on from a checkpoint that nobody has gone on from is no branch, also if the checkpoint is named. But LangGraph
copies it then, and the copy has the number of a superstep: those numbers are skipped. A copy is in the branch of what
it is a copy of; so if another copy of that has gone on, to go on from this one is a branch as well.
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
"""The branches of so many checkpoints are remembered."""
COPY: Final = "fork"
CHANGE: Final = "update"
BY_PERSONS: Final = (COPY, CHANGE)
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
        self._running: dict[str, Running] = {}
        """The graph that runs each thread here, or did last."""

    def begin(self, thread: str, loop: Any, found: Loaded | None, *, is_addressed: bool) -> None:
        """A graph begins to run, from a checkpoint that it was told or from the newest."""
        there = self._running.get(thread)
        if there is not None and there.loop is loop:
            return  # it looks for the newest one as well
        standing = self._begins(thread, loop, found, is_addressed) if found is not None else Standing()
        with self._lock:
            if len(self._running) >= KNOWN_MAX:
                self._running = {name: there for name, there in self._running.items() if there.loop is not None}
            self._running[thread] = Running(loop, standing)

    def _begins(self, thread: str, loop: Any, found: Loaded, is_addressed: bool) -> Standing:
        """Return where a graph is that goes on from a checkpoint."""
        id, standing = found.row.id, _standing_of(found.body)
        self._leaving.pop((thread, id), None)  # of a graph that was cut off before it saved anything
        if not is_addressed or _answers(loop.input):
            return standing
        if (others := self._others(thread, id, "")) or self._is_overtaken(thread, found):
            standing = self._leaving[thread, id] = standing._replace(branch=f"{id}.{others}")
        elif (loop.input is None or isinstance(loop.input, Command)) and self._is_copied(thread, found):
            standing = self._leaving[thread, id] = standing._replace(skipped=standing.skipped + 1)
        return standing

    def _is_copied(self, thread: str, found: Loaded) -> bool:
        """Tell whether LangGraph copies a checkpoint that it is told to go on from: not what a person made last."""
        newest = next(self._threads.rows(thread, "", page=1), None)
        is_newest = newest is None or newest.id == found.row.id
        copied = what_is_copied()
        return (found.body.source not in BY_PERSONS and copied.others) or (not is_newest and copied.older)

    def _is_overtaken(self, thread: str, found: Loaded) -> bool:
        """Tell whether a copy is of a checkpoint from which somebody else has gone on in its branch."""
        if found.body.source != COPY:
            return False
        after = self._after(thread, found.row.parent)
        for row in after.get(found.row.parent, ()):
            body = self._body(thread, row) if row.id != found.row.id else None
            if body is not None and body.branch == found.body.branch and self._went_on(thread, row, after):
                return True
        return False

    def of_call(self, thread: str) -> Standing:
        """Return where the graph is that a node which is running belongs to."""
        there = self._running.get(thread)
        return there.standing if there is not None and there.loop is not None else Standing()

    def of_state(self, thread: str, id: str, parent: str, source: str) -> Standing:
        """Return where a checkpoint is that is about to be saved."""
        # A person's change is made by no graph that runs.
        standing = self._leaving.pop((thread, parent), None) if source != CHANGE else None
        if standing is None:
            standing = self._of(thread, parent)
            # What a person changes is not what a copy goes on with, however far that came.
            if parent and source in BY_PERSONS and (others := self._others(thread, parent, id, with_copies=True)):
                standing = standing._replace(branch=f"{parent}.{source}.{others}")
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

    def _others(self, thread: str, parent: str, id: str, *, with_copies: bool = False) -> int:
        """Return how many checkpoints other than one go on from another.

        A copy from which nobody has gone on does not count: whoever made it has not come further than the other one.
        """
        after = self._after(thread, parent)
        others = [row for row in after.get(parent, ()) if row.id != id]
        return len(others) if with_copies else sum(self._went_on(thread, row, after) for row in others)

    def _after(self, thread: str, id: str) -> dict[str, list[SavedState]]:
        """Return the checkpoints that are newer than one, by those that they go on from."""
        after: dict[str, list[SavedState]] = {}
        for row in self._threads.rows(thread, ""):
            if row.id <= id:
                break
            after.setdefault(row.parent, []).append(row)
        return after

    def _went_on(self, thread: str, row: SavedState, after: dict[str, list[SavedState]]) -> bool:
        """Tell whether a checkpoint is more than a copy, or anybody has come further from there."""
        body = self._body(thread, row)
        if body is None or body.source != COPY:
            return True
        return any(self._went_on(thread, one, after) for one in after.get(row.id, ()))


def _standing_of(body: Body) -> Standing:
    return Standing(body.branch, body.skipped)


class Copied(NamedTuple):
    """Which checkpoints LangGraph copies when it is told to go on from them."""

    others: bool
    """Those that it has made itself in a superstep."""
    older: bool
    """Those that a person has made, if there are newer ones."""


@cache
def what_is_copied() -> Copied:
    """Tell which checkpoints LangGraph copies, in the version that is installed.

    It does not say so in any other way; and if it were taken for granted, a version that does not would be given what
    an earlier superstep came to. So that is looked at, once.
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
    """Tell whether a graph was given the answer to an interrupt: that is to go on, wherever it was asked."""
    return isinstance(given, Command) and given.resume is not None
