"""How workflow code calls its steps, children and helpers."""

import ast
from collections.abc import Iterator
from typing import Final

from everstep.lint.module import Function, Module
from everstep.lint.reach import Reached
from everstep.lint.rules_outside import Found
from everstep.lint.scopes import dotted
from everstep.model.mistakes import Mistake, blocks, cannot_await, never_awaited, not_encodable

_COROUTINES: Final = frozenset(
    {f"everstep.{name}" for name in ("sleep", "receive", "expect", "start", "checkpoint")}
    | {f"everstep.files.{name}" for name in ("write", "append", "delete", "move", "copy")}
    | {f"asyncio.{name}" for name in ("sleep", "wait", "wait_for", "to_thread")}
)
_UNSTORABLE: Final = {
    **dict.fromkeys(("threading.Lock", "threading.RLock", "asyncio.Lock", "asyncio.Event", "asyncio.Queue"), "lock"),
    "object": "object",
    "open": "file",
    "sqlite3.connect": "Connection",
}


def judge_calls(module: Module, reached: Reached) -> Found:
    """Find calls of steps and workflows that cannot work here, or that are never awaited."""
    function, is_async = reached.function, reached.root.is_async
    for call in reached.calls():
        target = module.called(call.func, function)
        if target is None or not target.kind:
            continue
        kind = "workflow" if target.kind == "workflow" else "step"
        if is_async and not target.is_async:
            yield call, blocks(kind, _last(target), module.lines[call.lineno - 1].strip()[:120])
        elif not is_async and target.is_async:
            yield call, cannot_await(kind, _last(target))
    if function.is_async:
        for call, name in _dropped_coroutines(module, function):
            yield call, never_awaited(name)


def _last(function: Function) -> str:
    return function.node.name


def _dropped_coroutines(module: Module, function: Function) -> Iterator[tuple[ast.Call, str]]:
    """Give the calls of coroutine functions whose result is dropped."""
    loaded = {one.id for one in ast.walk(function.node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    for node in function.nodes:
        match node:
            case ast.Expr(value=ast.Call() as call):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if name not in loaded:
                pass
            case _:
                continue
        target = module.called(call.func, function)
        known = dotted(call.func, function.scope) in _COROUTINES if target is None else _is_coroutine_function(target)
        if known:
            yield call, ast.unparse(call.func)


def _is_coroutine_function(function: Function) -> bool:
    return function.is_async and not any(isinstance(node, ast.Yield) for node in function.nodes)


def judge_arguments(module: Module, reached: Reached) -> Found:
    """Find arguments of steps and children that cannot be stored."""
    for call in reached.calls():
        target, arguments, keywords = _durable_call(module, reached, call)
        if target is None:
            continue
        names = [one.arg for one in (*target.node.args.posonlyargs, *target.node.args.args)]
        names = names[1:] if target.owner and names[:1] in (["self"], ["cls"]) else names
        live = _live_parameters(target)
        for place, value in enumerate(arguments):
            name = names[place] if place < len(names) else ""
            if name not in live:
                yield from _judge_value(value, f"{target.node.name}[{place}]", reached.function)
        for keyword in keywords:
            if keyword.arg and keyword.arg not in live:
                yield from _judge_value(keyword.value, f"{target.node.name}.{keyword.arg}", reached.function)


def _durable_call(
    module: Module, reached: Reached, call: ast.Call
) -> tuple[Function | None, list[ast.expr], list[ast.keyword]]:
    target = module.called(call.func, reached.function)
    if target is not None and target.kind:
        first = 1 if target.kind == "transaction" else 0
        return (target, call.args, call.keywords) if not first else (None, [], [])
    name = dotted(call.func, reached.function.scope)
    if name in ("asyncio.to_thread", "everstep.start", "everstep.blocking.start") and call.args:
        target = module.called(call.args[0], reached.function)
        if target is not None and target.kind in ("step", "workflow"):
            return target, call.args[1:], [] if name != "asyncio.to_thread" else call.keywords
    return None, [], []


def _live_parameters(function: Function) -> set[str]:
    arguments = function.node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {one.arg for one in every if one.annotation is not None and "Live[" in ast.unparse(one.annotation)}


def _judge_value(value: ast.expr, where: str, function: Function) -> Iterator[tuple[ast.AST, Mistake]]:
    type_name = unstorable_type(value, function)
    if type_name:
        yield value, not_encodable(where, type_name)


def unstorable_type(value: ast.expr, function: Function) -> str:
    """Return the type of a value that certainly cannot be stored, or an empty text."""
    match value:
        case ast.Lambda():
            return "function"
        case ast.GeneratorExp():
            return "generator"
        case ast.Call(func=made):
            return _UNSTORABLE.get(dotted(made, function.scope) or "", "")
    return ""


def judge_defaults(module: Module) -> Found:
    """Find parameters of steps and workflows whose default shows that they are for something which cannot be stored."""
    for function in module.functions.values():
        if not function.kind:
            continue
        live, arguments = _live_parameters(function), function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = list(zip(reversed(positional), reversed(arguments.defaults), strict=False))
        pairs += [(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
        for parameter, default in reversed(pairs):
            type_name = unstorable_type(default, function)
            if type_name and parameter.arg not in live:
                yield default, not_encodable(f"{function.node.name}.{parameter.arg}", type_name)
