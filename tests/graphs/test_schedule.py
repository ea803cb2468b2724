"""The schedule of graphs by itself: a pure function of what has happened."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import GraphStuck, Misuse
from everstep.graph.definition import END, START, Definition, Edge, Join, NodeRule
from everstep.graph.schedule import Progress, Taken, Visit, advance


def shape(text: str, *, any_of: str = "", most: int | None = None, limit: int = 1000) -> Definition:
    """Return the definition of `a>b b>c`: one letter a node."""
    pairs = [pair.split(">") for pair in text.split()]
    nodes = dict.fromkeys(name for pair in pairs for name in pair if name not in (START, END))
    joins: dict[str, Join] = {name: "any" if name in any_of else "all" for name in nodes}
    rules = {name: NodeRule(joins[name], limit) for name in nodes}
    return Definition(rules, [Edge(one, two) for one, two in pairs], max_concurrency=most)


class Play:
    """A graph that is played by hand."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.progress = Progress()
        self.begun: list[str] = []
        self._advance(None, [Taken(START, edge.target) for edge in definition.leaving[START]])

    def _advance(self, visit: Visit | None, taken: list[Taken]) -> None:
        self.progress, begun = advance(self.definition, self.progress, visit, taken)
        self.begun = [one.text for one in begun]

    def finish(self, text: str, *targets: str, items: int | None = None) -> list[str]:
        """Finish a visit; without targets all its edges are taken. Return what begins."""
        visit = next(one for one in self.progress.running.values() if one.text == text)
        wanted = targets or [edge.target for edge in self.definition.leaving[visit.node]]
        self._advance(visit, [Taken(visit.node, one, -1 if items is None else items) for one in wanted])
        return self.begun

    @property
    def running(self) -> list[str]:
        return list(self.progress.running)


def test_a_way_that_was_not_taken_is_not_waited_for() -> None:
    play = Play(shape("a>b a>c b>c"))
    assert play.begun == ["a"]
    assert play.finish("a", "c") == ["c"]  # skipped b
    assert play.finish("c") == []
    assert play.progress.is_over


def test_a_node_waits_for_all_branches_that_were_taken() -> None:
    play = Play(shape("a>l a>r l>j r>j"))
    assert play.finish("a") == ["l", "r"]
    assert play.finish("l") == []
    assert play.finish("r") == ["j"]


def test_a_branch_of_several_nodes_is_waited_for() -> None:
    play = Play(shape("a>l a>r r>s s>j l>j"))
    play.finish("a")
    assert play.finish("l") == []
    assert play.finish("r") == ["s"]
    assert play.finish("s") == ["j"]


def test_joins_that_wait_are_waited_for_by_later_joins() -> None:
    play = Play(shape("a>k a>b a>c b>j c>j j>k"))
    assert play.finish("a") == ["b", "c"]
    assert play.finish("b") == []
    assert play.finish("c") == ["j"]  # and k, which was reached first, still waits
    assert play.finish("j") == ["k"]


def test_any_begins_with_the_first_and_not_again_with_the_others_of_that_round() -> None:
    play = Play(shape("a>l a>r l>j r>j j>k", any_of="j"))
    play.finish("a")
    assert play.finish("l") == ["j"]
    assert play.finish("r") == []
    assert play.finish("j") == ["k"]
    play.finish("k")
    assert play.progress.is_over


def test_any_begins_anew_with_what_comes_round_a_cycle_also_before_the_last_of_the_round_has_come() -> None:
    play = Play(shape("a>l a>r l>j r>j j>k k>j", any_of="j"))
    play.finish("a")
    assert play.finish("l") == ["j"]
    assert play.finish("j") == ["k"]
    assert play.finish("k") == ["j#2"]
    assert play.finish("r") == []


def test_nodes_of_a_cycle_do_not_wait_for_each_other() -> None:
    play = Play(shape("a>d a>u d>c u>c c>d"))
    assert play.finish("a") == ["d", "u"]
    assert play.finish("d") == []
    assert play.finish("u") == ["c"]
    assert play.finish("c") == ["d#2"]
    assert play.finish("d#2") == ["c#2"]


def test_a_cycle_comes_to_its_limit() -> None:
    play = Play(Definition({"a": NodeRule(limit=2)}, [Edge(START, "a"), Edge("a", "a")]))
    assert play.finish("a") == ["a#2"]
    with pytest.raises(GraphStuck, match="reached more than 2 times"):
        play.finish("a#2")


def test_items_of_a_list_are_visits_of_one_round_and_what_follows_waits_for_all() -> None:
    play = Play(shape("a>w w>j", limit=1))
    assert play.finish("a", "w", items=3) == ["w", "w#2", "w#3"]
    assert [one.item for one in play.progress.running.values()] == [1, 2, 3]
    assert play.finish("w#2") == []
    assert play.finish("w") == []
    assert play.finish("w#3") == ["j"]


