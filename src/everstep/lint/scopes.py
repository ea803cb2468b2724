"""Names and what they refer to: imports, functions, and variables whose class is visible.

Only what is certain counts. Any other name refers to nothing, and no rule reports it.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_PATH: Final = "pathlib.Path"
_PATH_PARTS: Final = frozenset(
    {"absolute", "cwd", "expanduser", "home", "joinpath", "parent", "resolve", "with_name", "with_stem", "with_suffix"}
)
_SAME_TYPE: Final = {"pathlib.PosixPath": _PATH, "pathlib.WindowsPath": _PATH}


@dataclass
class Binding:
    """One way in which a name gets its value: an import, a value, an annotation, a function, a class, or another."""

    kind: str
    target: str = ""
    value: ast.expr | None = None
    node: ast.AST | None = None


@dataclass
class Scope:
    """The names of a module or a function."""

    parent: "Scope | None" = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)

    def bind(self, name: str, binding: Binding) -> None:
        """Record one more way in which a name gets its value."""
        self.names.setdefault(name, []).append(binding)

    def find(self, name: str) -> tuple["Scope | None", list[Binding]]:
        """Return where a name is bound, and how."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and name not in scope.globals:
                return scope, scope.names[name]
            scope = scope.parent
        return None, []

    @property
    def module(self) -> "Scope":
        """The outermost scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Give the nodes below one, without the inside of functions and classes that are defined there.

    Their decorators and defaults belong to the outer scope.
    """
    todo = _inside(node)[::-1]
    while todo:
        one = todo.pop()
        yield one
        inner = _outside_of(one) if isinstance(one, Nested) else list(ast.iter_child_nodes(one))
        todo += inner[::-1]


def _inside(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, Nested):
        return list(node.body)
    return list(ast.iter_child_nodes(node))


def _outside_of(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = list(getattr(node, "decorator_list", []))
    if isinstance(node, FunctionNode):
        found += [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
    return found


def scope_of(node: ast.AST, parent: Scope | None) -> Scope:
    """Return the names that a module or a function binds itself."""
    scope = Scope(parent)
    if isinstance(node, FunctionNode):
        arguments = node.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope.bind(one.arg, Binding("annotation", value=one.annotation))
        for spread in (arguments.vararg, arguments.kwarg):
            if spread is not None:
                scope.bind(spread.arg, Binding("other"))
    for one_node in own_nodes(node):
        _bind(scope, one_node)
    return scope


def _bind(scope: Scope, node: ast.AST) -> None:
    match node:
        case ast.Import(names=names):
            for alias in names:
                first = alias.name.split(".")[0]
                scope.bind(alias.asname or first, Binding("import", alias.name if alias.asname else first))
        case ast.ImportFrom(module=module, names=names, level=level):
            base = "." * level + (module or "")
            for alias in names:
                scope.bind(alias.asname or alias.name, Binding("import", f"{base}.{alias.name}"))
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                _bind_target(scope, target, value)
        case ast.AnnAssign(target=ast.Name(id=name), value=value, annotation=annotation):
            scope.bind(name, Binding("value", value=value) if value else Binding("annotation", value=annotation))
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            scope.bind(name, Binding("value", value=value))
        case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
            scope.bind(name, Binding("value", value=value))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            scope.bind(name, Binding("function", node=node))
        case ast.ClassDef(name=name):
            scope.bind(name, Binding("class", node=node))
        case ast.ExceptHandler(name=str(name)):
            scope.bind(name, Binding("other"))
        case ast.Global(names=names):
            scope.globals.update(names)
        case ast.AugAssign(target=ast.Name()):
            pass  # it keeps its value
        case ast.For(target=target) | ast.AsyncFor(target=target) | ast.comprehension(target=target):
            _bind_target(scope, target, None)


def _bind_target(scope: Scope, target: ast.expr, value: ast.expr | None) -> None:
    if isinstance(target, ast.Name):
        scope.bind(target.id, Binding("value", value=value) if value is not None else Binding("other"))
    elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
        parts = target.elts if not isinstance(target, ast.Starred) else [target.value]
        for part in parts:
            _bind_target(scope, part, None)


def dotted(node: ast.expr | None, scope: Scope, depth: int = 12) -> str | None:
    """Return what an expression refers to, with its module: `requests.post`, `pathlib.Path.write_text`.

    An instance has the name of its class: what follows it is a method's name. The result of a call of a function ends
    with `()`, so that it matches nothing else.
    """
    if node is None or depth == 0:
        return None
    match node:
        case ast.Name(id=name):
            return _dotted_name(name, scope, depth)
        case ast.Attribute(value=value, attr=attribute):
            base = dotted(value, scope, depth - 1)
            if base == _PATH and attribute == "parent":
                return _PATH
            return f"{base}.{attribute}" if base is not None else None
        case ast.Call(func=function):
            return _result_of(dotted(function, scope, depth - 1))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            sides = (dotted(left, scope, depth - 1), dotted(right, scope, depth - 1))
            return _PATH if _PATH in sides else None
        case ast.Await(value=value) | ast.BinOp(left=value, op=ast.BitOr(), right=ast.Constant(value=None)):
            return dotted(value, scope, depth - 1)
    return None


def _dotted_name(name: str, scope: Scope, depth: int) -> str | None:
    where, bindings = scope.find(name)
    if where is None:
        return name if hasattr(builtins, name) else None
    found: set[str | None] = set()
    for binding in bindings:
        if binding.kind == "import":
            found.add(binding.target)
        elif binding.kind == "value" or (binding.kind == "annotation" and binding.value is not None):
            found.add(dotted(binding.value, where, depth - 1))
        else:
            found.add(None)
    return found.pop() if len(found) == 1 else None


def _result_of(function: str | None) -> str | None:
    if function is None:
        return None
    function = _SAME_TYPE.get(function, function)
    owner, _, last = function.rpartition(".")
    if owner == _PATH and last in _PATH_PARTS:
        return _PATH
    return function if last[:1].isupper() else f"{function}()"
