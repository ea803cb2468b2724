"""Which functions of a file are run as workflow code, and which in the body of a step: their helpers are followed."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from everstep.lint.module import Function, Module
from everstep.lint.scopes import dotted

CALLS_ITS_ARGUMENTS: Final = frozenset(
    {"everstep.blocking.gather", "map", "filter", "sorted", "min", "max", "functools.reduce", "functools.partial"}
)
"""Functions that call a function argument at once."""
HANDS_OVER: Final = frozenset(
    {
        "everstep.step",
        "everstep.transaction",
        "everstep.expect",
        "everstep.blocking.expect",
        "everstep.witness.value",
        "asyncio.to_thread",
    }
)
"""Functions whose function argument does not run as workflow code: a lambda given to them is none either."""


@dataclass(frozen=True, eq=False)
class Reached:
    """A function that runs as part of a workflow or step, and the calls that lead to it."""

    function: Function
    root: Function
    via: tuple[str, ...] = ()

    def nodes(self) -> Iterator[ast.AST]:
        """Give the nodes that run in it."""
        return running_nodes(self.function)

    def calls(self) -> Iterator[ast.Call]:
        """Give the calls that run in it."""
        return (node for node in self.nodes() if isinstance(node, ast.Call))


def running_nodes(function: Function) -> Iterator[ast.AST]:
    """Give the nodes of a function's body, except functions that it passes on to run elsewhere."""
    away: set[int] = set()
    for node in function.nodes:
        if isinstance(node, ast.Call) and dotted(node.func, function.scope) in HANDS_OVER:
            for value in (*node.args, *(one.value for one in node.keywords)):
                if isinstance(value, ast.Lambda):
                    away.update(id(inner) for inner in ast.walk(value))
        if id(node) not in away:
            yield node


def reached_from(module: Module, root: Function) -> list[Reached]:
    """Return a workflow or step, and all helpers of the same file that it calls, directly or not."""
    found = [Reached(root, root)]
    seen = {root}
    for one in found:  # the list grows during the loop
        for helper in _helpers(module, one.function):
            if helper not in seen:
                seen.add(helper)
                found.append(Reached(helper, root, (*(one.via or (root.name,)), helper.name)))
    return found


def _helpers(module: Module, function: Function) -> Iterator[Function]:
    for node in running_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        candidates = [node.func]
        if dotted(node.func, function.scope) in CALLS_ITS_ARGUMENTS:
            candidates += [*node.args, *(one.value for one in node.keywords)]
        for candidate in candidates:
            helper = module.called(candidate, function)
            if helper is not None and not helper.kind:
                yield helper


def workflows(module: Module) -> list[list[Reached]]:
    """Return each workflow of a file with its helpers."""
    begins = [one for one in module.functions.values() if one.kind == "workflow" or one.is_node]
    return [reached_from(module, one) for one in begins]


def steps(module: Module) -> list[list[Reached]]:
    """Return each step of a file with its helpers."""
    return [reached_from(module, one) for one in module.functions.values() if one.is_step]
