"""`everstep.Graph`: nodes and edges, declared; its runs are runs of a workflow of the same name."""

import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any, Final, Generic, Literal, TypeVar, overload

from msgspec import UNSET

from everstep.codec import Signature, Types
from everstep.effects.step import Step, declared_name
from everstep.effects.surroundings import CURRENT, code_here, where_is
from everstep.engine.code.workflow import OnExisting, OnParentEnd, Workflow
from everstep.errors import Misuse
from everstep.graph import drawing
from everstep.graph.body import drive
from everstep.graph.definition import END, JOINS, START, Definition, Edge, Join, NodeRule
from everstep.graph.form import Form
from everstep.graph.nested import Nested
from everstep.graph.nodes import Approval, Node, NodeKind, arguments_taken, asks_first, step_node, widen
from everstep.graph.state import Reducer, Shape
from everstep.graph.story import Story
from everstep.model import events as ev
from everstep.model.budgets import Budget
from everstep.model.contracts import Effect
from everstep.model.durations import Duration
from everstep.model.ids import checked_name
from everstep.model.options import (
    checked_choice,
    checked_function,
    checked_seconds,
    checked_text,
    checked_whole,
    refuse_generator,
    refuse_unknown,
    refused,
)
from everstep.model.retry import Retry
from everstep.model.untrusted import attempted, is_a

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


