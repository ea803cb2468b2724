"""Functions that are nodes of graphs: without a contract they are workflow code."""

import ast
from collections.abc import Iterable

from everstep.lint.scopes import FunctionNode, Scope, dotted

_GRAPH = "everstep.Graph"


def node_functions(nodes: Iterable[ast.AST], scope: Scope) -> list[ast.AST]:
    """Return the functions that become nodes here: by `graph.node(function)`, or by `@graph.node`."""
    found: list[ast.AST] = []
    for one in nodes:
        if isinstance(one, FunctionNode):
            found += [one] if any(_is_node(decorator, scope) for decorator in one.decorator_list) else []
        elif isinstance(one, ast.Call) and one.args and _is_node(one, scope):
            match one.args[0]:
                case ast.Name(id=name):
                    _, bindings = scope.find(name)
                    found += [binding.node for binding in bindings if binding.kind == "function" and binding.node]
    return found


def _is_node(node: ast.AST, scope: Scope) -> bool:
    """Return True if this is the `node` of a graph, or a call of it that declares no contract."""
    match node:
        case ast.Call(func=function, keywords=keywords):
            return _is_node(function, scope) and not any(one.arg == "effect" for one in keywords)
        case ast.Attribute(value=ast.Name(id=name), attr="node"):
            _, bindings = scope.find(name)
            values = [one.value for one in bindings if one.value is not None]
            return any(isinstance(one, ast.Call) and dotted(one.func, scope) == _GRAPH for one in values)
    return False
