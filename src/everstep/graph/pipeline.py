"""`everstep.pipeline`: the straight line. Each function is given what the one before it returned."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from everstep.errors import Misuse
from everstep.graph.graph import Graph, name_of
from everstep.model.options import refused


def pipeline(work: Sequence[Any], *, name: str | None = None, **options: Any) -> Graph[Any]:
    """Return the graph in which these follow each other: each is given what the one before it returned.

        report = everstep.pipeline([load_data, summarize, write_report], name="report")
        everstep.run(report, "tides.csv", id="report-1")

    A run begins with what the first one takes, and returns what the last one returns. Steps, graphs and functions are
    what they are as nodes of a graph. The options are those of `everstep.Graph`.

    name: of the graph (default: the names of the first and the last).
    """
    if isinstance(work, str) or not isinstance(work, Sequence):
        raise refused("work", work, "it is a list of functions, steps or graphs")
    if not work:
        raise Misuse("everstep.pipeline(work=[]) of nothing: give it the functions that follow each other.")
    names: list[str] = []
    for one in work:
        called = base = name_of(one)
        number = 1
        while called in names:
            number += 1
            called = f"{base}-{number}"
        names.append(called)
    made: Graph[Any] = Graph(name or f"{names[0]}-{names[-1]}", **options)
    made.pass_values()
    for one, called in zip(work, names, strict=True):
        made.node(one, name=called)
    for before, after in pairwise(names):
        made.edge(before, after)
    return made
