"""The schedule of a graph: one pure function of what has happened so far, live and on a resume alike.

`advance` takes a graph's progress, a visit that has finished and the edges that were taken after it, and returns the
new progress, and which visits begin. It knows nothing of time, of states, or of how a node does its work.

A node with `join="all"` begins when it has been reached and nothing in progress can still lead to it (a path round a
cycle does not count). So it waits for the branches that were taken, and not for those that were not. A node with
`join="any"` begins when the first branch reaches it; the others of the same round do not begin it again. What comes
from that visit itself, round a cycle, is a new round.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from everstep.errors import GraphStuck
from everstep.graph.definition import END, Definition

NO_FAN: Final = -1
_NOWHERE: Final[frozenset[str]] = frozenset()


class Visit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One visit of a node: its identity, in every attempt and every process."""

    node: str
    number: int
    passed: dict[str, int] = {}
    """The visits of nodes with `join="any"` that it comes from: a later one is of a later round."""
    item: int = 0
    """In a fan-out over a list: the number of its item, counted over the whole run."""

    def __hash__(self) -> int:
        return hash((self.node, self.number))

    @property
    def text(self) -> str:
        """The visit's name in a history: `check`, then `check#2`."""
        return self.node if self.number == 1 else f"{self.node}#{self.number}"


class Taken(msgspec.Struct, frozen=True):
    """An edge that was taken, and for a fan-out over a list the number of its items."""

    source: str
    target: str
    items: int = NO_FAN


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a graph. A resume needs nothing else."""

    visits: dict[str, int] = {}
    """How many visits each node has had, including queued ones."""
    rounds: dict[str, int] = {}
    """How often each node was reached; all items of a fan-out are one round."""
    running: dict[str, Visit] = {}
    """The visits in progress, by their texts."""
    queued: tuple[Visit, ...] = ()
    waiting: dict[str, dict[str, int]] = {}
    """Nodes that were reached and wait for other branches, with the visits that those have passed."""
    items: int = 0
    """How many items all fan-outs had so far."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.running or self.queued or self.waiting)


def advance(
    definition: Definition, progress: Progress, finished: Visit | None, taken: Iterable[Taken], allowed: int = 0
) -> tuple[Progress, list[Visit]]:
    """Return the progress after a visit has finished and these edges were taken, and the visits that begin.

    allowed: the number of approved visits that are running.
    """
    return _Advance(definition, progress, allowed).go(finished, taken)


class _Advance:
    """One step of a schedule, on copies."""

    def __init__(self, definition: Definition, progress: Progress, allowed: int) -> None:
        self.definition = definition
        self.allowed = allowed
        self.visits = dict(progress.visits)
        self.rounds = dict(progress.rounds)
        self.running = dict(progress.running)
        self.queued = list(progress.queued)
        self.waiting = dict(progress.waiting)
        self.items = progress.items

    def go(self, finished: Visit | None, taken: Iterable[Taken]) -> tuple[Progress, list[Visit]]:
        passed: dict[str, int] = {}
        if finished is not None:
            del self.running[finished.text]
            passed = dict(finished.passed)
            if self.definition.nodes[finished.node].join == "any":
                passed[finished.node] = max(passed.get(finished.node, 0), finished.number)
        for one in taken:
            if one.target != END:
                self._reach(one, passed)
        self._let_joins_go()
        begun = self._begin()
        progress = Progress(self.visits, self.rounds, self.running, tuple(self.queued), self.waiting, self.items)
        return progress, begun

    def _reach(self, taken: Taken, passed: dict[str, int]) -> None:
        node = taken.target
        if taken.items != NO_FAN:
            if taken.items:
                self._count_round(node)
            for _ in range(taken.items):
                self.items += 1
                self.queued.append(self._next_visit(node, passed, self.items))
        elif self.definition.nodes[node].join == "any":
            if passed.get(node, 0) >= self.visits.get(node, 0):  # otherwise another branch of this round came first
                self._count_round(node)
                self.queued.append(self._next_visit(node, passed))
        else:
            before = self.waiting.get(node, {})
            self.waiting[node] = before | {one: max(number, before.get(one, 0)) for one, number in passed.items()}

    def _let_joins_go(self) -> None:
        """Begin nodes that wait for other branches, unless something unfinished can still lead to them."""
        for node in [node for node in self.definition.nodes if node in self.waiting]:
            if not any(node in self.definition.ahead(*way) for way in self._unfinished(node)):
                self._count_round(node)
                self.queued.append(self._next_visit(node, self.waiting.pop(node)))

    def _unfinished(self, node: str) -> Iterator[tuple[str, frozenset[str]]]:
        """Give the positions of all other unfinished visits."""
        for visit in self.running.values():
            yield self._way_of(visit.node, visit.passed)
        for visit in self.queued:
            yield self._way_of(visit.node, visit.passed)
        for other, passed in self.waiting.items():
            if other != node:
                yield self._way_of(other, passed)

    def _way_of(self, node: str, passed: dict[str, int]) -> tuple[str, frozenset[str]]:
        """Return the position of something unfinished, and the nodes through which it does not lead because they
        have begun.
        """
        if not self.definition.firsts:
            return node, _NOWHERE
        late = [one for one in self.definition.firsts if passed.get(one, 0) < self.visits.get(one, 0) and one != node]
        return node, frozenset(late)

    def _next_visit(self, node: str, passed: dict[str, int], item: int = 0) -> Visit:
        self.visits[node] = number = self.visits.get(node, 0) + 1
        return Visit(node, number, passed, item)

    def _count_round(self, node: str) -> None:
        self.rounds[node] = self.rounds.get(node, 0) + 1
        limit = self.definition.nodes[node].limit
        if self.rounds[node] > limit:
            raise GraphStuck(
                f"The node {node} of the graph {self.definition.name} was reached more than {limit} times. If its "
                f"cycle is right, give it room: graph.node({node}, limit=…)."
            )

    def _begin(self) -> list[Visit]:
        most = self.definition.max_concurrency
        at_work = self.allowed + sum(1 for visit in self.running.values() if not self._asks(visit))
        room = len(self.queued) if most is None else max(0, most - at_work)
        if self.definition.is_in_order:
            begun, self.queued = self.queued[:room], self.queued[room:]
        else:
            working = [visit for visit in self.queued if not self._asks(visit)]
            stay = {visit.text for visit in working[room:]}
            begun = [visit for visit in self.queued if visit.text not in stay]
            self.queued = working[room:]
        self.running |= {visit.text: visit for visit in begun}
        return begun

    def _asks(self, visit: Visit) -> bool:
        return self.definition.nodes[visit.node].asks
