"""What happened in a run of a graph, from the events of its history."""

from collections import Counter
from typing import Any, Literal

import msgspec

from everstep.model import events as ev

NodeState = Literal["", "done", "running", "queued", "joins", "failed"]


class NodeStory(msgspec.Struct):
    """The events at one node."""

    name: str
    kind: str = ""
    effect: str = ""
    join: str = ""
    visits: int = 0
    """How many visits have begun."""
    finished: int = 0
    failures: int = 0
    """How many attempts have failed, in all visits."""
    state: NodeState = ""
    where: list[str] = []
    """The visits in progress, or those that were in progress when the run ended."""


class EdgeStory(msgspec.Struct):
    """The events along one edge."""

    source: str
    target: str
    how: str = ""
    taken: int = 0


class Story:
    """The events of a graph so far."""

    def __init__(self, started: ev.GraphStarted) -> None:
        self.name = started.graph
        self._started = started
        self._moves: list[tuple[int, ev.GraphMoved]] = []
        self._failures: Counter[str] = Counter()
        self._failed: dict[int, str] = {}

    def take(self, seq: int, kind: str, step: str, body: Any) -> None:
        """Apply the next event."""
        if kind == "graph_moved":
            self._moves.append((seq, body))
        elif kind in ("attempt_failed", "step_failed"):
            self._failures[step.partition("#")[0]] += 1
            if kind == "step_failed":
                self._failed[seq] = step
        elif kind == "run_retried":
            self._moves = [(at, move) for at, move in self._moves if at < body.voids]
            self._failed = {at: visit for at, visit in self._failed.items() if at < body.voids}

    @property
    def under_way(self) -> list[str]:
        """The visits that have begun and not finished."""
        finished = {move.after for _, move in self._moves}
        return [visit for _, move in self._moves for visit in move.begins if visit not in finished]

    def nodes(self) -> list[NodeStory]:
        """Return all nodes, with what happened at them."""
        stories = {
            name: NodeStory(name, facts.get("kind", ""), facts.get("effect", ""), facts.get("join", ""))
            for name, facts in self._started.nodes.items()
        }
        for _, move in self._moves:
            for visit in move.begins:
                _of(stories, visit).visits += 1
            if move.after:
                _of(stories, move.after).finished += 1
        for name, count in self._failures.items():
            if name in stories:
                stories[name].failures = count
        last = self._moves[-1][1] if self._moves else ev.GraphMoved(0)
        for story in stories.values():
            story.state = "done" if story.finished else ""
        for node in last.awaits:
            _of(stories, node).state = "joins"
        begun = {visit for _, move in self._moves for visit in move.begins}
        for visit in (visit for _, move in self._moves for visit in move.queued if visit not in begun):
            _of(stories, visit).state = "queued"
        for visit in self.under_way:
            story = _of(stories, visit)
            story.state = "failed" if visit in self._failed.values() else "running"
            story.where.append(visit)
        return list(stories.values())

    def edges(self) -> list[EdgeStory]:
        """Return all edges, with how often they were taken."""
        taken: Counter[tuple[str, str]] = Counter()
        for _, move in self._moves:
            for one in move.took:
                taken[one[0], one[1]] += int(one[2]) if len(one) > 2 else 1
        return [
            EdgeStory(edge[0], edge[1], edge[2] if len(edge) > 2 else "", taken[edge[0], edge[1]])
            for edge in self._started.edges
        ]


def _of(stories: dict[str, NodeStory], visit: str) -> NodeStory:
    name = visit.partition("#")[0]
    return stories.setdefault(name, NodeStory(name))
