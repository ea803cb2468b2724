"""Graphs in one process: what nodes get and return, how they are joined, and what is refused."""

import asyncio
import operator
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

import everstep
from everstep import step
from everstep.engine.app.blocking import BlockingApp
from everstep.errors import GraphStuck, IdConflict, Misuse, NotEncodable
from tests.waiting import wait_until


@dataclass
class Notes:
    topic: str = "tides"
    words: list[str] = field(default_factory=list)
    count: int = 0
    skip: bool = False


class NotesDict(TypedDict, total=False):
    topic: str
    words: list[str]
    count: int


class NotesStruct(msgspec.Struct):
    topic: str = "tides"
    words: list[str] = []
    count: int = 0


class NotesModel(pydantic.BaseModel):
    topic: str = "tides"
    words: list[str] = []
    count: int = 0


def moves(app: BlockingApp, id: str) -> list[tuple[str, list[str]]]:
    """Return what began after what."""
    events = [event.body for event in app.get(id).history() if event.kind == "graph_moved"]
    return [(body.get("after", ""), body.get("begins", [])) for body in events]


def adding(word: str, **options: Any) -> Any:
    """Return a step that adds a word."""

    @step(name=word, effect="read", **options)
    async def add(state: Notes) -> dict[str, Any]:
        return {"words": [word]}

    return add


def graph_of(name: str, text: str, **options: Any) -> everstep.Graph[Notes]:
    """Return a graph of steps that add their names to the words: `a>b b>c`."""
    graph: everstep.Graph[Notes] = everstep.Graph(name, state=Notes, reduce={"words": operator.add}, **options)
    pairs = [pair.split(">") for pair in text.split()]
    for node in dict.fromkeys(one for pair in pairs for one in pair):
        graph.node(adding(node), name=node)
    for one, two in pairs:
        graph.edge(one, two)
    return graph


# -- states -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Notes, NotesStruct, NotesModel])
def test_a_state_may_be_a_dataclass_a_struct_or_a_model(app: BlockingApp, kind: Any) -> None:
    graph = everstep.Graph(f"typed-{kind.__name__}", state=kind)

    @graph.node
    async def count(state: Any) -> Any:
        assert type(state) is kind
        return {"count": state.count + 1}

    @graph.node(effect="read")
    def whole(state: Any) -> kind:
        state.words.append("whole")
        return state

    graph.edge("count", "whole")
    ended = app.run(graph, kind(topic="moon"), id="typed")
    assert type(ended) is kind
    assert (ended.topic, ended.words, ended.count) == ("moon", ["whole"], 1)


@pytest.mark.parametrize("kind", [dict, NotesDict])
def test_a_state_may_be_a_dict(app: BlockingApp, kind: Any) -> None:
    graph = everstep.Graph(f"typed-{kind.__name__}", state=kind)

    @graph.node
    async def count(state: dict[str, Any]) -> dict[str, Any]:
        return {"count": state["count"] + 1}

    assert app.run(graph, {"topic": "moon", "count": 1}, id="typed") == {"topic": "moon", "count": 2}


def test_what_workflow_code_does_to_its_copy_of_the_state_does_not_count_only_what_it_returns(app: BlockingApp) -> None:
    graph = everstep.Graph("copies", state=Notes)

    @graph.node
    async def scribble(state: Notes) -> None:
        state.words.append("lost")
        state.count = 9

    assert app.run(graph, Notes()) == Notes()


def test_a_live_object_in_the_state_is_refused_at_the_start_with_its_path(app: BlockingApp) -> None:
    graph = everstep.Graph("live")
    graph.node(adding("a"), name="a")
    with pytest.raises(NotEncodable) as refused:
        app.run(graph, {"topic": "tides", "tools": {"client": object()}}, id="live")
    assert "tools" in refused.value.path
    assert "client" in refused.value.path
    assert not app.list()


