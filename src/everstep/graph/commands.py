"""The commands of a graph in addition to its nodes' work: they record its definition and its moves."""

from typing import Any

import msgspec

from everstep.engine.code.commands import Command
from everstep.graph.changed import Changed
from everstep.graph.definition import END
from everstep.model import events as ev
from everstep.model.digests import digest_of


class StartGraph(Command):
    """The graph begins or resumes, with this definition."""

    kind = "graph_started"
    __slots__ = ("call", "changed", "started")

    def __init__(self, call: int, started: ev.GraphStarted, changed: Changed) -> None:
        self.call = call
        self.started = started
        self.changed = changed

    @property
    def source(self) -> str:  # type: ignore[override]
        """Where the graph is declared."""
        return self.started.source

    def body(self) -> ev.GraphStarted:
        return self.started

    def text(self) -> str:
        return f"graph {self.started.graph} of {', '.join(self.started.nodes)}{self.changed.text()}"

    def digest(self) -> str:
        return digest_of(msgspec.json.encode([self.started.nodes, self.started.edges])).hex()

    def compare(self, recorded: ev.GraphStarted) -> tuple[str, bool]:
        return ("definition", not self.changed.gone) if self.changed else ("", False)


class MoveGraph(Command):
    """A visit has finished, and others begin."""

    kind = "graph_moved"
    payload_field = "items"
    crash_point = "graph.moved"
    __slots__ = ("call", "moved")

    def __init__(self, moved: ev.GraphMoved) -> None:
        self.call = moved.call
        self.moved = moved

    @property
    def source(self) -> str:  # type: ignore[override]
        """Where the node that has finished is declared."""
        return self.moved.source

    def body(self) -> ev.GraphMoved:
        return self.moved

    def text(self) -> str:
        begins = ", ".join(self.moved.begins) or "nothing new"
        return f"move of the graph after {self.moved.after or 'its start'} to {begins}"

    def compare(self, recorded: Any) -> tuple[str, bool]:
        if recorded.after != self.moved.after:
            return "finished node", False
        return ("", False) if recorded.begins == self.moved.begins else ("nodes that begin", False)


def shown(node: str) -> str:
    """Return a node's name for a person."""
    return "end" if node == END else node
