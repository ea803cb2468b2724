"""How tests wait: each raw connection for locks, and nothing for a clock. A busy machine must not make a test fail."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.sources import ROOT

HELPERS = "tests/waiting.py"
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
DURATIONS = {"took", "taken", "elapsed", "longest", "slowest", "latency", "duration"}
IMPATIENT = {
    "tests/effects/test_witnesses.py": "is what a user writes",
}
"""Files with connections of their own that do not wait, and why."""


def impatient_lines(tree: ast.Module) -> list[int]:
    """Return the lines that open a database without saying how long to wait for its locks."""
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    patient = {id(one) for function in functions if sets_timeout(function) for one in ast.walk(function)}
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and is_opening(call.func)
        if id(call) not in patient and ast.unparse(call.args[0]) != "':memory:'"
    ]


def is_opening(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function) in ("apsw.Connection", "sqlite3.connect")


def sets_timeout(function: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "set_busy_timeout" for one in ast.walk(function))


def timed_assertions(tree: ast.Module) -> Iterator[int]:
    """Yield the lines with an assertion that something was quick enough."""
    for asserted in (one for one in ast.walk(tree) if isinstance(one, ast.Assert)):
        for compared in (one for one in ast.walk(asserted.test) if isinstance(one, ast.Compare)):
            if any(isinstance(how, ast.Lt | ast.LtE) for how in compared.ops) and is_duration(compared.left):
                yield compared.lineno


def is_duration(left: ast.expr) -> bool:
    for one in ast.walk(left):
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub):
            calls = [call.func for call in ast.walk(one) if isinstance(call, ast.Call)]
            if any(isinstance(call, ast.Attribute) and call.attr in CLOCKS for call in calls):
                return True
        if isinstance(one, ast.Name) and one.id in DURATIONS:
            return True
    return False


@cache
def sources() -> list[tuple[str, ast.Module]]:
    words = ("apsw", "sqlite3", *CLOCKS - {"time"}, "time.time", "loop", *DURATIONS)
    texts = ((str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in sorted((ROOT / "tests").rglob("*.py")))
    return [(name, ast.parse(text)) for name, text in texts if any(word in text for word in words)]


def test_every_raw_connection_of_a_test_waits_for_locks() -> None:
    allowed = {HELPERS, *IMPATIENT}
    found = [f"{name}:{line}" for name, tree in sources() if name not in allowed for line in impatient_lines(tree)]
    assert not found, f"use open_raw or open_sqlite of {HELPERS}: {', '.join(found)}"


def test_no_test_asserts_how_long_something_took() -> None:
    found = [f"{name}:{line}" for name, tree in sources() for line in timed_assertions(tree)]
    assert not found, f"count, or wait with wait_until of {HELPERS}: {', '.join(found)}"


@pytest.mark.parametrize(
    "wrong",
    [
        "assert time.monotonic() - began < 2",
        "assert other and loop.time() - began <= 2",
        "assert statistics.median(took) < 1.5",
        "def f():\n    assert time.perf_counter_ns() - began < 5, 'why'",
    ],
)
def test_an_assertion_about_a_time_is_found(wrong: str) -> None:
    assert list(timed_assertions(ast.parse(wrong)))


@pytest.mark.parametrize("fine", ["assert time.monotonic() < until", "assert count < 5", "assert now() - began > 0.5"])
def test_a_deadline_and_a_least_time_are_fine(fine: str) -> None:
    assert not list(timed_assertions(ast.parse(fine)))


def test_a_connection_that_does_not_wait_is_found() -> None:
    waits = "def f():\n    c = apsw.Connection(p)\n    c.set_busy_timeout(9)\n"
    assert impatient_lines(ast.parse(waits + "def g():\n    apsw.Connection(p)\n")) == [5]
    assert impatient_lines(ast.parse("sqlite3.connect(p)\nsqlite3.connect(':memory:')")) == [1]
