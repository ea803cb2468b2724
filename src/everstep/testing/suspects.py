"""Places in a user's file that can explain why a run went another way after a crash. Read, never run.

A crash test proves that something is wrong; this says where to look first, and what to do there.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

Sort = Literal["chance", "set", "memory", "body"]

ASKED: Final[dict[str, tuple[str, ...]]] = {
    "time": ("time", "time_ns", "monotonic", "perf_counter", "localtime", "gmtime", "ctime", "strftime"),
    "datetime": ("now", "utcnow", "today"),
    "date": ("today",),
    "random": ("random", "randint", "choice", "choices", "shuffle", "sample", "uniform", "randrange", "getrandbits"),
    "uuid": ("uuid1", "uuid4"),
    "os": ("getpid", "urandom"),
    "secrets": ("token_hex", "token_bytes", "token_urlsafe", "randbelow", "choice"),
}
REMEDIES: Final[dict[str, str]] = {
    "time": "use everstep.now(), which is the same in every replay, or ask for the time in a step",
    "datetime": "use everstep.now(), which is the same in every replay, or ask for the time in a step",
    "date": "use everstep.now(), which is the same in every replay, or ask for the time in a step",
    "random": "use everstep.random(), which is the same in every replay",
    "uuid": "use everstep.uuid(), which is the same in every replay",
    "os": "ask for it in a step (@everstep.step)",
    "secrets": "ask for it in a step (@everstep.step)",
}
CHANGES: Final = frozenset(
    {"append", "add", "update", "extend", "insert", "pop", "popitem", "remove", "discard", "clear", "setdefault"}
)
OUTSIDE: Final = frozenset(
    {"write", "writelines", "write_text", "write_bytes", "send", "sendall", "post", "put", "flush"}
)


class Suspect(msgspec.Struct):
    """A line, what it does, and what to do instead."""

    sort: Sort
    line: int
    what: str
    remedy: str


def suspects_in(path: str) -> list[Suspect]:
    """Return the suspects of a file, in the order of its lines."""
    try:
        tree = ast.parse(Path(path).read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    found = [*_memory(tree)]
    for function in _functions(tree):
        if _is_declared(function, "workflow"):
            found += [*_chance(function), *_sets(function), *_effects(function, _steps(tree))]
    return sorted(found, key=lambda one: one.line)


def line_of_function(path: str, name: str) -> int:
    """Return the line on which a function is defined, by the last part of its name; 0 if there is none."""
    try:
        tree = ast.parse(Path(path).read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return 0
    last = name.partition("#")[0].rpartition(".")[2]
    return next((function.lineno for function in _functions(tree) if function.name == last), 0)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _is_declared(function: Function, *names: str) -> bool:
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in names:
            return True
    return False


def _steps(tree: ast.AST) -> set[str]:
    declared = {one.name for one in _functions(tree) if _is_declared(one, "step", "transaction", "workflow")}
    return declared | {"publish", "charge", "release", "expect"}


def _chance(function: Function) -> Iterator[Suspect]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if node.func.attr in ASKED.get(name, ()):
                what = f"{name}.{node.func.attr}() in the workflow gives another value in every process"
                yield Suspect("chance", node.lineno, what, REMEDIES[name])


def _sets(function: Function) -> Iterator[Suspect]:
    names = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_set(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    sorted_away = {
        id(inner)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("sorted", "len", "sum", "min", "max", "any")
        for inner in ast.walk(node)
    }
    for node in ast.walk(function):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Starred):
            iterated = [node.value]
        elif isinstance(node, ast.Call) and (
            getattr(node.func, "id", "") in ("list", "tuple", "enumerate", "map", "zip", "iter", "next")
            or getattr(node.func, "attr", "") == "join"
        ):
            iterated = list(node.args)
        for one in iterated:
            if _is_set(one, names) and id(one) not in sorted_away:
                what = "goes through a set, whose order differs from process to process"
                yield Suspect("set", one.lineno, what, "go through sorted(…) of it, or keep a list or a dict")


def _is_set(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Name(id=name):
            return name in names
        case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), left=left):
            return _is_set(left, names)
    return False


def _memory(tree: ast.Module) -> Iterator[Suspect]:
    """Find the variables of the module, and of its objects, that functions change."""
    kept = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for function in _functions(tree):
        shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        for node in ast.walk(function):
            if (name := _changed(node, kept, shared)) is not None:
                what = f"changes {name}, which is kept in the memory of one process; the next one does not have it"
                remedy = "return it from a step and hand it on as an argument, or keep it outside (a file, a database)"
                yield Suspect("memory", getattr(node, "lineno", function.lineno), what, remedy)


def _changed(node: ast.AST, kept: set[str], shared: set[str]) -> str | None:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        name = _root(node.func.value)
        return name if name in kept or name == "self" else None
    for target in targets:
        if isinstance(target, ast.Name) and target.id in shared:
            return target.id
        if isinstance(target, ast.Subscript | ast.Attribute) and _root(target) in kept:
            return _root(target)
    return None


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _effects(function: Function, steps: set[str]) -> Iterator[Suspect]:
    """Find calls in a workflow's body that look as if they changed something outside."""
    remedy = "workflow code is replayed after a crash: move this into a step (@everstep.step)"
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in OUTSIDE and name not in steps:
            yield Suspect("body", node.lineno, f"{name}() in the workflow's body changes something outside", remedy)
        elif name == "print" and any(keyword.arg == "file" for keyword in node.keywords):
            yield Suspect("body", node.lineno, "print(file=…) in the workflow's body changes something outside", remedy)
