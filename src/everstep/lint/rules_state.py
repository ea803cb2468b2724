"""What workflow code must not depend on, and what it must let through: the order of sets, module variables,
cancelling.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from everstep.lint.module import Function, Module
from everstep.lint.objects import changed_root, class_of, left_by_call, reads_any
from everstep.lint.reach import Reached, reached_from, running_nodes
from everstep.lint.rules_outside import Found
from everstep.lint.scopes import Scope, dotted
from everstep.model.mistakes import changes_a_global, goes_by_a_set, swallows_cancelling

_KEEPS_ORDER: Final = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "map", "filter", "zip"})
_SET_METHODS: Final = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
_MUTABLE: Final = frozenset(
    {"list", "dict", "set", "collections.defaultdict", "collections.deque", "collections.Counter", "bytearray"}
    | {"collections.OrderedDict"}
)
_DURABLE: Final = ("everstep.", "asyncio.to_thread")


# -- sets -----------------------------------------------------------------------------------------------------------
def judge_order(module: Module, reached: Reached) -> Found:
    """Find sets whose order decides which steps are called when, or with which arguments."""
    function = reached.function
    for node in reached.nodes():
        match node:
            case ast.For(iter=iterated, body=body) | ast.AsyncFor(iter=iterated, body=body):
                if is_set(iterated, function.scope) and any(_asks(module, one, function) for one in body):
                    yield node, goes_by_a_set("in which order steps are called")
            case ast.ListComp(elt=made, generators=loops) | ast.GeneratorExp(elt=made, generators=loops):
                over = any(is_set(one.iter, function.scope) for one in loops)
                if over and _asks(module, made, function):
                    yield node, goes_by_a_set("in which order steps are called")
            case ast.Call(func=ast.Attribute(value=value, attr="pop"), args=[]) if is_set(value, function.scope):
                yield node, goes_by_a_set("what is taken from it")
            case ast.Call() if _is_durable(module, node, function):
                for argument in (*node.args, *(one.value for one in node.keywords)):
                    if _is_ordered_set(argument, function.scope) or _maps_a_step(module, argument, function):
                        yield argument, goes_by_a_set("with which arguments a step is called")


def is_set(node: ast.expr, scope: Scope, depth: int = 8) -> bool:
    """Return True if an expression is certainly a set, or iterates over one in its order."""
    if depth == 0:
        return False
    match node:
        case ast.Set(elts=parts):
            # A number's hash is itself, so these have the same order everywhere.
            return not all(isinstance(one, ast.Constant) and isinstance(one.value, int) for one in parts)
        case ast.SetComp():
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _SET_METHODS:
            return is_set(value, scope, depth - 1)
        case ast.Call(func=made, args=arguments):
            name = dotted(made, scope)
            if name in ("set", "frozenset"):
                return True
            return name in _KEEPS_ORDER and any(is_set(one, scope, depth - 1) for one in arguments)
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), right=right):
            return is_set(left, scope, depth - 1) and (
                is_set(right, scope, depth - 1) or not isinstance(node.op, ast.BitOr)
            )
        case ast.Name(id=name):
            where, bindings = scope.find(name)
            return (
                where is not None
                and bool(bindings)
                and all(
                    (one.kind == "value" and one.value is not None and is_set(one.value, where, depth - 1))
                    or (one.kind == "annotation" and _is_set_annotation(one.value))
                    for one in bindings
                )
            )
    return False


def _is_set_annotation(annotation: ast.expr | None) -> bool:
    text = ast.unparse(annotation) if annotation is not None else ""
    return text.partition("[")[0] in ("set", "frozenset", "Set", "typing.Set", "AbstractSet")


def _is_ordered_set(node: ast.expr, scope: Scope, depth: int = 8) -> bool:
    """Return True if a value depends on the order of a set. (A set itself is stored in a fixed order.)"""
    match node if depth else None:
        case ast.Name(id=name):
            where, bindings = scope.find(name)
            values = [one.value for one in bindings if one.kind == "value" and one.value is not None]
            return (
                where is not None
                and len(values) == len(bindings) > 0
                and all(_is_ordered_set(one, where, depth - 1) for one in values)
            )
        case ast.Subscript(value=inner):
            return _is_ordered_set(inner, scope, depth - 1)
        case ast.Call(func=ast.Name(id="next"), args=[inner, *_]):
            return is_set(inner, scope)
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]) | ast.List(elts=[ast.Starred(value=inner)]):
            return is_set(inner, scope)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return is_set(inner, scope)
        case ast.ListComp(generators=loops):
            return any(is_set(one.iter, scope) for one in loops)
    return False


def _maps_a_step(module: Module, node: ast.expr, function: Function) -> bool:
    match node:
        case ast.Starred(value=ast.Call(func=ast.Name(id="map"), args=[target, iterated])):
            called = module.called(target, function)
            return called is not None and bool(called.kind) and is_set(iterated, function.scope)
    return False


def _asks(module: Module, node: ast.AST, function: Function) -> bool:
    """Return True if anything durable is called here, directly or by a helper."""
    return any(_is_durable(module, one, function) for one in ast.walk(node) if isinstance(one, ast.Call))


def _is_durable(module: Module, call: ast.Call, function: Function) -> bool:
    target = module.called(call.func, function)
    if target is not None:
        return bool(target.kind) or any(_asks_directly(module, one) for one in reached_from(module, target))
    name = dotted(call.func, function.scope) or ""
    return name.startswith(_DURABLE) or name == "asyncio.gather"


def _asks_directly(module: Module, reached: Reached) -> bool:
    for call in reached.calls():
        target = module.called(call.func, reached.function)
        name = dotted(call.func, reached.function.scope) or ""
        if (target is not None and target.kind) or name.startswith(_DURABLE):
            return True
    return False


# -- variables of the module ----------------------------------------------------------------------------------------
def judge_globals(module: Module, reached: Reached) -> Found:
    """Find workflow code that changes a variable of its module."""
    for node, name in _changed_globals(module, reached.function):
        yield node, changes_a_global(name, reached.function.name, in_step=False)


def judge_globals_of_steps(module: Module, group: Sequence[Reached]) -> Found:
    """Find steps that leave data in a module variable for workflow code or other steps."""
    own = {reached.function for reached in group}
    for reached in group:
        for node, name in _changed_globals(module, reached.function):
            others = _readers(module).get(name, set()) - own
            _, attributes = left_by_call(module, node)
            if any(not attributes or reads_any(module, one, name, attributes) for one in others):
                yield node, changes_a_global(name, reached.root.name, in_step=True)


@functools.lru_cache(maxsize=1)
def _readers(module: Module) -> dict[str, set[Function]]:
    """Return the workflow code and step bodies that read each variable of a module."""
    found: dict[str, set[Function]] = defaultdict(set)
    roots = [one for one in module.functions.values() if one.kind]
    for function in {reached.function for root in roots for reached in reached_from(module, root)}:
        changed = {id(one) for node, _ in _changed_globals(module, function) for one in ast.walk(node)}
        names = [node for node in running_nodes(function) if isinstance(node, ast.Name) and id(node) not in changed]
        for node in names:
            if isinstance(node.ctx, ast.Load) and module.module_bindings(node.id, function):
                found[node.id].add(function)
    return found


def _changed_globals(module: Module, function: Function) -> Iterator[tuple[ast.AST, str]]:
    for node in running_nodes(function):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) and node.id in function.scope.globals:
                yield node, node.id
            continue
        name, attributes = left_by_call(module, node)
        if attributes and module.module_bindings(name, function):
            yield node, name
        elif (root := changed_root(node)) is not None and _keeps(module, function, *root):
            yield node, root[0]


def _keeps(module: Module, function: Function, name: str, attribute: str) -> bool:
    """Return True if a variable of the module keeps changes made inside it."""
    bindings = module.module_bindings(name, function)
    if bindings and all(one.value is not None and _is_mutable(one.value, module.scope) for one in bindings):
        return True
    return bool(bindings and attribute) and class_of(module, name) is not None


def _is_mutable(value: ast.expr, scope: Scope) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and dotted(value.func, scope) in _MUTABLE


# -- cancelling -----------------------------------------------------------------------------------------------------
def judge_handlers(module: Module, reached: Reached) -> Found:
    """Find handlers that swallow what unwinds the code."""
    for node in reached.nodes():
        if not isinstance(node, ast.Try | ast.TryStar) or not _waits(module, node.body, reached):
            continue
        for handler in node.handlers:
            caught = _catches_everything(handler, reached.function.scope)
            if caught and not any(isinstance(one, ast.Raise) for one in ast.walk(handler)):
                yield handler, swallows_cancelling(caught)


def _waits(module: Module, body: Sequence[ast.stmt], reached: Reached) -> bool:
    """Return True if the code may be unwound here: where it awaits, and in a `def` workflow where it calls a step."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
                return True
            if not reached.root.is_async and isinstance(node, ast.Call) and _is_durable(module, node, reached.function):
                return True
    return False


def _catches_everything(handler: ast.ExceptHandler, scope: Scope) -> str:
    if handler.type is None:
        return "except:"
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    if any(dotted(one, scope) in ("BaseException", "everstep.Evicted", "everstep.errors.Evicted") for one in types):
        return f"except {ast.unparse(handler.type)}"
    return ""
