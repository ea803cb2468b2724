"""Branches of a thread: what a person who goes back in time does anew, and what a lost checkpoint does not.

A thread that goes on from an older checkpoint runs the same nodes in supersteps of the same numbers again. So where a
call is also says in which branch: by the checkpoint that the branch leaves, and how many went on from there before. It
does not depend on the ids of the branch's own checkpoints, so it is the same when those are lost.
"""

import threading
from collections import OrderedDict
from typing import Any, Final
from weakref import ref

from langgraph.types import Command

from everstep.errors import Damaged
from everstep.integrations.langgraph.states import body_of
from everstep.integrations.langgraph.threads import Loaded, Threads

KNOWN_MAX: Final = 10_000
"""The branches of so many checkpoints are remembered."""
BY_PERSONS: Final = ("fork", "update")
"""The sources of checkpoints that a person makes beside others."""


class Branches:
    """In which branch of its thread each checkpoint is, and each graph that runs."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._leaving: dict[tuple[str, str], str] = {}
        """Branches that graphs which run here are about to begin, by the checkpoint that they leave."""
        self._running: dict[str, list[tuple[ref[Any], str]]] = {}
        """The graphs that run here, and their branches, by thread."""

    def begin(self, thread: str, loop: Any, found: Loaded | None, *, is_addressed: bool) -> None:
        """A graph begins to run, from a checkpoint that it was told or from the newest."""
        if any(one is loop for one, _ in self._here(thread)):
            return  # it looks for the newest one as well
        branch = found.body.branch if found is not None else ""
        goes_back = found is not None and is_addressed and not _answers(loop.input)
        if found is not None and goes_back and (others := self._others(thread, found.row.id, "")):
            branch = self._leaving[thread, found.row.id] = f"{found.row.id}.{others}"
        with self._lock:
            if len(self._running) >= KNOWN_MAX:
                self._running = {name: there for name, there in self._running.items() if any(one() for one, _ in there)}
            there = [one for one in self._running.get(thread, ()) if one[0]() is not None]
            self._running[thread] = [*there, (ref(loop), branch)]

    def of_call(self, thread: str, configurable: dict[str, Any]) -> str:
        """Return the branch of the graph that a node which is running belongs to."""
        here = self._here(thread)
        if len({branch for _, branch in here}) > 1:
            id = (configurable.get("checkpoint_map") or {}).get("")
            here = [one for one in here if one[0].checkpoint["id"] == id] or here
        return here[-1][1] if here else ""

    def _here(self, thread: str) -> list[tuple[Any, str]]:
        """Return the graphs that run a thread here, with their branches."""
        there = [(one(), branch) for one, branch in self._running.get(thread, ())]
        return [(loop, branch) for loop, branch in there if loop is not None]

    def of_state(self, thread: str, id: str, parent: str, source: str) -> str:
        """Return the branch of a checkpoint that is about to be saved."""
        branch = self._leaving.pop((thread, parent), None)
        if branch is None:
            others = self._others(thread, parent, id) if parent and source in BY_PERSONS else 0
            branch = f"{parent}.{others}" if others else self._of(thread, parent)
        self._note(thread, id, branch)
        return branch

    def _of(self, thread: str, id: str) -> str:
        """Return the branch of a checkpoint that was saved."""
        if not id:
            return ""
        branch = self._known.get((thread, id))
        if branch is None:
            row = self._threads.ground.saved.state(thread, "", id)
            try:
                branch = body_of(thread, row).branch if row is not None else ""
            except Damaged:
                branch = ""
            self._note(thread, id, branch)
        return branch

    def _note(self, thread: str, id: str, branch: str) -> None:
        with self._lock:
            self._known[thread, id] = branch
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def _others(self, thread: str, parent: str, id: str) -> int:
        """Return how many checkpoints other than one go on from another. They are newer, so they come before it."""
        count = 0
        for row in self._threads.rows(thread, ""):
            if row.id <= parent:
                break
            count += row.parent == parent and row.id != id
        return count


def _answers(given: Any) -> bool:
    """Tell whether a graph was given the answer to an interrupt: that is to go on, wherever it was asked."""
    return isinstance(given, Command) and given.resume is not None
