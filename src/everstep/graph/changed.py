"""The differences between the definition that a run began with and that of its code now."""

from collections.abc import Mapping, Sequence
from typing import Final

from everstep.model import events as ev

Renames = Sequence[tuple[str, Mapping[str, str]]]


class Changed:
    """The differences, in words. A run keeps the names that it began with: `names` has the recorded one of each
    node.
    """

    def __init__(self, now: ev.GraphStarted, recorded: ev.GraphStarted | None, renames: Renames) -> None:
        self.names: Final[dict[str, str]] = {}
        self.gone: list[str] = []
        self.new: list[str] = []
        self.other: list[str] = []
        if recorded is None:
            return
        for old in recorded.nodes:
            if (new := _followed(old, now.nodes, renames)) is None:
                self.gone.append(old)
            elif new != old:
                self.names[new] = old
        self.new = [node for node in now.nodes if self.names.get(node, node) not in recorded.nodes]
        for node, facts in now.nodes.items():
            before = recorded.nodes.get(self.names.get(node, node))
            if before is not None and before != facts:
                self.other.append(f"{node} {_differs(before, facts)}")
        edges = [[self.names.get(one, one) for one in edge[:2]] + edge[2:] for edge in now.edges]
        self._compare_edges({_ends(edge): _how(edge) for edge in edges}, recorded)

    def _compare_edges(self, now: Mapping[str, str], recorded: ev.GraphStarted) -> None:
        before = {_ends(edge): _how(edge) for edge in recorded.edges}
        self.other += [f"the edge {edge} is gone" for edge in before if edge not in now]
        self.other += [f"the edge {edge} is new" for edge in now if edge not in before]
        self.other += [
            f"the edge {edge} was taken {before[edge]} and is taken {how}"
            for edge, how in now.items()
            if before.get(edge, how) != how
        ]

    def __bool__(self) -> bool:
        return bool(self.gone or self.new or self.other)

    def text(self) -> str:
        """Return what has changed, and what to do about it."""
        if not self:
            return ""
        said = [f"{node} is gone" for node in self.gone] + [f"{node} is new" for node in self.new] + self.other
        text = f" ({'; '.join(said)})"
        if self.gone:
            new = self.new[0] if self.new else "…"
            text += (
                f". If {self.gone[0]} has another name now, say so: "
                f'graph.migrate("a name for it", {{"{self.gone[0]}": "{new}"}})'
            )
        return text


def _followed(node: str, known: Mapping[str, object], renames: Renames) -> str | None:
    """Return the present name of a node, or None if it is gone."""
    for _, nodes in renames:
        if node not in known:
            node = nodes.get(node, node)
    return node if node in known else None


def _differs(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return how the facts of a node differ. A node that joins `all` branches, the default, has no fact about that."""
    was, is_now = (f"{facts['kind']} {facts.get('effect', '')}".strip() for facts in (before, now))
    had, has = (facts.get("join", "all") for facts in (before, now))
    said = [f"was {was} and is {is_now}"] if was != is_now else []
    return " and ".join([*said, *([f"had join={had} and has join={has}"] if had != has else [])])


def _ends(edge: Sequence[str]) -> str:
    return f"{edge[0]} → {edge[1]}"


def _how(edge: Sequence[str]) -> str:
    """Return how an edge is taken, in words."""
    how = edge[2].split() if len(edge) > 2 else []
    each = "for each item" if "each" in how else ""
    when = "under a condition" if "if" in how else ""
    return " ".join(word for word in (each, when) if word) or "always"
