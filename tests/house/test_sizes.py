"""No function is longer than 70 lines, and no module longer than 700, nor one of the tests."""

import ast
from collections.abc import Mapping

from tests.house.sources import ROOT, Source, modules, report

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 700

LONGER_FOR_A_REASON: dict[str, str] = {}
"""`path` or `path::function` to the reason why it may be longer."""


def size_violations(source: Source, excepted: Mapping[str, str] = LONGER_FOR_A_REASON) -> list[str]:
    """Return the functions of a module that are too long, and the module itself if it is."""
    found = []
    length = len(source.text.splitlines())
    if length > MODULE_LINES_MAX and source.path not in excepted:
        found.append(source.at(1, f"{length} lines; a module has at most {MODULE_LINES_MAX}"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX and f"{source.path}::{node.name}" not in excepted:
                found.append(source.at(node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"))
    return found


def test_functions_and_modules_are_short() -> None:
    violations = [violation for source in modules() for violation in size_violations(source)]
    assert not violations, report(violations)


def test_modules_of_tests_are_short() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    found = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MODULE_LINES_MAX]
    assert not found, f"cut it by what it is about: {', '.join(found)}"


def test_each_exception_is_needed_and_has_a_reason() -> None:
    for name, reason in LONGER_FOR_A_REASON.items():
        path, _, function = name.partition("::")
        sources = [source for source in modules() if source.path == path]
        found = [one for source in sources for one in size_violations(source, {})]
        assert any((f"{function} has" if function else "a module has") in one for one in found), f"{name} is short now"
        assert reason, name


def function_of(lines: int) -> str:
    return "async def long():\n" + "    pass\n" * (lines - 1)


def test_a_long_function_is_found() -> None:
    assert not size_violations(Source("engine/x.py", function_of(FUNCTION_LINES_MAX)))
    assert size_violations(Source("engine/x.py", function_of(FUNCTION_LINES_MAX + 1)))


def test_a_long_module_is_found() -> None:
    assert not size_violations(Source("engine/x.py", "x = 1\n" * MODULE_LINES_MAX))
    assert size_violations(Source("engine/x.py", "x = 1\n" * (MODULE_LINES_MAX + 1)))