def test_a_state_of_another_class_is_refused(app: BlockingApp) -> None:
    graph = everstep.Graph("other", state=Notes)
    graph.node(adding("a"), name="a")
    with pytest.raises(Misuse, match=r"the argument state is not a Notes: .* at `\$\.topic`"):
        app.run(graph, {"topic": 3})  # type: ignore[arg-type]
    assert not app.list()


def test_plain_data_becomes_the_state(app: BlockingApp) -> None:
    graph = everstep.Graph("plain", state=Notes)
    graph.node(adding("a"), name="a")
    assert isinstance(app.run(graph, {"topic": "tides"}), Notes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "said"),
    [({"wrods": []}, "returned 'wrods', which is no field of Notes"), (7, "returned a int. A node returns what it")],
)
def test_what_a_node_must_not_return_is_said(app: BlockingApp, returned: Any, said: str) -> None:
    graph = everstep.Graph("wrong", state=Notes)

    @graph.node
    async def wrong(state: Notes) -> Any:
        return returned

    with pytest.raises(Misuse, match=said):
        app.run(graph, Notes())


def test_nodes_that_change_one_field_at_the_same_time_need_a_reducer(app: BlockingApp) -> None:
    def build(**options: Any) -> everstep.Graph[Notes]:
        graph = everstep.Graph("at-once", state=Notes, **options)
        for name in ("left", "right"):
            graph.node(adding(name), name=name)
        return graph

    with pytest.raises(GraphStuck, match="left and right ran at the same time and both changed 'words'"):
        app.run(build(), Notes(), id="one")
    assert app.run(build(reduce={"words": operator.add}), Notes(), id="two").words == ["left", "right"]


def test_a_whole_state_of_a_quick_node_does_not_undo_what_a_slow_one_changes(app: BlockingApp) -> None:
    graph = everstep.Graph("whole", state=Notes)

    @graph.node
    async def slow(state: Notes) -> Notes:
        await everstep.sleep(0.05)
        state.count = 7
        return state

    @graph.node
    async def quick(state: Notes) -> Notes:
        state.topic = "moon"
        return state

    assert app.run(graph, Notes()) == Notes(topic="moon", count=7)


# -- ways -------------------------------------------------------------------------------------------------------------
def test_branches_run_at_the_same_time_and_a_join_begins_once_with_all(app: BlockingApp) -> None:
    graph = graph_of("diamond", "a>l a>r l>j r>j")
    ended = app.run(graph, Notes(), id="d")
    assert sorted(ended.words[1:3]) == ["l", "r"]
    assert ended.words[3:] == ["j"]
    assert moves(app, "d")[:2] == [("", ["a"]), ("a", ["l", "r"])]


def test_any_goes_on_with_the_first_and_the_slow_one_still_counts(app: BlockingApp) -> None:
    graph = everstep.Graph("race", state=Notes, reduce={"words": operator.add})
    graph.node(adding("quick"), name="quick")

    @graph.node
    async def slow(state: Notes) -> dict[str, Any]:
        await everstep.sleep(0.1)
        return {"words": ["slow"]}

    graph.node(adding("won"), name="won", join="any")
    graph.node(adding("after"), name="after")
    for one in ("quick", "slow"):
        graph.edge(one, "won")
    graph.edge("won", "after")
    assert app.run(graph, Notes(), id="r").words == ["quick", "won", "after", "slow"]


def test_each_item_of_a_list_is_a_visit_and_an_empty_list_is_passed_over(app: BlockingApp) -> None:
    graph = everstep.Graph("each", state=Notes, reduce={"words": operator.add}, max_concurrency=2)

    @graph.node
    async def plan(state: Notes) -> None: ...

    @graph.node(effect="read")
    async def look(item: int) -> dict[str, Any]:
        return {"words": [f"item {item}"]}

    @graph.node(effect="read")
    async def weigh(state: Notes, item: int) -> dict[str, Any]:
        return {"words": [f"{state.topic} {item}"]}

    @graph.node
    async def sum_up(state: Notes) -> dict[str, Any]:
        return {"count": len(state.words)}

    graph.each("plan", "look", over=lambda s: range(s.count))
    graph.each("plan", "weigh", over="words", when=lambda s: s.skip)
    graph.edge("look", "sum_up")
    graph.edge("weigh", "sum_up")
    ended = app.run(graph, Notes(count=3), id="three")
    assert sorted(ended.words) == ["item 0", "item 1", "item 2"]
    assert ended.count == 3
    assert moves(app, "three")[1] == ("plan", ["look", "look#2"])
    assert app.run(graph, Notes(count=0), id="none") == Notes(count=0)
    assert moves(app, "none") == [("", ["plan"]), ("plan", ["sum_up"]), ("sum_up", [])]
    assert app.run(graph, Notes(count=1, words=["x"], skip=True), id="both").words[1:] == ["item 0", "tides x"]


