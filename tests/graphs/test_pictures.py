"""Graphs as pictures: nothing overlaps, edges run beside nodes, and what happened can be seen."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.errors import Misuse
from everstep.graph.drawing import mermaid, svg
from everstep.graph.layout import HEIGHT, Layout, laid_out
from everstep.graph.story import EdgeStory, NodeStory, Story
from everstep.model import events as ev

NAMES = [f"node-{letter}" for letter in "abcdefgh"]


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Return the edges of a graph in which every node is reached."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    edges = [("<start>", names[0])]
    for number, name in enumerate(names[1:], 1):
        edges.append((draw(st.sampled_from(names[:number])), name))
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    return list(dict.fromkeys([*edges, *draw(st.lists(pairs, max_size=10))]))


def laid(edges: list[tuple[str, str]]) -> Layout:
    names = {name for edge in edges for name in edge}
    return laid_out({name: 90.0 + 5 * len(name) for name in sorted(names)}, edges, "<start>")


@given(shapes())
def test_boxes_do_not_overlap_and_all_is_within_the_picture(edges: list[tuple[str, str]]) -> None:
    layout = laid(edges)
    places = list(layout.places.values())
    for number, one in enumerate(places):
        assert one.x - one.width / 2 >= 0
        assert one.x + one.width / 2 <= layout.width
        assert one.y + HEIGHT / 2 <= layout.height
        for two in places[number + 1 :]:
            assert abs(one.x - two.x) >= (one.width + two.width) / 2 or abs(one.y - two.y) >= HEIGHT


@given(shapes())
def test_edges_run_beside_the_nodes_that_are_not_theirs(edges: list[tuple[str, str]]) -> None:
    layout = laid(edges)
    assert set(layout.ways) == set(edges)
    for (source, target), points in layout.ways.items():
        for x, y in points[1:-1]:
            assert x <= layout.width
            for name, place in layout.places.items():
                is_inside = abs(x - place.x) < place.width / 2 and abs(y - place.y) < HEIGHT / 2
                assert not is_inside, f"{source} → {target} runs through {name}"
        if points[0][1] < points[-1][1]:
            assert all(one[1] < two[1] for one, two in pairwise(points)), "a way down goes down"


def reviewing() -> everstep.Graph[dict[str, object]]:
    graph = everstep.Graph("reviewing")
    graph.node(lambda s: None, name="load", effect="read")
    graph.node(lambda s: None, name="check", join="any")
    graph.node(lambda s: None, name="work", effect="repeat")
    graph.approval("approve", lambda s: s, into="approved")
    inner = everstep.Graph("inner-reviewing")
    inner.node(lambda s: None, name="one")
    graph.node(inner, name="nested")
    graph.edge("load", "check")
    graph.each("check", "work", over="items")
    graph.edge("work", "check", when=lambda s: True)
    graph.edge("work", "approve", when=lambda s: False)
    graph.edge("approve", "nested")
    graph.edge("nested", graph.end)
    return graph


def test_a_graph_is_drawn_as_mermaid() -> None:
    assert reviewing().draw().splitlines() == [
        "flowchart TD",
        "    start((start))",
        '    n1["load<br/>read"]',
        '    n2(["check"])',
        '    n3["work<br/>repeat"]',
        '    n4{{"approve"}}',
        '    n5[["nested"]]',
        "    done((end))",
        "    start --> n1",
        "    n1 --> n2",
        "    n2 -. each .-> n3",
        "    n3 -. if .-> n2",
        "    n3 -. if .-> n4",
        "    n4 --> n5",
        "    n5 --> done",
    ]


def test_a_graph_is_drawn_as_an_svg_for_light_and_dark() -> None:
    graph = reviewing()
    text = graph.draw("svg")
    picture = ET.fromstring(text)
    said = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert {"load", "check", "work", "approve", "nested", "read", "repeat", "asks a person", "join any"} <= {
        word for line in said for word in (line or "").split(" · ")
    } | set(said)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r'href|url\(|<script|class="box (done|running|failed)', text)
    graph.node(lambda s: None, name="late")  # a drawing changes nothing
    graph.edge("load", "late")
    assert "late" in graph.draw("svg")
    with pytest.raises(Misuse, match=r"form='png' .*it is one of mermaid, svg"):
        graph.draw("png")  # type: ignore[arg-type]


def test_names_are_only_text_in_a_picture() -> None:
    nodes = [NodeStory('<script>"x"&', "step", "read")]
    edges = [EdgeStory("<start>", nodes[0].name)]
    assert "<script>" not in svg("<b>", nodes, edges)
    ET.fromstring(svg("<b>", nodes, edges))
    assert "<script>" not in mermaid(nodes, edges)


def test_a_story_tells_what_happened_and_forgets_what_a_retry_made_void() -> None:
    nodes = {name: {"kind": "step", "effect": "read"} for name in ("a", "b", "c")}
    story = Story(ev.GraphStarted(1, "g", nodes, [["<start>", "a"], ["a", "b"], ["b", "c"]]))
    story.take(3, "graph_moved", "", ev.GraphMoved(2, "", [["<start>", "a"]], ["a"]))
    story.take(5, "attempt_failed", "a", ev.AttemptFailed(3, 1, 0))
    story.take(7, "graph_moved", "", ev.GraphMoved(4, "a", [["a", "b"]], ["b"], queued=["c"]))
    story.take(9, "step_failed", "b", ev.StepFailed(5))
    states = {node.name: (node.state, node.visits, node.failures) for node in story.nodes()}
    assert states == {"a": ("done", 1, 1), "b": ("failed", 1, 1), "c": ("queued", 0, 0)}
    assert story.under_way == ["b"]
    story.take(12, "run_retried", "", ev.RunRetried(9, "", 5))
    assert {node.name: node.state for node in story.nodes()}["b"] == "running"
    story.take(14, "graph_moved", "", ev.GraphMoved(6, "b", [["b", "c"]], ["c"]))
    story.take(16, "graph_moved", "", ev.GraphMoved(7, "c", [["c", "<end>"]]))
    assert {node.state for node in story.nodes()} == {"done"}
    assert [edge.taken for edge in story.edges()] == [1, 1, 1]
