"""Graphs that go on: from checkpoints, after retries of nested graphs, as forks, and with another definition."""

import operator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import step
from everstep.effects.step import declared_name
from everstep.engine.code.recovery_point import load_past
from everstep.errors import RunHeld
from tests.waiting import open_sqlite, wait_until
from tests.worlds.ledger import DONE


@dataclass
class Words:
    said: list[str] = field(default_factory=list)
    laps: int = 0
    most: int = 3


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "graphs.db")


def saying(name: str) -> Any:
    @step(name=name)
    async def say(state: Words) -> dict[str, Any]:
        DONE.append(name)
        return {"said": [name]}

    return say


async def wait(state: Words) -> None:
    await everstep.receive("go")


def line(graph: str, *names: str) -> everstep.Graph[Words]:
    """Return a graph of steps one after the other; `wait` waits for a signal."""
    made: everstep.Graph[Words] = everstep.Graph(graph, state=Words, reduce={"said": operator.add})
    for name in names:
        made.node(wait if name == "wait" else saying(name), name=name)
    for before, after in pairwise(names):
        made.edge(before, after)
    return made


def left_waiting(url: str, graph: everstep.Graph[Words], state: Words, id: str = "g") -> None:
    """Start a run that comes to wait, and leave it."""
    with everstep.open(url) as app:
        run = app.start(graph, state, id=id)
        wait_until(lambda: run.status() == "waiting")


# -- checkpoints ------------------------------------------------------------------------------------------------------
def lapping() -> everstep.Graph[Words]:
    graph = everstep.Graph("lapping", state=Words)

    @graph.node(effect="repeat")
    async def lap(state: Words) -> dict[str, int]:
        return {"laps": state.laps + 1}

    graph.node(wait)
    graph.edge(graph.start, "lap")
    graph.edge("lap", "lap", when=lambda s: s.laps < s.most)
    graph.edge("lap", "wait", when=lambda s: s.laps >= s.most)
    return graph


def test_a_resume_reads_as_much_after_two_hundred_laps_as_after_three(url: str) -> None:
    graph = lapping()
    read = {}
    for laps in (3, 200):
        left_waiting(url, graph, Words(most=laps), f"g-{laps}")
        with everstep.open(url) as app:
            store = app.inner.store
            row = store.run(f"g-{laps}")
            assert row is not None
            read[laps] = len(load_past(store, row).events)
            assert row.head_seq > 3 * laps
            run = app.start(graph, Words(most=laps), id=f"g-{laps}")
            run.signal("go")
            assert run.result(timeout=60).laps == laps
    assert read[3] == read[200] < 12


def test_a_graph_whose_checkpoints_are_lost_goes_on_from_its_events(url: str) -> None:
    graph = lapping()
    left_waiting(url, graph, Words(most=5))
    with closing(open_sqlite(url)) as database, database:
        database.execute("UPDATE checkpoints SET state = CAST(state || x'00' AS BLOB)")
    with everstep.open(url) as app:
        run = app.start(graph, Words(most=5), id="g")
        run.signal("go")
        assert run.result(timeout=60).laps == 5
        assert "checkpoint_damaged" in [event.kind for event in run.history()]


def test_items_that_are_kept_beside_their_event_come_back_after_a_stop(url: str) -> None:
    graph = everstep.Graph("large", state=Words, reduce={"laps": operator.add})
    large = "x" * 2000

    @graph.node
    async def look(item: str) -> dict[str, int]:
        if item.startswith("7"):
            await everstep.receive("go")
        return {"laps": len(item)}

    graph.each(graph.start, "look", over=lambda s: [f"{number}{large}" for number in range(10)])
    left_waiting(url, graph, Words())
    with everstep.open(url) as app:
        run = app.start(graph, Words(), id="g")
        run.signal("go")
        assert run.result(timeout=60).laps == 10 * 2001
        assert run.verify().sound
        (moved,) = [event.body for event in run.history() if "ref" in event.body and event.kind == "graph_moved"]
        assert moved["took"] == [["<start>", "look", "10"]]


# -- retries and forks ------------------------------------------------------------------------------------------------
def test_a_retry_of_a_graph_goes_on_in_the_nested_graph_where_that_failed(url: str) -> None:
    broken = [True]
    inner = line("nested-inner", "i1")

    @inner.node(effect="repeat")
    async def i2(state: Words) -> dict[str, Any]:
        DONE.append("i2")
        if broken:
            raise ValueError("broken")
        return {"said": ["i2"]}

    inner.edge("i1", "i2")
    outer = everstep.Graph("nested-outer", state=Words)
    outer.node(saying("o1"), name="o1")

    @outer.node
    async def call(state: Words) -> dict[str, Any]:
        return {"said": state.said + (await inner(Words())).said}

    outer.edge("o1", "call")
    with everstep.open(url) as app:
        with pytest.raises(ValueError, match="broken"):
            app.run(outer, Words(), id="g")
        broken.clear()
        ended = app.run(outer, Words(), id="g", on_existing="retry")
        assert ended.said == ["o1", "i1", "i2"]
        assert DONE == ["o1", "i1", "i2", "i2"]
        assert app.get("g").verify().sound


def test_a_fork_goes_on_from_a_move_with_the_recorded_ways_before_it(url: str) -> None:
    graph = line("forked", "a", "b", "c")
    with everstep.open(url) as app:
        app.run(graph, Words(), id="g")
        events = app.get("g").history()
        (place,) = [event.seq for event in events if event.kind == "graph_moved" and event.body.get("after") == "a"]
        fork = app.fork("g", at=place, id="g-2", allow_effects=True)
        assert fork.result(timeout=60).said == ["a", "b", "c"]
        assert DONE == ["a", "b", "c", "b", "c"]
        assert fork.verify().sound