def test_a_dead_end_is_a_failure_and_not_a_success_with_nothing_done(app: BlockingApp) -> None:
    graph = everstep.Graph("dead", state=Notes)
    graph.node(adding("a"), name="a")
    graph.node(adding("b"), name="b")
    graph.edge("a", "b", when=lambda s: s.skip)
    with pytest.raises(GraphStuck, match=r"None of the edges of a holds .*graph.end"):
        app.run(graph, Notes())


def test_what_each_is_over_and_is_no_list_is_named_with_its_edge(app: BlockingApp) -> None:
    graph = everstep.Graph("each-of-what", state=Notes)
    graph.node(adding("a"), name="a")
    graph.node(adding("b"), name="b")
    graph.each("a", "b", over="count")
    with pytest.raises(GraphStuck, match=r"graph.each\('a', 'b', over=…\) .* after a it is of type int"):
        app.run(graph, Notes(count=3))


def test_a_graph_that_is_nested_in_itself_is_refused(app: BlockingApp) -> None:
    own = everstep.Graph("own", state=Notes)
    own.node(adding("a"), name="a")
    own.node(own, name="again")
    own.edge("a", "again")
    with pytest.raises(Misuse, match=r"The graph own is nested in itself \(own > own\)"):
        app.run(own, Notes())
    first, second = everstep.Graph("first", state=Notes), everstep.Graph("second", state=Notes)
    for graph, other in ((first, second), (second, first)):
        graph.node(adding("a"), name="a")
        graph.node(other, name="other")
        graph.edge("a", "other")
    outer = everstep.Graph("outer", state=Notes)
    outer.node(first)
    for graph in (outer, first):
        with pytest.raises(Misuse, match=r"is nested in itself \(first > second > first\)"):
            app.run(graph, Notes())
    twice = everstep.Graph("twice", state=Notes, reduce={"words": operator.add})
    inner = everstep.Graph("inner", state=Notes)
    inner.node(adding("a"), name="a")
    for name in ("one", "two"):
        twice.node(inner, name=name)
    twice.edge("one", "two")
    app.run(twice, Notes())


def test_a_cycle_ends_at_its_limit(app: BlockingApp) -> None:
    graph = everstep.Graph("round", state=Notes, limit=4)

    @graph.node
    async def turn(state: Notes) -> dict[str, Any]:
        return {"count": state.count + 1}

    graph.edge(graph.start, "turn")
    graph.edge("turn", "turn")
    with pytest.raises(GraphStuck, match="reached more than 4 times"):
        app.run(graph, Notes())


# -- nodes ------------------------------------------------------------------------------------------------------------
def test_a_function_is_workflow_code_that_may_call_steps_sleep_and_receive(app: BlockingApp) -> None:
    graph = everstep.Graph("code", state=Notes)

    @step
    def shout(word: str) -> str:
        return word.upper()

    @graph.node
    def plain(state: Notes) -> dict[str, Any]:
        return {"topic": shout(state.topic)}

    @graph.node
    async def ask(state: Notes) -> dict[str, Any]:
        return {"count": await everstep.receive("count", int)}

    graph.edge("plain", "ask")
    run = app.start(graph, Notes(), id="code")
    run.signal("count", 5)
    assert run.result(timeout=60) == Notes(topic="TIDES", count=5)


