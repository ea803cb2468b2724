"""A field of a driver, an execution or a host is written by its own module only: others call a method that says why.

Dozens of modules know these three. `pytest tests/house/test_owners.py` lists each write from outside, and counts
them.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.house.sources import Source, modules, report

OWNERS: dict[str, tuple[str, ...]] = {
    "driver": ("engine/run/driver.py",),
    "execution": ("engine/code/execution.py",),
    "app": ("engine/process/host.py", "engine/app/app.py"),
}
CLASSES = {
    "Driver": "driver",
    "Execution": "execution",
    "App": "app",
    "Host": "app",
    "RunHost": "app",
}
NAMES = {"host": "app"}
ANOTHER: dict[tuple[str, str], str] = {
    ("integrations/langgraph/questions.py", "execution.shown"): "the execution of a graph's node, not of a run",
}
"""File and target to the reason why it is something else that has the same name."""


def declared(tree: ast.Module) -> dict[str, str]:
    """Return what names are, by their annotations."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        name, annotation = None, getattr(node, "annotation", None)
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
        if name is not None and annotation is not None:
            for kind in ast.unparse(annotation).replace("'", "").replace('"', "").split(" | "):
                if kind in CLASSES:
                    found[name] = CLASSES[kind]
    return found


def written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Give each attribute that is assigned, changed or deleted, also one whose item is."""
    for node in ast.walk(tree):
        target: ast.AST = node
        if not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            yield target


def foreign_writes(source: Source) -> list[str]:
    """Return where a module writes a field of another module's driver, execution or host."""
    names = {**NAMES, **declared(source.tree)}
    found = []
    for target in written(source.tree):
        of = target.value
        name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
        kind = names.get(name) or names.get(name.removeprefix("_")) or name.removeprefix("_")
        text = ast.unparse(target)
        if kind in OWNERS and source.path not in OWNERS[kind] and (source.path, text) not in ANOTHER:
            found.append(source.at(target.lineno, f"{text} is written here: give {kind} a method that says why"))
    return found


def test_no_module_writes_fields_of_another_modules_driver_execution_or_host() -> None:
    found = [one for source in modules() for one in foreign_writes(source)]
    assert not found, f"{len(found)} writes from outside:\n{report(found)}"


@pytest.mark.parametrize(
    "code",
    [
        "driver.ending = 'x'",
        "self._driver.hold = None",
        "driver.execution.caution = ''",
        "a, execution.branch = 1, 2",
        "self.execution.unseen_workers |= {1}",
        "del self._app.drivers[run]",
        "app.worker = ''",
        "host.worker = ''",
        "def f(taken: Driver) -> None:\n    taken.status = 'waiting'",
        "def f(taken: 'Driver | None') -> None:\n    taken.status = 'waiting'",
        "for driver.run in runs: pass",
    ],
)
def test_it_finds_a_write_from_outside(code: str) -> None:
    assert foreign_writes(Source("engine/run/perform.py", code))


@pytest.mark.parametrize(
    "code", ["driver.end_generation(command)", "driver = other", "self.status = 1", "seen.status = driver.status"]
)
def test_it_finds_no_other(code: str) -> None:
    assert not foreign_writes(Source("engine/run/perform.py", code))


def test_a_module_writes_its_own() -> None:
    assert not foreign_writes(Source("engine/run/driver.py", "driver.ending = ''"))
