"""Graphs of any shape: once undisturbed, and again from every prefix of their histories, as after a crash there."""

import asyncio
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import everstep
from everstep import step
from everstep.testing.clock import FakeClock
from tests.engine.checkpoint_helpers import KeepingStore, compare_replays
from tests.engine.lives import live, prove_life

NAMES = "abcde"
KINDS = ("read", "repeat", "once", "code", "timer")


@dataclass
class Seen:
    visits: list[str] = field(default_factory=list)

    def count(self, node: str) -> int:
        return self.visits.count(node)


def put_together(before: list[str], new: list[str]) -> list[str]:
    """Branches that run at the same time come in any order."""
    return sorted([*before, *new])


def work_of(name: str, kind: str) -> Any:
    if kind in ("read", "repeat", "once"):

        @step(name=name, effect=kind, probe=(lambda key, state: everstep.NotDone()) if kind == "once" else None)
        async def do(state: Seen) -> dict[str, Any]:
            return {"visits": [name]}

        return do

    @step(name=f"inner-{name}")
    async def inner() -> str:
        return name

    async def code(state: Seen) -> dict[str, Any]:
        if kind == "timer":
            await everstep.sleep(5.0)
        return {"visits": [await inner()]}

    return code


def at_most(node: str, times: int) -> Callable[[Seen], bool]:
    return lambda state: state.count(node) < times


@st.composite
def graphs(draw: st.DrawFn) -> everstep.Graph[Seen]:
    """Return a graph with branches, joins, cycles, a fan-out and few places."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    graph = everstep.Graph(
        "any-shape", state=Seen, reduce={"visits": put_together}, max_concurrency=draw(st.sampled_from((None, 1, 2)))
    )
    for name in names:
        graph.node(work_of(name, draw(st.sampled_from(KINDS))), name=name, limit=4)
    graph.edge(graph.start, names[0])
    edges = {(draw(st.sampled_from(names[:number])), name): False for number, name in enumerate(names[1:], 1)}
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    edges |= dict.fromkeys(draw(st.lists(pairs, max_size=4)), True)
    for (source, target), is_guarded in edges.items():
        graph.edge(source, target, when=at_most(target, 2) if is_guarded else None)
    return graph


@settings(max_examples=12)
@given(graphs())
def test_a_graph_of_any_shape_is_the_same_from_every_prefix_of_its_history(graph: everstep.Graph[Seen]) -> None:
    life = prove_life(graph, Seen(), same_commands=False)
    begun = [visit for body in life.bodies("graph_moved") for visit in body.begins]
    assert len(begun) == len(set(begun))
    if life.error is None:
        assert len(begun) == len(life.value.visits)
    else:
        assert isinstance(life.error, everstep.errors.GraphStuck)


@settings(max_examples=12)
@given(graphs())
def test_from_its_checkpoints_a_graph_of_any_shape_comes_to_the_same_place_as_from_its_events(
    graph: everstep.Graph[Seen],
) -> None:
    async def main() -> int:
        store = KeepingStore()
        first = await live(store, FakeClock(), graph, (Seen(),))
        return max(compare_replays(store, count, graph) for count in range(1, len(first.events)))

    asyncio.run(main())


def test_a_race_that_was_decided_stays_decided_from_every_prefix() -> None:
    graph = everstep.Graph("decided", state=Seen, reduce={"visits": operator.add})
    for name, kind in (("a", "read"), ("l", "timer"), ("r", "repeat"), ("k", "code")):
        graph.node(work_of(name, kind), name=name)
    graph.node(work_of("j", "repeat"), name="j", join="any")
    for one, two in ("al", "ar", "lj", "rj", "jk"):
        graph.edge(one, two)
    life = prove_life(graph, Seen(), same_commands=False)  # a cut may pass over a checkpoint, which is a command
    assert life.value.visits == ["a", "r", "j", "k", "l"]


def test_items_and_failures_are_the_same_from_every_prefix() -> None:
    graph = everstep.Graph("items", state=Seen, reduce={"visits": put_together}, max_concurrency=2)
    graph.node(work_of("a", "read"), name="a")

    @graph.node(effect="repeat", retry=everstep.Retry(attempts=2, first=1.0))
    async def look(item: int) -> dict[str, Any]:
        if everstep.current().attempt < 2 and item == 1:
            raise RuntimeError("not yet")
        return {"visits": [f"item {item}"]}

    graph.node(work_of("z", "repeat"), name="z")
    graph.each("a", "look", over=lambda s: range(4))
    graph.edge("look", "z")
    life = prove_life(graph, Seen(), same_commands=False)
    assert life.value.visits == ["a", "item 0", "item 1", "item 2", "item 3", "z"]


def test_budgets_and_time_limits_of_nodes_are_the_same_from_every_prefix_and_from_every_checkpoint() -> None:
    graph = everstep.Graph("spending", state=Seen, reduce={"visits": put_together})

    @step(effect="repeat", cost={"usd": 0.4})
    async def ask(name: str) -> str:
        everstep.charge(usd=0.3)
        return name

    def spending(name: str) -> Any:
        async def spend(state: Seen) -> dict[str, Any]:
            await everstep.sleep(1.0)
            return {"visits": [await ask(name), await ask(name)]}

        return spend

    for name in ("a", "b", "c"):
        graph.node(spending(name), name=name, budget=everstep.Budget(usd=2.0, then="fail"), timeout=60)
    graph.edge("a", "b")
    graph.edge("a", "c")
    assert prove_life(graph, Seen(), same_commands=False).value.visits == ["a", "a", "b", "b", "c", "c"]

    store = KeepingStore()
    first = asyncio.run(live(store, FakeClock(), graph, (Seen(),)))
    left_out = [compare_replays(store, count, graph) for count in range(1, len(first.events))]
    assert max(left_out) > 5
