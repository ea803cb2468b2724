"""The shape of a graph: its nodes, and the edges between them. Data, and what follows from it; nothing here runs."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Final, Literal

import msgspec

from everstep.errors import Misuse

START: Final = "<start>"
END: Final = "<end>"
Join = Literal["all", "any"]
JOINS: Final = ("all", "any")


class Edge(msgspec.Struct, frozen=True):
    """An edge from one node to another. It is taken if its condition is true, and once for each item if it has a
    list.
    """

    source: str
    target: str
    when: Callable[[Any], Any] | None = None
    over: Callable[[Any], Iterable[Any]] | None = None

    @property
    def how(self) -> str:
        """How it is taken: `if` its condition holds, for `each` item, both, or always."""
        return " ".join(word for word, has in (("if", self.when), ("each", self.over)) if has is not None)


class NodeRule(msgspec.Struct, frozen=True):
    """What a schedule needs to know about a node."""

    join: Join = "all"
    limit: int = 1000
    """How often it may be reached; all items of one fan-out count once."""
    asks: bool = False
    """Whether a person must approve it first. Until then it takes no place of `max_concurrency`."""


class Definition:
    """The shape of a graph, as a schedule uses it."""

    def __init__(
        self,
        nodes: Mapping[str, NodeRule],
        edges: Iterable[Edge],
        *,
        name: str = "graph",
        max_concurrency: int | None = None,
    ) -> None:
        self.name = name
        self.nodes = dict(nodes)
        self.edges = list(edges)
        self.max_concurrency = max_concurrency
        self._ahead: dict[tuple[str, frozenset[str]], frozenset[str]] = {}
        self._check_ends()
        entries = self.following(START)
        if not entries:
            targets = {edge.target for edge in self.edges}
            self.edges[:0] = [Edge(START, node) for node in self.nodes if node not in targets]
        self._check_all_are_reached()

    def following(self, node: str) -> list[Edge]:
        """Return the edges that leave a node, in their order."""
        return [edge for edge in self.edges if edge.source == node]

    @cached_property
    def leaving(self) -> dict[str, list[Edge]]:
        """The edges that leave each node."""
        return {node: self.following(node) for node in (START, *self.nodes)}

    @cached_property
    def back_edges(self) -> frozenset[tuple[str, str]]:
        """The edges that close a cycle: those back to a node on the way from the start to their source."""
        found: set[tuple[str, str]] = set()
        on_the_way: dict[str, None] = {}
        seen: set[str] = set()
        ahead = [(START, iter(self.leaving[START]))]
        while ahead:
            node, edges = ahead[-1]
            on_the_way[node] = None
            for edge in edges:
                if edge.target in on_the_way:
                    found.add((node, edge.target))
                elif edge.target != END and edge.target not in seen:
                    ahead.append((edge.target, iter(self.leaving[edge.target])))
                    break
            else:
                ahead.pop()
                seen.add(node)
                del on_the_way[node]
        return frozenset(found)

    def ahead(self, node: str, closed: frozenset[str] = frozenset()) -> frozenset[str]:
        """Return the nodes that are reachable from here without going round a cycle, or through a closed node."""
        found = self._ahead.get((node, closed))
        if found is None:
            reached: set[str] = set()
            following = [node]
            while following:
                for edge in self.leaving[following.pop()]:
                    target = edge.target
                    is_back = (edge.source, target) in self.back_edges
                    if target != END and target not in reached and target not in closed and not is_back:
                        reached.add(target)
                        following.append(target)
            found = self._ahead[node, closed] = frozenset(reached)
        return found

    @cached_property
    def firsts(self) -> tuple[str, ...]:
        """The nodes with `join="any"`."""
        return tuple(node for node, rule in self.nodes.items() if rule.join == "any")

    @cached_property
    def is_in_order(self) -> bool:
        """Whether visits begin in the order in which they were reached. A visit that asks a person first does not
        delay others.
        """
        return self.max_concurrency is None or not any(rule.asks for rule in self.nodes.values())

    def without_asking(self) -> "Definition":
        """Return the definition as older releases saw it, in which an approval took a place."""
        rules = {node: msgspec.structs.replace(rule, asks=False) for node, rule in self.nodes.items()}
        return Definition(rules, self.edges, name=self.name, max_concurrency=self.max_concurrency)

    # -- what is wrong with it ----------------------------------------------------------------------------------------
    def _check_ends(self) -> None:
        if not self.nodes:
            raise Misuse(f"The graph {self.name} has no nodes: add them with graph.node(function).")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in self.nodes and end not in (START, END):
                    known = ", ".join(self.nodes)
                    raise Misuse(f"The graph {self.name} has an edge of {end!r}, which is none of its nodes: {known}.")

    def _check_all_are_reached(self) -> None:
        reached: set[str] = set()
        ahead = [START]
        while ahead:
            for edge in self.following(ahead.pop()):
                if edge.target not in reached and edge.target != END:
                    reached.add(edge.target)
                    ahead.append(edge.target)
        if lost := [node for node in self.nodes if node not in reached]:
            raise Misuse(
                f"No way leads from the start of the graph {self.name} to {', '.join(lost)}. Add an edge to it, or say "
                f"where the graph begins: graph.edge(graph.start, {lost[0]!r})."
            )