def test_a_node_is_tried_again_and_its_failure_stays_in_the_history(app: BlockingApp) -> None:
    graph = everstep.Graph("again", state=Notes)
    tries: list[str] = []

    @graph.node(effect="read", retry=everstep.Retry(attempts=2, first=0.01))
    async def shaky(state: Notes) -> dict[str, Any]:
        tries.append("step")
        if len(tries) < 2:
            raise RuntimeError("not yet")
        return {"count": 1}

    @step(effect="read", raises=(RuntimeError,))
    async def inner() -> int:
        tries.append("inner")
        if tries.count("inner") < 2:
            raise RuntimeError("not yet either")
        return 2

    @graph.node(retry=everstep.Retry(attempts=2, first=0.01))
    async def shaky_code(state: Notes) -> dict[str, Any]:
        return {"count": state.count + await inner()}

    graph.edge("shaky", "shaky_code")
    assert app.run(graph, Notes(), id="again").count == 3
    kinds = [event.kind for event in app.get("again").history()]
    assert kinds.count("attempt_failed") == 1
    assert kinds.count("step_failed") == 1
    assert app.get("again").status() == "completed"


def test_a_node_that_takes_too_long_fails(app: BlockingApp) -> None:
    graph = everstep.Graph("late", state=Notes)

    @graph.node(timeout=0.05)
    async def forever(state: Notes) -> None:
        await everstep.receive("never")

    with pytest.raises(TimeoutError):
        app.run(graph, Notes())


def test_a_node_may_have_a_budget_of_its_own(app: BlockingApp) -> None:
    graph = everstep.Graph("money", state=Notes)

    @step(effect="read", cost={"usd": 0.6})
    async def ask_model() -> int:
        everstep.charge(usd=0.6)
        return 1

    @graph.node(budget=everstep.Budget(usd=1.0, then="fail"))
    async def spend(state: Notes) -> dict[str, Any]:
        return {"count": await ask_model() + await ask_model()}

    with pytest.raises(everstep.BudgetExceeded):
        app.run(graph, Notes())


def test_a_graph_in_a_graph_is_a_child_run_that_shares_fields_by_name(app: BlockingApp) -> None:
    @dataclass
    class Inner:
        topic: str
        depth: int = 0

    inner = everstep.Graph("inner", state=Inner)

    @inner.node
    async def deepen(state: Inner) -> dict[str, Any]:
        return {"topic": state.topic + "!", "depth": 1}

    outer = everstep.Graph("outer", state=Notes)
    outer.node(inner)
    outer.node(adding("done"), name="done")
    outer.edge("inner", "done")
    assert app.run(outer, Notes(), id="o") == Notes(topic="tides!", words=["done"])
    assert [row.workflow for row in app.list(parent="o")] == ["inner"]


def test_a_graph_called_by_a_node_is_a_child_run_too(app: BlockingApp) -> None:
    inner = graph_of("inner-called", "a>b")
    outer = everstep.Graph("outer-calling", state=Notes)

    @outer.node
    async def call(state: Notes) -> dict[str, Any]:
        return {"words": (await inner(Notes())).words}

    assert app.run(outer, Notes()).words == ["a", "b"]


def test_a_failed_node_ends_the_run_when_what_is_under_way_has_finished_and_a_retry_does_only_the_failed_one(
    app: BlockingApp,
) -> None:
    graph = everstep.Graph("failing", state=Notes, reduce={"words": operator.add})
    done: list[str] = []
    broken = [True]

    @graph.node(effect="read")
    async def fails(state: Notes) -> dict[str, Any]:
        done.append("fails")
        if broken:
            raise ValueError("broken")
        return {"words": ["mended"]}

    @graph.node(effect="read")
    async def slow(state: Notes) -> dict[str, Any]:
        await asyncio.sleep(0.1)
        done.append("slow")
        return {"words": ["slow"]}

    @graph.node
    async def asks(state: Notes) -> dict[str, Any]:
        return {"words": [await everstep.receive("word", str)]}

    graph.node(adding("end"), name="end")
    for one in ("fails", "slow", "asks"):
        graph.edge(one, "end")
    with pytest.raises(ValueError, match="broken"):
        app.run(graph, Notes(), id="f")
    assert app.get("f").status() == "failed"
    assert done == ["fails", "slow"]
    with pytest.raises(ValueError, match="broken"):
        app.run(graph, Notes(), id="f")
    assert done == ["fails", "slow"]
    broken.clear()
    app.retry("f")
    app.get("f").signal("word", "asked")
    ended = app.get("f").result(timeout=60)
    assert sorted(ended["words"] if isinstance(ended, dict) else ended.words) == ["asked", "end", "mended", "slow"]
    assert done == ["fails", "slow", "fails"]
    assert app.get("f").verify().sound


