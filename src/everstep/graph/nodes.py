"""The nodes of a graph: their work, their contracts, and how they are called."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from everstep.codec import Signature, Types, types_of
from everstep.effects.step import Step
from everstep.engine.code.api import random, sleep
from everstep.engine.code.approvals import ask
from everstep.engine.code.budget_block import Part
from everstep.engine.code.execution import Execution
from everstep.engine.code.greenlets import on_greenlet
from everstep.engine.code.workflow import Workflow
from everstep.errors import Misuse
from everstep.graph.definition import NodeRule
from everstep.model.budgets import Budget
from everstep.model.retry import Retry

NodeKind = Literal["step", "code", "graph", "approval"]
Place = Callable[[], Awaitable[None]]
"""Waits until one more node may run."""


class Approval(msgspec.Struct, kw_only=True):
    """The work of a node that waits for a person's answer about a part of the state."""

    what: str
    about: Callable[[Any], Any]
    into: str
    answer: Any = Any
    expired: Any = msgspec.UNSET


class Node(msgspec.Struct, kw_only=True):
    """A node: its work, and the options of each visit."""

    name: str
    kind: NodeKind
    work: Any
    rule: NodeRule
    retry: Retry | None = None
    timeout: float | None = None
    budget: "Budget | None" = None
    source: str = ""
    takes: int = 1
    """How many arguments it takes: none, one (the state; in a fan-out the item), or both."""
    has_item: bool = False
    """Whether it is visited for the items of a list."""

    def facts(self) -> dict[str, str]:
        """Return what a resumed run compares."""
        facts: dict[str, str] = {"kind": self.kind}
        if self.kind == "step":
            facts["effect"] = self.work.effect
        if self.rule.join != "all":
            facts["join"] = self.rule.join
        return facts

    def types(self) -> "Types":
        """Return the classes of its arguments and results."""
        if isinstance(self.work, Approval):
            return types_of(self.work.answer)
        signature = self.work.signature if isinstance(self.work, (Step, Workflow)) else Signature(self.work)
        return signature.arguments | signature.result


def step_node(work: Any, name: str, effect: Any, retry: Retry | None, timeout: float | None) -> Step:
    """Return the step of a node, under the node's name.

    Its start is durable before its body begins, also for a `read`: so is the move that led to it.
    """
    if isinstance(work, Step):
        if effect is not None and effect != work.effect:
            raise Misuse(f"The node {name} is a step with effect={work.effect!r}: say its contract there, not here.")
        made = object.__new__(type(work))
        made.__dict__.update(work.__dict__)
        made.name = name
        made.retry, made.timeout = retry or work.retry, timeout or work.timeout
    else:
        made = Step(work, name=name, effect=effect, retry=retry, timeout=timeout)
    made.needs_intent = True
    return made


def asks_first(work: Any) -> bool:
    """Return True if a person must approve a node's work before it is done: it is a tool with `approval=`."""
    return isinstance(work, Step) and bool(getattr(work, "approval", False))


def widen(step: Step, types: "Types") -> None:
    """Let a node's step take and return every class that the graph knows, also where its function is not annotated."""
    known = step.signature
    step.signature = known.with_types(known.arguments | types, known.result | types)


def arguments_taken(name: str, work: Any, *, has_item: bool) -> int:
    """Return how many arguments a node takes: none, one (the state; in a fan-out the item), or both."""
    if isinstance(work, Approval):
        return 1
    signature = work.signature if isinstance(work, (Step, Workflow)) else Signature(work)
    if signature.least > (2 if has_item else 1):
        wanted = "the state and an item" if has_item else "the state"
        raise Misuse(f"The node {name} takes {signature.least} arguments; a graph gives it {wanted}.")
    if has_item:
        return 2 if signature.least == 2 else 1
    return min(1, signature.most)


def start_visit(
    execution: Execution, node: Node, text: str, args: tuple[Any, ...], place: Place
) -> "asyncio.Future[Any]":
    """Begin a visit, and return the future of its result. A visit that needs approval waits for a `place` after it."""
    if asks_first(node.work) and execution.patched(f"graph.{text}-asks-first"):  # in older releases it did not ask
        return execution.loop.create_task(_guarded(execution, node, args, place), name=text)
    if node.kind == "step" and node.budget is None:
        return execution.issue_step(node.work, args, {}, node.source)
    if node.kind == "approval":
        return execution.loop.create_task(_approved(execution, node, *args), name=text)
    if node.kind == "graph" and node.budget is None and node.timeout is None and node.retry is None:
        return execution.issue_child(node.work, args, {}, None, node.source)
    return execution.loop.create_task(_guarded(execution, node, args), name=text)


async def _guarded(execution: Execution, node: Node, args: tuple[Any, ...], place: Place | None = None) -> Any:
    """Do a node's work within its budget, its timeout and its attempts, after a person has approved it if one must."""
    if place is not None:
        await node.work.ask_person(execution, args, {}, node.source)
        await place()
    if node.budget is None:
        return await _tried(execution, node, args)

    with Part(execution, node.budget, node.budget.then, node.source):
        return await _tried(execution, node, args)


async def _tried(execution: Execution, node: Node, args: tuple[Any, ...]) -> Any:
    """Retry workflow code, after durable waits; a step retries itself."""
    if node.kind == "step":
        return await execution.issue_step(node.work, args, {}, node.source)
    failures = 0
    while True:
        try:
            async with asyncio.timeout(node.timeout):
                return await work_of(execution, node, args)
        except Exception as error:
            failures += 1
            if node.retry is None or not node.retry.allows(failures, error):
                raise
            delay = node.retry.delay(failures, error, random())
        await sleep(delay)


async def _approved(execution: Execution, node: Node, state: Any) -> dict[str, Any]:
    """Wait for a person's answer about exactly this part of the state."""
    work: Approval = node.work
    try:
        about = work.about(state)
        answer = await ask(execution, work.what, about, work.answer, node.timeout, node.source, secret=False)
    except TimeoutError:
        if work.expired is msgspec.UNSET:
            raise
        answer = work.expired
    return {work.into: answer}


def work_of(execution: Execution, node: Node, args: tuple[Any, ...]) -> Awaitable[Any]:
    """Return an awaitable for the work of a node that is workflow code or a graph."""
    if node.kind == "graph":
        return execution.issue_child(node.work, args, {}, None, node.source)
    if inspect.iscoroutinefunction(node.work):
        return node.work(*args)  # type: ignore[no-any-return]

    return _unwrapped(on_greenlet(functools.partial(node.work, *args)))


async def _unwrapped(work: Awaitable[Any]) -> Any:
    """Await the result of a plain function, which may be awaitable: a partial, or an object with an `async` call."""
    value = await work
    return await value if inspect.isawaitable(value) else value
