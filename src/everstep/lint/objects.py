"""Module-level objects: variables whose class is in the same file, and what a method changes in them."""

import ast
from typing import Final

from everstep.lint.module import Function, Module
from everstep.lint.scopes import FunctionNode, own_nodes

CHANGES: Final = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "popitem"}
    | {"remove", "discard", "clear", "sort", "reverse", "subtract"}
)
"""Methods that change what they are called on."""


def class_of(module: Module, name: str) -> ast.ClassDef | None:
    """Return the class of this file whose instance a module's variable is, or the class that it names."""
    match module.scope.names.get(name, []):
        case [one] if one.kind == "class":
            return one.node if isinstance(one.node, ast.ClassDef) else None
        case [one] if isinstance(one.value, ast.Call) and isinstance(one.value.func, ast.Name):
            made = module.scope.names.get(one.value.func.id, [])
            return made[0].node if len(made) == 1 and isinstance(made[0].node, ast.ClassDef) else None
    return None


def changed_root(node: ast.AST) -> tuple[str, str] | None:
    """Return the variable that a node changes from the inside, and the attribute by which it does, if there is one."""
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in CHANGES:
            return _root(inner)
        case ast.Subscript(value=inner, ctx=ast.Store() | ast.Del()):
            return _root(inner)
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return _root(node)
    return None


def _root(node: ast.expr) -> tuple[str, str] | None:
    attribute = ""
    while isinstance(node, ast.Attribute | ast.Subscript):
        attribute = node.attr if isinstance(node, ast.Attribute) else ""
        node = node.value
    return (node.id, attribute) if isinstance(node, ast.Name) else None


def left_by_call(module: Module, node: ast.AST) -> tuple[str, set[str]]:
    """Return the module's object that a method call changes, and the changed attributes."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)):
            method = _method(class_of(module, name), called)
            return (name, _left_behind(method)) if method is not None else ("", set())
    return "", set()


def reads_any(module: Module, function: Function, name: str, attributes: set[str]) -> bool:
    """Return True if a function reads one of the attributes of an object, directly or by a method of the object."""
    for node in function.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=root), attr=attribute) if root == name:
                method = _method(class_of(module, name), attribute)
                if attribute in attributes or (method is not None and _read(method) & attributes):
                    return True
    return False


def _method(owner: ast.ClassDef | None, name: str) -> FunctionNode | None:
    methods = owner.body if owner is not None else []
    return next((one for one in methods if isinstance(one, FunctionNode) and one.name == name), None)


def _left_behind(method: FunctionNode) -> set[str]:
    """Return the attributes that a method changes. One that it reads itself counts as its own cache."""
    changed: set[str] = set()
    for node in own_nodes(method):
        root = changed_root(node)
        if root is not None and root[0] == _self(method) and root[1]:
            changed.add(root[1])
    return changed - _read(method)


def _read(method: FunctionNode) -> set[str]:
    nodes = list(own_nodes(method))
    changing = {id(inner) for node in nodes if changed_root(node) is not None for inner in _target(node)}
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == _self(method)
        and id(node) not in changing
    }


def _target(node: ast.AST) -> list[ast.AST]:
    """Return the chain of names through which a node changes something, without keys and arguments."""
    chain = [node.func if isinstance(node, ast.Call) else node]
    while isinstance(chain[-1], ast.Attribute | ast.Subscript):
        chain.append(chain[-1].value)
    return chain


def _self(method: FunctionNode) -> str:
    arguments = [*method.args.posonlyargs, *method.args.args]
    return arguments[0].arg if arguments else ""
