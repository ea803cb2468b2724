"""A graph as one run sees it, under the names that the run began with."""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from everstep.graph.changed import Changed, Renames
from everstep.graph.definition import Definition, Edge
from everstep.graph.nodes import Node, step_node
from everstep.model import events as ev


class Form:
    """The definition that a run's schedule follows, and its nodes."""

    def __init__(
        self,
        name: str,
        nodes: Mapping[str, Node],
        definition: Definition,
        source: str,
        recorded: ev.GraphStarted | None,
        renames: Renames,
    ) -> None:
        self._nodes = nodes
        self._definition = definition
        facts = {node: one.facts() for node, one in nodes.items()}
        edges = [[edge.source, edge.target, *([edge.how] if edge.how else [])] for edge in definition.edges]
        self.started = ev.GraphStarted(0, name, facts, edges, source)
        self.changed = Changed(self.started, recorded, renames)
        self._now = {old: new for new, old in self.changed.names.items()}

    @cached_property
    def definition(self) -> Definition:
        """The shape of the graph, under the run's own names."""
        names, now = self.changed.names, self._definition
        if not names:
            return now
        rules = {names.get(node, node): rule for node, rule in now.nodes.items()}
        edges = [
            Edge(names.get(edge.source, edge.source), names.get(edge.target, edge.target), edge.when, edge.over)
            for edge in now.edges
        ]
        return Definition(rules, edges, name=now.name, max_concurrency=now.max_concurrency)

    def node(self, name: str) -> Node:
        """Return the node that the run knows by this name."""
        if name not in self._now:
            return self._nodes[name]
        node = self._nodes[self._now[name]]
        work = step_node(node.work, name, None, None, None) if node.kind == "step" else node.work
        return msgspec.structs.replace(node, name=name, work=work)
