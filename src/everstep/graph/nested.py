"""A graph as a node of another: its first state, and its changes in the outer one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from everstep.errors import GraphStuck, Misuse
from everstep.graph.nodes import Node
from everstep.graph.state import Shape

if TYPE_CHECKING:  # a real cycle: a graph is run by this, and has graphs as its nodes
    from everstep.graph.graph import Graph


class Nested:
    """Two graphs, one inside the other. They share the fields that both states have by name."""

    def __init__(self, outer: "Graph[Any]", inner: "Graph[Any]", node: Node) -> None:
        self._outer: Shape = outer.shape
        self._inner: Shape = inner.shape
        self._names = (outer.name, inner.name)
        self._node = node.name

    @property
    def _is_same(self) -> bool:
        return self._inner.cls is self._outer.cls

    def state(self, state: Any) -> Any:
        """Return the state with which the inner graph begins."""
        if self._is_same:
            return state
        given = self._shared(self._outer.values(state))
        if self._inner.is_dict:
            return given
        try:
            return self._inner.cls(**given)
        except (TypeError, ValueError) as error:
            both = ", ".join(given) or "nothing"
            raise Misuse(
                f"The node {self._node} of the graph {self._names[0]} cannot begin: the state {self._inner.name} of "
                f"the graph {self._names[1]} is not made from just what both states have ({both}). "
                "Give its other fields defaults, or call the graph in a function: `await inner(InnerState(…))`."
            ) from error

    def _shared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_same:
            return dict(values)
        return {name: values[name] for name in self._inner.shared_with(self._outer) if name in values}

    def changes(self, given: Any, returned: Any, now: Any, *, is_item: bool) -> tuple[dict[str, Any], frozenset[str]]:
        """Return the inner graph's changes of the outer state, and which of them replace its values.

        given: the state with which it began. If it is the outer state, fields with reducers have the old value and
        more; if it is an item, they have only what is to be added.

        now: the outer state now. Other nodes may have changed it meanwhile.
        """
        before, there = self._inner.values(given), self._outer.values(now)
        after = self._shared(self._inner.values(returned))
        changes = {name: value for name, value in after.items() if name not in before or before[name] != value}
        replaced: set[str] = set()
        if is_item:
            return changes, frozenset()
        for name in [name for name in changes if name in self._outer.reduce and name in there]:
            if name in before and there[name] == before[name]:
                replaced.add(name)
                continue
            changes[name] = _added(before.get(name), changes[name])
            if changes[name] is UNSET:
                raise GraphStuck(
                    f"The graph {self._node} changed {name!r} while another node did, and its value does not show what "
                    "it added. Let the graph put that into a separate field."
                )
        return changes, frozenset(replaced)


def _added(before: Any, after: Any) -> Any:
    """Return what was added to a list, a set or a dict, or UNSET if anything else was changed."""
    if isinstance(before, list) and isinstance(after, list) and after[: len(before)] == before:
        return after[len(before) :]
    if isinstance(before, set | frozenset) and isinstance(after, set | frozenset) and before <= after:
        return after - before
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() <= after.keys():
        return {key: value for key, value in after.items() if key not in before or before[key] != value}
    return UNSET