def test_no_more_nodes_run_at_a_time_than_are_allowed_and_the_others_are_queued() -> None:
    play = Play(shape("a>b a>c a>d b>j c>j d>j", most=2))
    assert play.finish("a") == ["b", "c"]
    assert [one.text for one in play.progress.queued] == ["d"]
    assert play.finish("c") == ["d"]
    assert play.finish("d") == []
    assert play.finish("b") == ["j"]


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([Edge("a", "b"), Edge("b", "x")], "an edge of 'x', which is none of its nodes: a, b"),
        ([Edge("b", "b")], "No way leads from the start of the graph graph to b"),
        ([Edge("a", "b"), Edge("b", "a")], "No way leads from the start of the graph graph to a, b"),
    ],
)
def test_a_definition_with_a_mistake_says_which(edges: list[Edge], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        Definition({"a": NodeRule(), "b": NodeRule()}, edges)


# -- any graph, in any order ------------------------------------------------------------------------------------------
NAMES = "abcdefg"


@st.composite
def graphs(draw: st.DrawFn) -> Definition:
    """Return a graph with cycles, joins of both kinds and a limit of places."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    edges = dict.fromkeys(draw(st.lists(pairs, max_size=14)))
    edges |= dict.fromkeys((START, name) for name in names if not any(two == name for one, two in edges if one != two))
    if not any(one == START for one, _ in edges):
        edges[START, names[0]] = None
    rules = {name: NodeRule(draw(st.sampled_from(("all", "any"))), 10_000) for name in names}
    most = draw(st.sampled_from((None, 1, 2)))
    try:
        return Definition(rules, [Edge(one, two) for one, two in edges], max_concurrency=most)
    except Misuse:
        return shape("a>b b>c c>b")


def blockers(definition: Definition, progress: Progress, node: str) -> list[str]:
    """Return what is not finished and can still lead to a node, found by following every way by hand."""
    found = []
    unfinished = [(one.node, one.passed) for one in (*progress.running.values(), *progress.queued)]
    for start, passed in [*unfinished, *((one, two) for one, two in progress.waiting.items() if one != node)]:
        ways = [start]
        seen = set()
        while ways:
            for edge in definition.leaving[here := ways.pop()]:
                is_late = edge.target != END and definition.nodes[edge.target].join == "any"
                is_late = is_late and passed.get(edge.target, 0) < progress.visits.get(edge.target, 0)
                is_late = is_late and edge.target != start
                if edge.target in seen or is_late or (here, edge.target) in definition.back_edges:
                    continue
                if edge.target == node:
                    found.append(start)
                seen.add(edge.target)
                ways.append(edge.target)
    return found


@given(graphs(), st.data())
def test_any_graph_in_any_order_is_scheduled_by_the_rules(definition: Definition, data: st.DataObject) -> None:
    """Whatever finishes in whatever order: no visit begins twice, joins wait rightly, and nothing is forgotten."""
    play = Play(definition)
    begun = Counter(play.begun)
    for _ in range(40):
        if play.progress.is_over:
            break
        assert play.progress.running, "nothing is under way, and something waits for ever"
        visit = data.draw(st.sampled_from(list(play.progress.running.values())))
        leaving = [edge.target for edge in definition.leaving[visit.node]]
        chosen = data.draw(st.lists(st.sampled_from(leaving), unique=True)) if leaving else []
        before = play.progress
        play._advance(visit, [Taken(visit.node, one) for one in chosen])
        begun.update(play.begun)
        assert max(begun.values(), default=1) == 1  # node and number are an identity
        if definition.max_concurrency is not None:
            assert len(play.progress.running) <= definition.max_concurrency
        for node in play.progress.waiting:
            assert blockers(definition, play.progress, node), f"{node} waits for nothing"
        for text in play.begun:
            node = text.partition("#")[0]
            is_join = definition.nodes[node].join == "all" and node in {*before.waiting, *chosen}
            assert not (is_join and definition.max_concurrency is None and blockers(definition, play.progress, node))
        assert before == msgspec.convert(msgspec.to_builtins(before), Progress)  # pure, and it can be kept


@given(graphs(), st.data())
def test_the_same_events_lead_to_the_same_schedule_wherever_one_begins(
    definition: Definition, data: st.DataObject
) -> None:
    """A resume from any kept progress goes the same way as the run that was not interrupted."""
    play, log, kept = Play(definition), [], []
    for _ in range(25):
        if not play.progress.running:
            break
        visit = data.draw(st.sampled_from(list(play.progress.running.values())))
        leaving = [edge.target for edge in definition.leaving[visit.node]]
        taken = [
            Taken(visit.node, one)
            for one in data.draw(st.lists(st.sampled_from(leaving), unique=True) if leaving else st.just([]))
        ]
        kept.append(msgspec.json.encode(play.progress))
        play._advance(visit, taken)
        log.append((visit, taken, play.begun))
    for place, stored in enumerate(kept):
        progress = msgspec.json.decode(stored, type=Progress)
        for visit, taken, expected in log[place:]:
            progress, begins = advance(definition, progress, visit, taken)
            assert [one.text for one in begins] == expected
        assert progress == play.progress
