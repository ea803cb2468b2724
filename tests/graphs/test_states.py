"""States of graphs: in graphs inside graphs, in models with aliases, and where user code changes them in place."""

import asyncio
import operator
import time
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pytest

import everstep
from everstep import step
from everstep.engine.app.blocking import BlockingApp
from everstep.errors import GraphStuck, Misuse
from everstep.model.events import decode_body
from tests.waiting import wait_until


@dataclass
class Notes:
    words: list[str] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    count: int = 0
    approved: Any = None


@dataclass
class Part:
    name: str = ""
    words: list[str] = field(default_factory=list)
    count: int = 0


REDUCE: Any = {"words": operator.add, "count": operator.add}


WAIT_SECONDS_MAX = 20.0


def has_moved(app: BlockingApp, run: str, node: str) -> bool:
    """Tell whether a graph knows that a node is done."""
    events = app.inner.store.events(run, 1)
    return any(one.kind == "graph_moved" and decode_body(one.kind, one.body).after == node for one in events)


async def until_moved(app: BlockingApp, node: str) -> None:
    """Wait until the graph `outer` knows that a node is done."""
    until = time.monotonic() + WAIT_SECONDS_MAX
    while not has_moved(app, "outer", node) and time.monotonic() < until:
        await asyncio.sleep(0.01)


def waiting_until(app: BlockingApp, node: str, returned: dict[str, Any]) -> Any:
    """Return a step that ends when the graph `outer` knows that another node is done."""

    @step(effect="read")
    async def wait(part: Part) -> dict[str, Any]:
        await until_moved(app, node)
        return returned

    return wait


def inner_graph(state: type = Part, **options: Any) -> Any:
    graph: Any = everstep.Graph("inner", state=state, **options)

    @step(effect="read")
    async def add(part: Any) -> dict[str, Any]:
        return {"words": [*([] if "reduce" in options else part.words), getattr(part, "name", "") or "inner"]}

    graph.node(add)
    return graph


# -- graphs in graphs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduce", [{}, {"reduce": REDUCE}])
@pytest.mark.parametrize("state", [Part, Notes])
def test_what_a_nested_graph_was_given_is_not_added_a_second_time(app: BlockingApp, state: type, reduce: Any) -> None:
    outer: Any = everstep.Graph("outer", state=Notes, reduce=REDUCE)
    outer.node(lambda s: {"words": ["first"]}, name="first")
    outer.node(inner_graph(state, **reduce), name="nested")
    outer.edge("first", "nested")
    assert app.run(outer, Notes(count=2)) == Notes(["first", "inner"], count=2)


def test_two_nested_graphs_at_the_same_time_lose_nothing_of_each_other(app: BlockingApp) -> None:
    outer: Any = everstep.Graph("outer", state=Notes, reduce=REDUCE)
    outer.node(lambda s: {"words": ["first"]}, name="first")
    slow: Any = everstep.Graph("slow", state=Part, reduce=REDUCE)
    slow.node(waiting_until(app, "one", {"words": ["slow"]}))
    outer.node(inner_graph(reduce=REDUCE), name="one")
    outer.node(slow, name="two")
    for name in ("one", "two"):
        outer.edge("first", name)
    assert app.run(outer, Notes(), id="outer").words == ["first", "inner", "slow"]


def test_a_nested_graph_that_rewrites_what_another_adds_to_is_refused(app: BlockingApp) -> None:
    outer: Any = everstep.Graph("outer", state=Notes, reduce=REDUCE)
    rewriting: Any = everstep.Graph("rewriting", state=Part)
    rewriting.node(waiting_until(app, "quick", {"words": ["all else is gone"]}))
    outer.node(lambda s: {"words": ["first"]}, name="first")
    outer.node(rewriting)
    outer.node(lambda s: {"words": ["quick"]}, name="quick")
    for name in ("rewriting", "quick"):
        outer.edge("first", name)
    with pytest.raises(GraphStuck, match="rewriting changed 'words'"):
        app.run(outer, Notes(), id="outer")


def test_what_nested_graphs_make_of_items_is_added_also_if_it_is_there_already(app: BlockingApp) -> None:
    outer: Any = everstep.Graph("outer", state=Notes, reduce=REDUCE)
    outer.node(lambda s: {"words": ["x"], "items": [Part("x"), Part("y"), Part("x")]}, name="plan")
    outer.node(inner_graph(), name="nested")
    outer.each("plan", "nested", over="items")
    assert sorted(app.run(outer, Notes()).words) == ["x", "x", "x", "y"]


def test_a_nested_graph_that_needs_more_than_there_is_says_so(app: BlockingApp) -> None:
    @dataclass
    class Needs:
        missing: str

    inner: Any = everstep.Graph("needs", state=Needs)
    inner.node(lambda s: {}, name="node")
    outer: Any = everstep.Graph("outer", state=Notes)
    outer.node(inner)
    with pytest.raises(Misuse, match="Give its other fields defaults"):
        app.run(outer, Notes())


def test_a_graph_in_a_pipeline_and_a_pipeline_in_a_graph_are_handed_values(app: BlockingApp) -> None:
    async def begin(count: int) -> Part:
        return Part("p", count=count)

    @step(effect="read")
    async def more(value: int) -> int:
        return value + 1

    line = everstep.pipeline([begin, inner_graph(), lambda part: [*part.words, part.count]], name="line")
    assert app.run(line, 7) == ["p", 7]
    assert app.run(everstep.pipeline([more, more, more, more], name="same"), 1) == 5

    async def counted(state: Notes) -> int:
        return state.count

    outer: Any = everstep.Graph("outer", state=Notes)
    outer.node(everstep.pipeline([counted, more, lambda n: {"count": n}], name="inside"))
    assert app.run(outer, Notes(count=3)).count == 4


