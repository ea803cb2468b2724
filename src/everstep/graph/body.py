"""The body of a graph's workflow: it executes the schedule, on the engine of workflows.

Each turn: begin the visits that the schedule has released; wait until one finishes; put its changes into the state;
take the edges whose conditions are true; ask the schedule what begins now; record the move. When nothing is in progress
the state and the progress are a checkpoint, so that a resumed run begins there.

A failed step becomes the run's failure when all other work in progress has finished; nothing new begins. A retry of the
run then continues from that step, and the others are not done again.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.engine.code.checkpoints import KEPT_MIN, take_checkpoint
from everstep.engine.code.execution import Execution, current_execution
from everstep.errors import GraphStuck
from everstep.graph.commands import MoveGraph, StartGraph
from everstep.graph.definition import START, Edge
from everstep.graph.nodes import Approval, Node, asks_first, start_visit
from everstep.graph.schedule import NO_FAN, Progress, Taken, Visit, advance
from everstep.graph.state import Changes
from everstep.model import events as ev
from everstep.model.untrusted import type_name

if TYPE_CHECKING:  # a real cycle: a graph is run by this, and has graphs as its nodes
    from everstep.graph.graph import Graph

ITEMS_PER_REST: Final = 20


async def drive(graph: "Graph[Any]", state: Any) -> Any:
    """Run a graph from its start to its end, and return its final state."""
    return await Drive(graph, current_execution("a graph")).go(state)


class Drive:
    """One run of a graph, in memory."""

    def __init__(self, graph: "Graph[Any]", execution: Execution) -> None:
        self.graph = graph
        self.execution = execution
        self.progress = Progress()
        self.state: Any = None
        self.items: dict[int, Any] = {}
        """The items of fan-outs whose visits have not finished."""
        self.under_way: dict[Visit, asyncio.Future[Any]] = {}
        self._given: dict[Visit, Any] = {}
        """The states with which they began."""
        self._allowed: set[Visit] = set()
        """Visits that a person has approved, and that are running."""
        self._for_a_place: deque[tuple[Visit, asyncio.Future[None]]] = deque()
        """Visits that a person has approved, and that wait for a place."""
        self._to_begin: deque[Visit] = deque()
        self._quiet = 0
        """How often nothing was in progress since the last checkpoint."""
        self._finished: deque[Visit] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._changes = Changes()
        followed = execution.followed
        self._moves = followed.moves if followed is not None else {}
        self.form = graph.form_for(followed.started if followed is not None else None)
        self.definition = self.form.definition

    async def go(self, state: Any) -> Any:
        """Continue until nothing is left to do."""
        if not self.graph.passes_values:
            self.graph.shape.check(state, self.graph.name)
        execution = self.execution
        execution.require_live()
        if not self.definition.is_in_order and not execution.patched("graph.asking-takes-no-place"):
            self.definition = self.definition.without_asking()
        execution.issue(StartGraph(execution.next_call(), self.form.started, self.form.changed))
        self.form.started.call = execution._calls
        self.state = state
        self._move(None)
        while not self.progress.is_over:
            if not self.under_way:
                self._quiet += 1
                if self._quiet > len(self.items) // ITEMS_PER_REST:
                    self._rest()
            while self._to_begin:
                self._begin(self._to_begin.popleft())
            await self._something_finished()
            while self._finished:
                await self._finish(self._finished.popleft())
        return self.state

    def _rest(self) -> None:
        """Checkpoint while nothing is in progress: then all that a resume needs is here. A resumed run starts here.

        Each checkpoint contains the items that still wait, so with many of them it is recorded only now and then.
        """
        kept = {
            "state": self.state,
            "items": [[number, item] for number, item in self.items.items()],
            "progress": msgspec.to_builtins(self.progress),
        }
        kept = take_checkpoint(self.execution, kept, None, KEPT_MIN, sys._getframe())
        self._quiet = 0
        self.state = kept["state"]
        self.items = dict(kept["items"])
        self.progress = msgspec.convert(kept["progress"], Progress)
        self._to_begin = deque(self.progress.running.values())
        self._changes = Changes()

    # -- a visit ------------------------------------------------------------------------------------------------------
    def _begin(self, visit: Visit) -> None:
        node = self.form.node(visit.node)
        arguments = self._arguments(node, visit)
        future = start_visit(self.execution, node, visit.text, arguments, lambda: self._place(visit))
        self.under_way[visit] = future
        # The approved value is compared with the later one, so no reducer may have changed it in place.
        self._given[visit] = arguments[0] if isinstance(node.work, Approval) else self.state
        self._changes.begin(visit.text)
        future.add_done_callback(lambda _: self._note_finished(visit))

    async def _place(self, visit: Visit) -> None:
        """Wait for a place for a visit that a person has approved."""
        if not self._has_place(visit):
            place = self.execution.loop.create_future()
            self._for_a_place.append((visit, place))
            await place
        self._allowed.add(visit)

    def _has_place(self, visit: Visit, finished: Visit | None = None) -> bool:
        most, nodes = self.definition.max_concurrency, self.definition.nodes
        if most is None or not nodes[visit.node].asks:
            return True
        others = [one for one in self.progress.running.values() if one != finished and not nodes[one.node].asks]
        return len(others) + len(self._allowed) < most

    def _give_places(self, finished: Visit | None) -> None:
        """Give the place of a finished visit to approved visits before visits that have not begun."""
        if finished is not None:
            self._allowed.discard(finished)
        while self._for_a_place and self._has_place(self._for_a_place[0][0], finished):
            visit, place = self._for_a_place.popleft()
            if not place.done():
                self._allowed.add(visit)
                place.set_result(None)

    def _arguments(self, node: Node, visit: Visit) -> tuple[Any, ...]:
        if node.takes == 0:
            return ()
        if visit.item and node.takes == 1:
            return (self._own_copy(node, self.items[visit.item]),)
        nested = self.graph.nested(node)
        state = self.state if nested is None else nested.state(self.state)
        given = (state,) if not visit.item else (state, self.items[visit.item])
        return tuple(self._own_copy(node, one) for one in given)

    def _own_copy(self, node: Node, value: Any) -> Any:
        """Return a copy, because what workflow code does to its arguments must not reach the state: only its result
        does.
        """
        if node.kind in ("step", "graph"):
            return value  # its step gets copies anyway
        return self._copied(value, node.name)

    def _copied(self, value: Any, whose: str) -> Any:
        codec, types = self.execution.codec, self.graph.types
        return codec.decode(codec.encode(value, types, f"the state given to {whose}"), types)

    def _note_finished(self, visit: Visit) -> None:
        self._finished.append(visit)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _something_finished(self) -> None:
        if not self._finished:
            self._wake = self.execution.loop.create_future()
            try:
                await self._wake
            except asyncio.CancelledError:
                await self._stop_all()
                raise

    async def _finish(self, visit: Visit) -> None:
        future = self.under_way.pop(visit)
        if not future.cancelled() and (error := future.exception()) is not None:
            if id(error) in self.execution.failures:  # a step's or a child's: work in progress may finish
                await self._let_others_finish()
            raise error
        self._take_changes(visit, future.result())
        self.items.pop(visit.item, None)
        self._move(visit)

    def _take_changes(self, visit: Visit, returned: Any) -> None:
        node, graph, given = self.form.node(visit.node), self.graph, self._given.pop(visit)
        if graph.passes_values:
            self.state = returned
            return
        nested, replaced = graph.nested(node), frozenset[str]()
        if nested is not None:
            began = self.items[visit.item] if visit.item else nested.state(given)
            changes, replaced = nested.changes(began, returned, self.state, is_item=visit.item > 0)
        else:
            changes = graph.shape.changes(node.name, given, returned)
        if isinstance(node.work, Approval) and not visit.item and node.work.about(given) != node.work.about(self.state):
            raise GraphStuck(
                f"What {visit.text} asked a person about has changed since, so the answer is about an old value. "
                "Put the approval where no other branch changes that."
            )
        self._changes.note(visit.text, changes, graph.shape.values(self.state), graph.shape.reduce)
        self.state = graph.shape.updated(self.state, changes, replaced)

    async def _let_others_finish(self) -> None:
        """Wait for steps and children in progress. Workflow code and nodes that ask a person are not awaited: they
        may take long.
        """
        for visit, future in self.under_way.items():
            node = self.form.node(visit.node)
            if node.kind in ("code", "approval") or (asks_first(node.work) and visit not in self._allowed):
                future.cancel()
        await self._all_done()

    async def _stop_all(self) -> None:
        """Cancel everything in progress because the run is cancelled, and wait for its clean-up."""
        for future in self.under_way.values():
            future.cancel()
        await self._all_done()

    async def _all_done(self) -> None:
        while not all(future.done() for future in self.under_way.values()):
            self._wake = self.execution.loop.create_future()
            await self._wake
        for future in self.under_way.values():
            if not future.cancelled():
                future.exception()  # retrieved: the first failure is the run's

    # -- edges --------------------------------------------------------------------------------------------------------
    def _move(self, visit: Visit | None) -> None:
        """Take the edges whose conditions are true, or those that the history has, and record what begins."""
        after = visit.text if visit is not None else ""
        if (recorded := self._moves.get(after)) is not None:
            taken, lists, payload = self._recorded(recorded)
        else:
            taken, lists, payload = self._decided(visit.node if visit is not None else START, after)
        self._give_places(visit)
        first, before = self.progress.items, self.progress.queued
        self.progress, begun = advance(self.definition, self.progress, visit, taken, self._at_work())
        for item in (item for one in lists for item in one):
            first += 1
            self.items[first] = item
        moved = ev.GraphMoved(
            self.execution.next_call(),
            after,
            [[one.source, one.target, *([str(one.items)] if one.items != NO_FAN else [])] for one in taken],
            [one.text for one in begun],
            [one.text for one in self._newly_queued(before, len(begun))],
            list(self.progress.waiting),
            msgspec.Raw(payload) if payload else ev.NO_PAYLOAD,
            source=self.form.node(visit.node).source if visit is not None else self.form.started.source,
        )
        self.execution.require_live()
        self.execution.issue(MoveGraph(moved))
        self._to_begin.extend(begun)

    def _at_work(self) -> int:
        return sum(1 for visit in self._allowed if self.definition.nodes[visit.node].asks)

    def _newly_queued(self, before: Sequence[Visit], begun: int) -> Sequence[Visit]:
        queued = self.progress.queued
        if self.definition.is_in_order:
            return queued[max(0, len(before) - begun) :]
        known = {visit.text for visit in before}
        return [visit for visit in queued if visit.text not in known]

    def _recorded(self, moved: ev.GraphMoved) -> tuple[list[Taken], list[list[Any]], bytes]:
        """Return the edges that were taken according to the history. Their conditions are not evaluated again."""
        taken = [Taken(one[0], one[1], int(one[2]) if len(one) > 2 else NO_FAN) for one in moved.took]
        payload = self.execution.payload(moved.items, moved.ref)
        return taken, self.execution.codec.decode(payload, self.graph.types) if payload else [], payload

    def _decided(self, node: str, after: str) -> tuple[list[Taken], list[list[Any]], bytes]:
        taken: list[Taken] = []
        lists: list[list[Any]] = []
        leaving = self.form.definition.leaving[node]
        is_plain = all(edge.when is None and edge.over is None for edge in leaving)
        # A resumed run takes the recorded edges and evaluates no condition, so a condition must not change the state.
        state = self.state if is_plain else self._copied(self.state, f"the edges of {node}")
        self._decide(node, state, taken, lists, set())
        if leaving and not taken:
            targets = ", ".join(edge.target for edge in leaving)
            raise GraphStuck(
                f"None of the edges of {node} holds after {after or 'the start'} (to {targets}). If the graph may end "
                f"there, say so: graph.edge({node!r}, graph.end, when=…)."
            )
        if not lists:
            return taken, [], b""
        payload = self.execution.codec.encode(lists, self.graph.types, f"the items after {after or 'the start'}")
        return taken, self.execution.codec.decode(payload, self.graph.types), payload

    def _decide(self, node: str, state: Any, taken: list[Taken], lists: list[list[Any]], passed: set[str]) -> None:
        """Find the edges of a node that are taken. A fan-out over an empty list skips its node and continues after
        it.
        """
        passed.add(node)
        for edge in self.form.definition.leaving[node]:
            if edge.when is not None and not edge.when(state):
                continue
            if edge.over is None:
                taken.append(Taken(edge.source, edge.target))
                continue
            items = self._items(edge, state)
            taken.append(Taken(edge.source, edge.target, len(items)))
            lists.append(items)
            if not items and edge.target not in passed:
                self._decide(edge.target, state, taken, lists, passed)

    def _items(self, edge: Edge, state: Any) -> list[Any]:
        assert edge.over is not None
        found = edge.over(state)
        try:
            items = iter(found)
        except TypeError as error:
            raise GraphStuck(
                f"graph.each({edge.source!r}, {edge.target!r}, over=…) visits {edge.target} once for each item of a "
                f"list, and after {edge.source} it is of type {type_name(found)}."
            ) from error
        return list(items)