def test_a_failure_of_workflow_code_ends_the_run_and_a_retry_with_mended_code_goes_on(app: BlockingApp) -> None:
    graph = everstep.Graph("failing-code", state=Notes)
    broken = [True]

    @graph.node(effect="read")
    async def slow(state: Notes) -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"topic": "slow"}

    @graph.node
    async def code(state: Notes) -> dict[str, Any]:
        if broken:
            raise ZeroDivisionError("broken")
        return {"count": 1}

    with pytest.raises(ZeroDivisionError, match="broken"):
        app.run(graph, Notes(), id="c")
    broken.clear()
    assert app.run(graph, Notes(), id="c", on_existing="retry") == Notes(topic="slow", count=1)
    assert app.get("c").verify().sound


def test_a_cancelled_graph_cleans_up_and_is_cancelled(app: BlockingApp) -> None:
    graph = everstep.Graph("cancelled", state=Notes)
    cleaned: list[str] = []

    @step
    async def clean_up() -> None:
        cleaned.append("up")

    @graph.node
    async def waits(state: Notes) -> None:
        try:
            await everstep.receive("never")
        finally:
            await clean_up()

    run = app.start(graph, Notes(), id="c")
    run.cancel()
    with pytest.raises(everstep.errors.RunCancelled):
        run.result(timeout=60)
    assert cleaned == ["up"]


# -- approvals --------------------------------------------------------------------------------------------------------
def asking(name: str, **options: Any) -> everstep.Graph[Notes]:
    graph = everstep.Graph(name, state=Notes, reduce={"words": operator.add})
    graph.approval("approve", lambda s: {"topic": s.topic}, into="count", answer=int, **options)
    graph.node(adding("act"), name="act")
    graph.edge("approve", "act", when=lambda s: s.count > 0)
    graph.edge("approve", graph.end, when=lambda s: s.count <= 0)
    return graph


def test_a_person_approves_a_part_of_the_state_and_the_answer_is_put_into_a_field(app: BlockingApp) -> None:
    graph = asking("asking")
    for id, answer, words in (("yes", 3, ["act"]), ("no", 0, [])):
        run = app.start(graph, Notes(), id=id)
        (asked,) = wait_until(lambda run=id: app.approvals(run))
        assert asked.what == "approve"
        run.approve(answer, id=asked.id)
        assert run.result(timeout=60) == Notes(count=answer, words=words)


def test_an_approval_that_expires_fails_its_node_or_gives_what_was_said(app: BlockingApp) -> None:
    with pytest.raises(TimeoutError):
        app.run(asking("expiring", timeout=0.05), Notes())
    assert app.run(asking("expiring-2", timeout=0.05, expired=-1), Notes()) == Notes(count=-1)


def test_an_answer_about_what_has_changed_since_does_not_count(app: BlockingApp) -> None:
    graph = asking("changing")

    @graph.node
    async def change(state: Notes) -> dict[str, Any]:
        return {"topic": await everstep.receive("topic", str)}

    graph.edge(graph.start, "approve")
    graph.edge(graph.start, "change")
    run = app.start(graph, Notes(), id="c")
    (asked,) = wait_until(lambda: app.approvals("c"))
    run.signal("topic", "moon")
    wait_until(lambda: [event for event in run.history() if event.kind == "graph_moved" and event.body.get("after")])
    run.approve(1, id=asked.id)
    with pytest.raises(GraphStuck, match="has changed since"):
        run.result(timeout=60)