class Graph(Workflow, Generic[S]):
    """Nodes that do work, and edges that say what follows. A run of it is as durable as a workflow's, node by node.

        graph = everstep.Graph("review", state=ReviewState)
        graph.node(draft)
        graph.node(check)
        graph.edge("draft", "check")
        graph.edge("check", "draft", when=lambda s: not s.ok)
        graph.edge("check", graph.end, when=lambda s: s.ok)

    state: what its runs begin with, hand from node to node, and return: a dataclass, a TypedDict, a msgspec or pydantic
        model, or `dict` (default).
    reduce: for fields that several nodes add to at the same time: a function of the old value and the node's.
    max_concurrency: how many nodes may be at work at the same time (default: all that can). One that waits for a
        person's approval takes no place.
    limit: how often a node may be reached, so that a cycle comes to an end (default 1000).
    The other options are those of `@everstep.workflow`.
    """

    start: str = START
    """Where the graph begins, for `graph.edge(graph.start, "node")`. By default: at the nodes that no edge leads to."""
    end: str = END
    """Where a path ends, for `graph.edge("node", graph.end, when=…)`. A node without edges is an end by itself."""

    def __init__(
        self,
        name: str,
        *,
        state: type[S] = dict,  # type: ignore[assignment]
        reduce: Mapping[str, Reducer] | None = None,
        max_concurrency: int | None = None,
        limit: int = 1000,
        version: str = "",
        queue: str = "default",
        timeout: Duration | None = None,
        budget: Budget | None = None,
        on_existing: OnExisting = "attach",
        on_parent_end: OnParentEnd = "cancel",
    ) -> None:
        if max_concurrency is not None:
            checked_whole("max_concurrency", max_concurrency, least=1)
        checked_whole("limit", limit, least=1)
        if reduce is not None:
            _check_reducers(reduce)
        self.passes_values = False
        """Whether nodes pass on what they return, instead of changing a state: in a pipeline."""
        self.shape = Shape(state, reduce or {})
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []
        self.renames: list[tuple[str, dict[str, str]]] = []
        self.limit = limit
        self.max_concurrency = max_concurrency
        self._is_sealed = False
        frame = _callers_frame()
        self.source = where_is(frame)
        super().__init__(
            _workflow_function(self, checked_name(name, "graph"), state, frame),
            name=name,
            version=version,
            queue=queue,
            timeout=timeout,
            budget=budget,
            on_existing=on_existing,
            on_parent_end=on_parent_end,
        )

    # -- declaring ----------------------------------------------------------------------------------------------------
    @overload
    def node(
        self,
        work: F,
        /,
        *,
        name: str | None = ...,
        effect: Literal["read", "repeat", "once"] | None = ...,
        join: Join = ...,
        limit: int | None = ...,
        retry: Retry | None = ...,
        timeout: Duration | None = ...,
        budget: Budget | None = ...,
    ) -> F: ...
    @overload
    def node(
        self,
        *,
        name: str | None = ...,
        effect: Literal["read", "repeat", "once"] | None = ...,
        join: Join = ...,
        limit: int | None = ...,
        retry: Retry | None = ...,
        timeout: Duration | None = ...,
        budget: Budget | None = ...,
    ) -> Callable[[F], F]: ...
    def node(self, work: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]  # it has these options by name
        """Add a node: a step, another graph, or a function. Also a decorator.

        A node takes the state and returns what it changes: a dict of fields, a whole state, or nothing. A step does its
        work under its contract. A function is workflow code: it may call steps, `everstep.sleep` and so on, and must
        not touch the outside itself. A graph is a child run that begins with the fields that both states have.

        name: of the node (default: the function's). Its steps and visits have this name in the history.
        effect: makes a function a step with this contract.
        join: when it begins, if several edges lead to it: when `all` branches that were taken have come (default), or
            with `any`, the first.
        limit: how often it may be reached (default: the graph's).
        retry, timeout: for each visit, as of a step.
        budget: what each visit may use of the graph's budget.
        """
        refuse_unknown("graph.node", options, NODE_OPTIONS)
        if work is None:
            return lambda declared: self.node(declared, **options)
        self._add_node(work, where_is(_callers_frame()), **options)
        return work

    def _add_node(
        self,
        work: Any,
        source: str,
        *,
        name: str | None = None,
        effect: Effect | None = None,
        join: Join = "all",
        limit: int | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._refuse_when_sealed()
        if not callable(work):
            raise Misuse(f"A node is a function, a step or a graph, not a {type(work).__name__}.")
        _check_node_options(work, limit=limit, retry=retry, budget=budget)
        seconds = None if timeout is None else checked_seconds("timeout", timeout, above=True)
        if name is None:
            name = name_of(work)
            if (before := declared_name(work).rpartition(".")[2]) != name and isinstance(work, Step):
                self.renames.append((f"{before} is the step {name}", {before: name}))  # its name in older releases
        name = checked_name(name, "node")
        kind: NodeKind = "graph" if isinstance(work, Workflow) else "code"
        if isinstance(work, Step) or effect is not None:
            work, kind = step_node(work, name, effect, retry, seconds), "step"
        elif retry is not None and retry.then == "hold":
            raise Misuse(f'Retry(then="hold") is for steps, and the node {name} is none.')
        if budget is not None and self.budget is None:
            self.budget = Budget()  # without limits, so that the nodes' use is counted from the start
        self._add(
            Node(
                name=name,
                kind=kind,
                work=work,
                rule=NodeRule(checked_choice("join", join, JOINS), limit or self.limit, asks_first(work)),  # type: ignore[arg-type]
                retry=retry,
                timeout=seconds,
                budget=budget,
                source=source,
            )
        )

    def _add(self, node: Node) -> None:
        if node.name in self.nodes:
            raise Misuse(f"The graph {self.name} has a node {node.name!r} already. Give this one another `name=`.")
        self.nodes[node.name] = node

    def approval(
        self,
        name: str,
        about: Callable[[S], Any],
        *,
        into: str,
        answer: Any = bool,
        what: str | None = None,
        timeout: Duration | None = None,
        expired: Any = UNSET,
        join: Join = "all",
    ) -> None:
        """Add a node that waits for a person's answer about a part of the state, and puts it into a field.

            graph.approval("approve", lambda s: {"to": s.reader, "text": s.text}, into="approved", timeout=86400)

        The person sees just what `about` returns (`everstep approvals`), and the answer is bound to it: if it has
        changed when the answer comes, because another branch changed the state, the graph fails instead.

        into: the field that takes the answer.
        answer: the type that it must have (default: `bool`).
        what: what is to be approved, in words (default: the node's name).
        timeout: seconds after which no answer is accepted. Then `expired` takes the answer's place; without it the node
            fails with `TimeoutError`.
        """
        self._refuse_when_sealed()
        checked_function("about", about, "lambda state: state.text")
        if not checked_text("into", into):
            raise refused("into", into, "it is the name of a field of the state")
        if what is not None:
            checked_text("what", what)
        if timeout is not None:
            timeout = checked_seconds("timeout", timeout)
        if self.shape.fields is not None and into not in self.shape.fields:
            raise Misuse(f"into={into!r} is no field of {self.shape.name}: {', '.join(self.shape.fields)}.")
        self._add(
            Node(
                name=checked_name(name, "node"),
                kind="approval",
                work=Approval(what=what or name, about=about, into=into, answer=answer, expired=expired),
                rule=NodeRule(checked_choice("join", join, JOINS), self.limit, asks=True),  # type: ignore[arg-type]
                timeout=timeout,
                source=where_is(_callers_frame()),
            )
        )

    def edge(self, source: str, target: str, *, when: Callable[[S], Any] | None = None) -> None:
        """Say what follows: when `source` has finished, `target` is reached. Several edges of a node are a fan-out.

        when: the edge is taken only if this is true of the state. It is asked once: the answer is recorded.
        """
        self._add_edge(Edge(source, target, when))

    def each(
        self,
        source: str,
        target: str,
        over: str | Callable[[S], Iterable[Any]],
        *,
        when: Callable[[S], Any] | None = None,
    ) -> None:
        """Say that `target` is visited once for each item of a list, at the same time, when `source` has finished.

        `target` takes the item, or the state and the item. What follows it, with `join="all"`, waits for all of them.

        over: the list: a function of the state, or the name of one of its fields. It is asked once.
        when: as of an edge.
        """
        if target in (START, END):
            raise Misuse("graph.each leads to a node, which is visited for each item.")
        if not is_a(over, str):
            checked_function("over", over, "lambda state: state.items")
        if is_a(over, str) and self.shape.fields is not None and over not in self.shape.fields:
            raise Misuse(f"over={over!r} is no field of {self.shape.name}: {', '.join(self.shape.fields)}.")
        self._add_edge(Edge(source, target, when, _over(over)))

    def _add_edge(self, edge: Edge) -> None:
        self._refuse_when_sealed()
        for name, one in (("source", edge.source), ("target", edge.target)):
            checked_text(name, one)
        if edge.when is not None:
            checked_function("when", edge.when, "lambda state: state.is_good")
        if edge.source == END or edge.target == START:
            raise Misuse("An edge leads from graph.start or a node to a node or graph.end.")
        if any((one.source, one.target) == (edge.source, edge.target) for one in self.edges):
            raise Misuse(f"The graph {self.name} has an edge from {edge.source} to {edge.target} already.")
        self.edges.append(edge)

    def migrate(self, name: str, nodes: Mapping[str, str]) -> None:
        """Say what the nodes of older runs are called now: `graph.migrate("draft is write", {"draft": "write"})`.

        Runs that began before go on, under the names that they began with. Without it they are held.
        """
        self._refuse_when_sealed()
        checked_text("name", name)
        renamed = attempted(dict, nodes) if attempted(isinstance, nodes, Mapping) else None
        if renamed is None or not all(is_a(one, str) for pair in renamed.items() for one in pair):
            wanted = 'it tells the new names of nodes by their old ones, such as nodes={"draft": "write"}'
            raise refused("nodes", nodes, wanted)
        self.renames.append((name, renamed))

    def draw(self, form: Literal["mermaid", "svg"] = "mermaid") -> str:
        """Return a picture of the graph: as Mermaid text, or as an SVG."""
        story = Story(Form(self.name, self.nodes, self._defined(), self.source, None, ()).started)
        if checked_choice("form", form, ("mermaid", "svg")) == "svg":
            return drawing.svg(f"The graph {self.name}", story.nodes(), story.edges())
        return drawing.mermaid(story.nodes(), story.edges())

    # -- being run ----------------------------------------------------------------------------------------------------
    def __call__(self, state: S, /) -> Coroutine[Any, Any, S]:
        current = CURRENT.get() or code_here()
        if current is None:
            raise Misuse(f"The graph {self.name} is run by everstep.run(graph, state) or app.run(graph, state).")
        child: Coroutine[Any, Any, S] = current.call_workflow(self, (state,), {}, sys._getframe(1))
        return child

    def __repr__(self) -> str:
        return f"<graph {self.name}>"

    @property
    def signature(self) -> Signature:
        """The arguments and result of its workflow: the state, with the classes that its nodes know."""
        if not self._is_sealed:
            self._seal()
        return self._signature

    @signature.setter
    def signature(self, signature: Signature) -> None:
        self._signature = signature

    def _seal(self) -> None:
        """Freeze the graph when its first run begins."""
        self._refuse_itself([self])
        self._is_sealed = True
        try:
            fanned = {edge.target for edge in self.edges if edge.over is not None}
            for node in self.nodes.values():
                node.has_item = node.name in fanned
                node.takes = arguments_taken(node.name, node.work, has_item=node.has_item)
            self._signature = self._signature.with_types(self.types, self.types)
            for node in self.nodes.values():
                if node.kind == "step":
                    widen(node.work, self.types)
            _ = self.definition.back_edges
        except BaseException:
            self._is_sealed = False
            self.__dict__.pop("definition", None)
            self.__dict__.pop("types", None)
            raise

    def _refuse_itself(self, path: "list[Graph[Any]]") -> None:
        """Refuse a graph that is a node of itself, or of a graph within it: its run would start others without end."""
        for inner in [node.work for node in path[-1].nodes.values() if isinstance(node.work, Graph)]:
            if any(inner is one for one in path):
                begin = next(at for at, one in enumerate(path) if one is inner)
                names = " > ".join(one.name for one in [*path[begin:], inner])
                raise Misuse(
                    f"The graph {inner.name} is nested in itself ({names}). Call it in a node's function, where the "
                    f"code decides whether to continue: `await {inner.name}(state)`."
                )
            self._refuse_itself([*path, inner])

    def _refuse_when_sealed(self) -> None:
        if self._is_sealed:
            raise Misuse(f"The graph {self.name} has been used, so it can no longer be changed.")

    @cached_property
    def types(self) -> Types:
        """The classes that its state, and its nodes' arguments and results, may hold."""
        types = self._signature.arguments | self._signature.result
        for node in self.nodes.values():
            types = types | node.types()
        return types

    @cached_property
    def definition(self) -> Definition:
        """The shape that its schedule follows."""
        return self._defined()

    def _defined(self) -> Definition:
        rules = {name: node.rule for name, node in self.nodes.items()}
        return Definition(rules, self.edges, name=self.name, max_concurrency=self.max_concurrency)

    def form_for(self, recorded: ev.GraphStarted | None) -> Form:
        """Return the graph as a run sees it, under the names that it began with."""
        return Form(self.name, self.nodes, self.definition, self.source, recorded, self.renames)

    def pass_values(self) -> None:
        """Make nodes pass on what they return, as in a pipeline: a run then begins with any value, or with none."""
        self.passes_values = True
        self.function.__defaults__ = (None,)
        self.function.__annotations__ = {"state": Any, "return": Any}
        self._signature = Signature(self.function)

    # -- states -------------------------------------------------------------------------------------------------------
    def nested(self, node: Node) -> Nested | None:
        """Return how a node that is a graph shares the state; None for other nodes, or if values are passed on."""
        inner = node.work
        if node.kind != "graph" or not isinstance(inner, Graph) or inner.passes_values or self.passes_values:
            return None
        return Nested(self, inner, node)


def _over(over: str | Callable[[Any], Iterable[Any]]) -> Callable[[Any], Iterable[Any]]:
    if not isinstance(over, str):
        return over
    field = over

    def items_of(state: Any) -> Iterable[Any]:
        found: Iterable[Any] = state[field] if isinstance(state, dict) else getattr(state, field)
        return found

    return items_of


def name_of(work: Any) -> str:
    """Return the default name of a node: that of its step, if that has a name, else of its function."""
    if isinstance(work, Step) and work.name != declared_name(work):
        return work.name
    name = work.name if isinstance(work, Workflow) else declared_name(work)
    return str(name).rpartition(".")[2]


def _callers_frame() -> FrameType:
    """Return the frame of the user's code that called this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("everstep.graph."):
        frame = frame.f_back
    return frame or sys._getframe(1)


def _workflow_function(graph: "Graph[Any]", name: str, state: Any, frame: FrameType) -> FunctionType:
    """Return the function of a graph's workflow, as if it were defined where the graph is declared.

    So two files that declare graphs of one name are detected, and reports name a line that a person can find.
    """

    async def body(state: Any) -> Any:
        return await drive(graph, state)

    code = body.__code__.replace(co_filename=frame.f_code.co_filename, co_firstlineno=max(1, frame.f_lineno - 1))
    made = FunctionType(code, body.__globals__, name, None, body.__closure__)
    made.__qualname__ = name
    made.__module__ = frame.f_globals.get("__name__", "__main__")
    made.__annotations__ = {"state": state, "return": state}
    made.__doc__ = f"The graph {name}."
    return made


NODE_OPTIONS: Final = frozenset({"name", "effect", "join", "limit", "retry", "timeout", "budget"})
"""The names of a node's options."""


def _check_node_options(work: Any, *, limit: Any, retry: Any, budget: Any) -> None:
    """Refuse invalid options of a node."""
    refuse_generator("The node", work)
    if limit is not None:
        checked_whole("limit", limit, least=1)
    if retry is not None and not isinstance(retry, Retry):
        raise refused("retry", retry, "it is an everstep.Retry, such as retry=Retry(attempts=3)")
    if budget is not None and not isinstance(budget, Budget):
        raise refused("budget", budget, "it is an everstep.Budget, such as budget=Budget(usd=1)")


def _check_reducers(reduce: Any) -> None:
    if not isinstance(reduce, Mapping):
        raise refused("reduce", reduce, 'it is a dict of functions by field, such as reduce={"notes": operator.add}')
    for one in reduce.values():
        checked_function("reduce", one, '{"notes": operator.add}')
