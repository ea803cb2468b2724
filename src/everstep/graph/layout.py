"""Where the nodes of a graph are in a picture: in layers from the start to the end, with few crossings.

An edge leads from a layer to a later one. One that passes layers in between has a place in each of them, so that it
runs past the nodes there; one that goes round a cycle is drawn back along the side.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

SWEEPS = 8
GAP = 28.0
LAYER = 84.0
HEIGHT = 38.0
MARGIN = 24.0
ASIDE = 22.0
LABEL = 34.0
"""The width of a label next to an edge that leads back."""


class Place(msgspec.Struct):
    """The position of a node: the middle of its box."""

    x: float
    y: float
    width: float


class Layout(msgspec.Struct):
    """The positions of a picture's parts."""

    places: dict[str, Place]
    ways: dict[tuple[str, str], list[tuple[float, float]]]
    """The points of an edge."""
    width: float
    height: float


def laid_out(widths: Mapping[str, float], edges: Sequence[tuple[str, str]], first: str) -> Layout:
    """Return the positions of nodes of these widths. Every node is reached from `first`."""
    return _Laying(widths, edges, first).layout()


class _Laying:
    def __init__(self, widths: Mapping[str, float], edges: Sequence[tuple[str, str]], first: str) -> None:
        self.widths = dict(widths)
        self.edges = list(dict.fromkeys(edges))
        self.back = _back_edges(self.edges, first)
        self.forward = [edge for edge in self.edges if edge not in self.back]
        self.depth = self._depths(first)
        self.chains: dict[tuple[str, str], list[str]] = {}
        self.links: list[tuple[str, str]] = []
        self._put_in_between()
        self.layers = self._ordered()

    def _depths(self, first: str) -> dict[str, int]:
        """Return the layer of each node: one below the lowest node that leads to it."""
        depth = dict.fromkeys(self.widths, 0)
        for _ in self.widths:
            for source, target in self.forward:
                depth[target] = max(depth[target], depth[source] + 1)
        depth[first] = 0
        return depth

    def _put_in_between(self) -> None:
        """Give an edge that passes layers a place in each of them."""
        for number, (source, target) in enumerate(self.forward):
            chain = [source]
            for layer in range(self.depth[source] + 1, self.depth[target]):
                name = f"\0{number}.{layer}"
                self.depth[name], self.widths[name] = layer, 12.0
                chain.append(name)
            chain.append(target)
            self.chains[source, target] = chain
            self.links += pairwise(chain)

    def _ordered(self) -> list[list[str]]:
        layers: list[list[str]] = [[] for _ in range(max(self.depth.values()) + 1)]
        for name, layer in self.depth.items():
            layers[layer].append(name)
        above, below = defaultdict(list), defaultdict(list)
        for source, target in self.links:
            above[target].append(source)
            below[source].append(target)
        for sweep in range(SWEEPS):
            neighbours, order = (above, layers[1:]) if sweep % 2 == 0 else (below, layers[-2::-1])
            for row in order:
                place = {name: index for one in layers for index, name in enumerate(one)}
                row.sort(key=lambda name: _mean([place[one] for one in neighbours[name]], place[name]))
        return layers

    def layout(self) -> Layout:
        """Return the picture."""
        rows = [sum(self.widths[name] for name in layer) + GAP * (len(layer) - 1) for layer in self.layers]
        middle = max(rows) / 2 + MARGIN
        every: dict[str, Place] = {}
        for depth, (layer, row) in enumerate(zip(self.layers, rows, strict=True)):
            x = middle - row / 2
            for name in layer:
                every[name] = Place(x + self.widths[name] / 2, MARGIN + HEIGHT / 2 + depth * LAYER, self.widths[name])
                x += self.widths[name] + GAP
        ways = {edge: [(every[name].x, every[name].y) for name in chain] for edge, chain in self.chains.items()}
        right = max(place.x + place.width / 2 for place in every.values())
        for source, target in sorted(self.back, key=lambda edge: self.depth[edge[0]] - self.depth[edge[1]]):
            side = self._side_for(source, target, every, ways)
            right = max(right, side + LABEL)
            one, two = every[source], every[target]
            ways[source, target] = [(one.x, one.y), (side, one.y), (side, two.y), (two.x, two.y)]
        places = {name: place for name, place in every.items() if not name.startswith("\0")}
        height = 2 * MARGIN + HEIGHT + LAYER * (len(self.layers) - 1)
        return Layout(places, ways, max(right, max(rows) + MARGIN) + MARGIN, height)

    def _side_for(
        self, source: str, target: str, every: Mapping[str, Place], ways: Mapping[tuple[str, str], Any]
    ) -> float:
        """Return how far to the right an edge leads back: past the nodes there, and past other such edges."""
        first, last = self.depth[target], self.depth[source]
        beside = [name for name, layer in self.depth.items() if first <= layer <= last]
        side = max(every[name].x + every[name].width / 2 for name in beside) + ASIDE
        for one, two in self.back:
            is_beside = self.depth[two] <= last and self.depth[one] >= first
            if (one, two) in ways and is_beside:
                side = max(side, ways[one, two][1][0] + ASIDE)
        return float(side)


def _mean(numbers: Sequence[int], otherwise: int) -> float:
    return sum(numbers) / len(numbers) if numbers else float(otherwise)


def _back_edges(edges: Sequence[tuple[str, str]], first: str) -> set[tuple[str, str]]:
    """Return the edges that lead back to a node on the way to them."""
    found: set[tuple[str, str]] = set()
    following: dict[str, list[str]] = defaultdict(list)
    for source, target in edges:
        following[source].append(target)
    done: set[str] = set()
    way: list[str] = []
    ahead: list[tuple[str, int]] = [(first, 0)]
    while ahead:
        node, next_one = ahead.pop()
        if next_one == 0:
            way.append(node)
        if next_one < len(following[node]):
            ahead.append((node, next_one + 1))
            target = following[node][next_one]
            if target in way:
                found.add((node, target))
            elif target not in done:
                ahead.append((target, 0))
        else:
            way.pop()
            done.add(node)
    return found
