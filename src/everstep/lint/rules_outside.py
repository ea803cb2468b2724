"""Workflow code that touches the outside, asks the clock or draws by itself: it would do so again in every replay."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from everstep.lint.module import Module
from everstep.lint.reach import Reached
from everstep.lint.scopes import dotted
from everstep.lint.tables import CHANCE, CLOCKS, HANDLE_CALLS, OF_THE_PROCESS, outside_event
from everstep.model.mistakes import (
    Mistake,
    asks_the_clock,
    asks_the_process,
    draws_by_itself,
    outside,
    plain_function_on_thread,
    starts_a_loop,
)

Found = Iterator[tuple[ast.AST, Mistake]]

_LOOPS = frozenset(
    {"asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "anyio.run", "trio.run", "nest_asyncio.apply"}
)


def judge_outside(module: Module, reached: Reached) -> Found:
    """Find calls that do not belong into workflow code."""
    scope = reached.function.scope
    for node in reached.nodes():
        if isinstance(node, ast.Call):
            name = dotted(node.func, scope)
            if name is not None:
                yield from _judge_call(module, reached, node, name)
        elif _is_written(node) and dotted(node.value, scope) == "os.environ":
            yield node, outside("os.putenv")


def _is_written(node: ast.AST) -> TypeGuard[ast.Subscript]:
    return isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)


def _judge_call(module: Module, reached: Reached, call: ast.Call, name: str) -> Found:
    event = outside_event(name)
    shown = ast.unparse(call.func)
    if event is not None:
        yield call, outside(event)
    elif (used := _used_handle(module, reached, call, name)) is not None:
        yield call, outside(used)
    elif name in CLOCKS or (name == "time.strftime" and len(call.args) == 1):
        yield call, asks_the_clock(f"{shown}()")
    elif name in OF_THE_PROCESS:
        yield call, asks_the_process(f"{shown}()")
    elif name in CHANCE:
        yield call, draws_by_itself(f"{shown}()", CHANCE[name])
    elif name == "random.Random" and not call.args and not call.keywords:
        yield call, draws_by_itself(f"{shown}()", "everstep.random()")
    elif name in _LOOPS:
        yield call, starts_a_loop(f"{shown}()")
    elif name == "asyncio.to_thread" and call.args:
        yield from _judge_thread(module, reached, call, call.args[0])
    elif name.endswith("_loop().run_in_executor") and len(call.args) > 1:
        yield from _judge_thread(module, reached, call, call.args[1])


def _used_handle(module: Module, reached: Reached, call: ast.Call, name: str) -> str | None:
    """Return what a call does to something that the module has opened. If the body opens it, that is already a
    finding.
    """
    handle, does = call.func, HANDLE_CALLS.get(name)
    if name == "print":
        handle = next((one.value for one in call.keywords if one.arg == "file"), call.func)
        does = HANDLE_CALLS.get(f"{dotted(handle, reached.function.scope)}.write")
    while isinstance(handle, ast.Attribute):
        handle = handle.value
    is_shared = isinstance(handle, ast.Name) and bool(module.module_bindings(handle.id, reached.function))
    return does if is_shared else None


def _judge_thread(module: Module, reached: Reached, call: ast.Call, target: ast.expr) -> Found:
    """Report a thread that runs no step. An imported function may be a step, unless it is known what it is."""
    function = module.called(target, reached.function)
    name = dotted(target, reached.function.scope)
    is_plain = function is not None and not function.kind
    if is_plain or isinstance(target, ast.Lambda) or (name is not None and outside_event(name) is not None):
        yield (
            call,
            plain_function_on_thread(
                "<lambda>" if isinstance(target, ast.Lambda) else ast.unparse(target).rpartition(".")[2]
            ),
        )