# -- models -----------------------------------------------------------------------------------------------------------
class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    given: int = pydantic.Field(0, alias="Given")
    count: int = 0
    _kept: str = pydantic.PrivateAttr("")


def test_a_model_keeps_what_has_an_alias_what_is_extra_and_what_is_private(app: BlockingApp) -> None:
    graph: Any = everstep.Graph("aliased", state=Aliased)
    graph.node(lambda s: {"count": "2"}, name="node")
    begun = Aliased(Given=3, more="than that")  # type: ignore[call-arg]
    begun._kept = "yes"
    ended = app.run(graph, begun)
    assert (ended.given, ended.count, ended.model_extra, ended._kept) == (3, 2, {"more": "than that"}, "yes")


# -- code that changes what it is given -------------------------------------------------------------------------------
def test_a_condition_cannot_change_the_state(app: BlockingApp) -> None:
    graph: Any = everstep.Graph("asked", state=Notes)
    graph.node(lambda s: {"words": ["a", "b"]}, name="first")
    graph.node(lambda s: {"count": len(s.words)}, name="last")
    graph.edge("first", "last", when=lambda s: s.words.pop())
    assert app.run(graph, Notes()) == Notes(["a", "b"], count=2)


def in_place(old: list[str], new: list[str]) -> list[str]:
    old.extend(new)
    return old


def answered(
    app: BlockingApp, graph: Any, id: str, count: int, answer: Any, after: str = "", given: Notes | None = None
) -> Any:
    """Answer so many approvals, when a node is done beside them, and return the result."""
    run = app.start(graph, given or Notes(), id=id)
    wait_until(lambda: not (len(run.approvals()) < count or (after and (not has_moved(app, id, after)))))
    for asked in run.approvals():
        run.approve(answer(asked), id=asked.id)
    return run.result(timeout=60)


def test_a_node_that_returns_what_it_was_given_adds_nothing_of_what_came_in_place_meanwhile(app: BlockingApp) -> None:
    outer: Any = everstep.Graph("outer", state=Notes, reduce={"words": in_place})

    @step(effect="read")
    async def slow(state: Notes) -> Notes:
        await until_moved(app, "quick")
        return Notes(state.words, count=1)

    outer.node(lambda s: {"words": ["first"]}, name="first")
    outer.node(lambda s: {"words": ["quick"]}, name="quick")
    outer.node(slow)
    outer.edge("first", "quick")
    outer.edge("first", "slow")
    assert app.run(outer, Notes(), id="outer") == Notes(["first", "quick"], count=1)


def deep_inside(old: list[Any], new: list[Any]) -> list[Any]:
    old[0] |= new[0]
    return old


@pytest.mark.parametrize(
    ("name", "reducer", "first", "later"),
    [
        ("words", in_place, ["5 dollars"], ["and 1000 more"]),
        ("items", deep_inside, [{"dollars": 5}], [{"dollars": 1005}]),
    ],
)
def test_an_answer_does_not_count_for_what_a_reducer_has_changed_in_its_place(
    app: BlockingApp, name: str, reducer: Any, first: list[Any], later: list[Any]
) -> None:
    graph: Any = everstep.Graph("shown", state=Notes, reduce={name: reducer})

    @step(effect="read")
    async def other(state: Notes) -> dict[str, Any]:
        return {name: later}

    @step(effect="read")
    async def begin(state: Notes) -> dict[str, Any]:
        return {name: first}

    graph.node(begin)
    graph.approval("approve", lambda s: getattr(s, name), into="approved")
    graph.node(other)
    graph.edge("begin", "approve")
    graph.edge("begin", "other")
    given = Notes(items=[{}]) if name == "items" else Notes()
    with pytest.raises(GraphStuck, match="has changed since"):
        answered(app, graph, "shown", 1, lambda asked: True, after="other", given=given)


def test_a_person_is_asked_about_each_item_of_a_list(app: BlockingApp) -> None:
    graph: Any = everstep.Graph("each", state=Notes, reduce={"words": operator.add})
    graph.node(lambda s: {"items": ["ann", "bob"]}, name="plan")
    graph.approval("approve", lambda name: {"to": name}, into="words", answer=list[str])
    graph.each("plan", "approve", over="items")
    ended = answered(app, graph, "each", 2, lambda asked: [f"yes to {asked.arguments['to']}"])
    assert sorted(ended.words) == ["yes to ann", "yes to bob"]


# -- what nobody annotated --------------------------------------------------------------------------------------------
def test_a_compensation_takes_what_its_step_takes_and_returns_also_if_it_does_not_say_so(app: BlockingApp) -> None:
    undone: list[Any] = []

    def give_back(outcome, state):  # type: ignore[no-untyped-def]
        undone.append((outcome, state))

    @step(effect="once", compensate=give_back)
    async def book(state: Notes) -> Notes:
        return Notes(["booked"])

    @step(effect="read")
    async def fail(state: Notes) -> None:
        raise LookupError("there is none")

    graph: Any = everstep.Graph("trip", state=Notes)
    graph.node(book, name="room")
    graph.node(fail)
    graph.edge("room", "fail")
    with pytest.raises(LookupError):
        app.run(graph, Notes(count=1), id="trip")
    assert undone == [(Notes(["booked"]), Notes(count=1))]
    assert app.get("trip").verify().sound


def test_a_list_that_is_no_field_is_refused_when_it_is_declared() -> None:
    graph: Any = everstep.Graph("each", state=Notes)
    with pytest.raises(Misuse, match="over='itmes' is no field of Notes: words, items"):
        graph.each("plan", "work", over="itmes")