# -- another definition -----------------------------------------------------------------------------------------------
def test_a_run_of_a_changed_graph_is_held_and_goes_on_when_a_person_accepts_what_was_added(url: str) -> None:
    left_waiting(url, line("growing", "a", "wait", "b"), Words())
    grown = line("growing", "a", "wait", "b", "c")
    with everstep.open(url) as app:
        app.get("g").signal("go")
        with pytest.raises(RunHeld):
            app.run(grown, Words(), id="g")
        (hold,) = app.holds()
        assert "c is new; the edge b → c is new" in hold.report.decode()
        assert DONE == ["a"]
        app.resolve("g", "accept")
        ended = app.run(grown, Words(), id="g")
        assert ended.said == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (("a", "wait"), "b is gone"),
        (("wait", "a", "b"), "the edge wait → a is new"),
    ],
)
def test_what_has_changed_is_said(url: str, now: tuple[str, ...], said: str) -> None:
    left_waiting(url, line("changing", "a", "wait", "b"), Words())
    with everstep.open(url) as app:
        app.get("g").signal("go")
        with pytest.raises(RunHeld):
            app.run(line("changing", *now), Words(), id="g")
        assert said in app.holds()[0].report.decode()
        assert app.get("g").status() == "held"


def branching(how: str) -> everstep.Graph[Words]:
    """Two ways to a node, with a change of one edge or of the join."""
    graph = everstep.Graph("branching", state=Words, reduce={"said": operator.add})
    graph.node(wait)
    graph.node(saying("a"), name="a")
    graph.node(saying("b"), name="b", join="any" if how == "join" else "all")
    condition = (lambda state: True) if how in ("if", "both") else None
    if how in ("each", "both"):
        graph.each("wait", "a", lambda state: [state], when=condition)
    else:
        graph.edge("wait", "a", when=condition)
    graph.edge("wait", "b")
    if how != "gone":
        graph.edge("a", "b")
    return graph


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("if", "the edge wait → a was taken always and is taken under a condition"),
        ("each", "the edge wait → a was taken always and is taken for each item"),
        ("both", "the edge wait → a was taken always and is taken for each item under a condition"),
        ("gone", "the edge a → b is gone"),
        ("join", "b had join=all and has join=any"),
    ],
)
def test_whoever_waits_is_told_what_has_changed_about_an_edge_or_a_join(url: str, how: str, said: str) -> None:
    left_waiting(url, branching(""), Words())
    with everstep.open(url) as app:
        app.get("g").signal("go")
        with pytest.raises(RunHeld) as held:
            app.run(branching(how), Words(), id="g")
        was = "recorded graph branching of wait, a, b; "
        assert f"{was}the code now would ask for graph branching of wait, a, b ({said})" in str(held.value)


def test_a_node_is_called_as_its_step_is_and_older_runs_know_it_by_its_functions_name(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say(state: Words) -> dict[str, Any]:
        DONE.append("said")
        return {"said": [*state.said, "said"]}

    def graph(last: str) -> everstep.Graph[Words]:
        made = everstep.Graph("named", state=Words)
        made.node(wait)
        made.node(everstep.step(say, name="x"))
        made.edge("wait", last)
        return made

    with monkeypatch.context() as before:
        before.setattr("everstep.graph.graph.name_of", lambda work: declared_name(work).rpartition(".")[2])
        left_waiting(url, graph("say"), Words())
    now = graph("x")
    assert list(now.nodes) == ["wait", "x"]
    with everstep.open(url) as app:
        app.get("g").signal("go")
        assert app.run(now, Words(), id="g").said == ["said"]
        run = app.start(now, Words(), id="g-2")
        run.signal("go")
        assert run.result(timeout=60).said == ["said"]
        assert [event.step for event in run.history() if event.kind == "step_completed"] == ["x"]


def test_a_changed_contract_is_noticed(url: str) -> None:
    def graph(effect: Any) -> everstep.Graph[Words]:
        made = everstep.Graph("contract", state=Words)
        made.node(wait)

        @made.node(effect=effect)
        async def act(state: Words) -> None:
            DONE.append("act")

        made.edge("wait", "act")
        return made

    left_waiting(url, graph("once"), Words())
    with everstep.open(url) as app:
        app.get("g").signal("go")
        with pytest.raises(RunHeld):
            app.run(graph("repeat"), Words(), id="g")
        assert "act was step once and is step repeat" in app.holds()[0].report.decode()
        assert not DONE


def test_migrations_follow_each_other_and_new_runs_have_the_new_names(url: str) -> None:
    left_waiting(url, line("renamed", "a", "wait", "b"), Words())

    def renamed() -> everstep.Graph[Words]:
        graph = line("renamed", "first", "wait", "last")
        graph.migrate("a is one", {"a": "one"})
        graph.migrate("names in words", {"one": "first", "b": "last"})
        return graph

    with everstep.open(url) as app:
        app.get("g").signal("go")
        assert app.run(renamed(), Words(), id="g").said == ["a", "last"]
        assert [event.step for event in app.get("g").history() if event.kind == "step_completed"] == ["a", "b"]
        run = app.start(renamed(), Words(), id="g-2")
        run.signal("go")
        assert run.result(timeout=60).said == ["first", "last"]
        assert [event.step for event in run.history() if event.kind == "step_completed"] == ["first", "last"]