# -- ended runs -------------------------------------------------------------------------------------------------------
def test_a_completed_run_gives_its_result_without_work_and_another_input_is_a_conflict(app: BlockingApp) -> None:
    graph = everstep.Graph("ended", state=Notes)
    done: list[str] = []

    @graph.node(effect="read")
    async def work(state: Notes) -> dict[str, Any]:
        done.append(state.topic)
        return {"count": state.count + 1}

    assert app.run(graph, Notes(), id="e").count == 1
    assert app.run(graph, Notes(), id="e").count == 1
    assert done == ["tides"]
    with pytest.raises(IdConflict):
        app.run(graph, Notes(topic="moon"), id="e")
    app.run(graph, Notes(topic="moon"))
    assert done == ["tides", "moon"]
    assert len(app.list(workflow="ended")) == 2


# -- pipelines --------------------------------------------------------------------------------------------------------
def test_a_pipeline_hands_on_what_each_returns(app: BlockingApp) -> None:
    @step(effect="read")
    async def load(path: str) -> Notes:
        return Notes(topic=path)

    def longer(notes: Notes) -> Notes:
        notes.count = len(notes.topic)
        return notes

    @step
    def report(notes: Notes) -> str:
        return f"{notes.topic} has {notes.count}"

    line = everstep.pipeline([load, longer, report])
    assert line.name == "load-report"
    assert app.run(line, "moon", id="p") == "moon has 4"


def test_a_pipeline_may_begin_with_nothing(app: BlockingApp) -> None:
    @step
    def begin() -> int:
        return 20

    @step
    def double(x: int) -> int:
        return 2 * x

    assert app.run(everstep.pipeline([begin, double, double], name="doubled")) == 80


# -- declaring --------------------------------------------------------------------------------------------------------
def test_mistakes_in_a_declaration_say_what_to_do(app: BlockingApp) -> None:
    graph = everstep.Graph("mistakes", state=Notes)
    graph.node(adding("a"), name="a")
    with pytest.raises(Misuse, match="has a node 'a' already"):
        graph.node(adding("a"), name="a")
    with pytest.raises(Misuse, match="is a function, a step or a graph"):
        graph.node(7)  # type: ignore[type-var]
    with pytest.raises(Misuse, match="say its contract there"):
        graph.node(adding("b"), name="b", effect="once")
    with pytest.raises(Misuse, match="join='some' \\(str\\): it is one of all, any"):
        graph.node(adding("b"), name="b", join="some")
    graph.edge("a", graph.end)
    with pytest.raises(Misuse, match="an edge from a to <end> already"):
        graph.edge("a", graph.end)
    with pytest.raises(Misuse, match=r"is run by everstep.run\(graph, state\)"):
        graph(Notes())
    app.run(graph, Notes())
    with pytest.raises(Misuse, match="has been used"):
        graph.edge("a", "a")
    with pytest.raises(Misuse, match="'nothing', which is no field of Notes"):
        everstep.Graph("mistakes-2", state=Notes, reduce={"nothing": operator.add})
    with pytest.raises(Misuse, match="it is a dataclass, a TypedDict"):
        everstep.Graph("mistakes-3", state=int)
    three = everstep.Graph("mistakes-4", state=Notes)
    three.node(lambda a, b, c: None, name="three")
    with pytest.raises(Misuse, match="takes 3 arguments; a graph gives it the state"):
        app.run(three, Notes())


def test_the_definition_and_every_move_are_events_that_come_before_what_they_begin(app: BlockingApp) -> None:
    app.run(graph_of("logged", "a>b a>c b>d c>d"), Notes(), id="l")
    begun: set[str] = set()
    for event in app.get("l").history():
        if event.kind == "graph_moved":
            begun |= set(event.body.get("begins", []))
        elif event.kind == "step_started":
            assert event.step in begun
    kinds = [event.kind for event in app.get("l").history()]
    assert kinds[:3] == ["run_started", "graph_started", "graph_moved"]
