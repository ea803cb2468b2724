"""How tests wait: each raw connection for locks, nothing for a clock. A busy machine must not make a test fail."""

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
PAUSES = {
    "tests/cli/test_looking.py": "shows that a command still waits",
    "tests/cli/test_moving.py": "shows that an old worker does nothing more",
    "tests/damage/test_clock.py": "a process of its own sleeps by the machine's clock",
    "tests/damage/test_clocks_apart.py": "processes are suspended for longer than their lease",
    "tests/damage/restoring.py": "is a program of its own, without this package",
    "tests/effects/test_atomic_recovery.py": "a commit takes longer than its step may; writers at once take a moment",
    "tests/engine/programs.py": "is a program of its own, without this package",
    "tests/engine/test_guard.py": "is what the guard sees",
    "tests/engine/test_library_use.py": "looks at a program, and tells what it said if it ends",
    "tests/engine/test_signals_to_processes.py": "signals come one after the other, whatever the code then does",
    "tests/forked.py": "looks at a program, and tells how it ended if it does",
    "tests/graphs/programs.py": "is a program of its own, without this package",
    "tests/integrations/test_langgraph_blocking.py": "is what the detector sees",
    "tests/integrations/test_langgraph_questions.py": "one of two calls comes late",
    "tests/loop_calls.py": "looks at a loop that may not turn, and tells where it is",
    "tests/notify/receiver.py": "is a program of its own: a slow receiver",
    "tests/postgres/test_liveness.py": "shows that nothing is said, for a while",
    "tests/postgres/test_outages.py": "the server is gone for a while",
    "tests/postgres/test_retention.py": "the pace of a writer",
    "tests/postgres/test_rolling_upgrade.py": "shows that nothing more is said",
    "tests/postgres/test_transactions.py": "writers at once take a moment",
    "tests/stores/test_gc_beside_a_writer.py": "the pace of a writer",
    HELPERS: "is how tests wait",
}
"""Files outside of the crash tests that call `time.sleep`, and why no condition takes its place."""
CRASHES = ("tests/crash/", "tests/chaos/", "tests/crashtest/", "_kills.py", "tests/effects/tills.py")
"""Where processes are killed and stopped at moments."""


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


def pauses(tree: ast.Module) -> list[int]:
    """Return the lines that sleep."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    return [one.lineno for one in calls if ast.unparse(one.func) == "time.sleep"]


@cache
def sources() -> list[tuple[str, ast.Module]]:
    words = ("apsw", "sqlite3", *CLOCKS - {"time"}, "time.time", "time.sleep", "loop", *DURATIONS)
    texts = ((str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in sorted((ROOT / "tests").rglob("*.py")))
    return [(name, ast.parse(text)) for name, text in texts if any(word in text for word in words)]


def test_every_raw_connection_of_a_test_waits_for_locks() -> None:
    allowed = {HELPERS, *IMPATIENT}
    found = [f"{name}:{line}" for name, tree in sources() if name not in allowed for line in impatient_lines(tree)]
    assert not found, f"use open_raw or open_sqlite of {HELPERS}: {', '.join(found)}"


def test_no_test_asserts_how_long_something_took() -> None:
    found = [f"{name}:{line}" for name, tree in sources() for line in timed_assertions(tree)]
    assert not found, f"count, or wait with wait_until of {HELPERS}: {', '.join(found)}"


def test_tests_do_not_sleep_except_where_processes_are_killed() -> None:
    found = {name: lines for name, tree in sources() if (lines := pauses(tree))}
    calm = {name for name in found if not any(place in name for place in CRASHES)}
    new = [f"{name}:{line}" for name in sorted(calm - PAUSES.keys()) for line in found[name]]
    assert not new, f"open a gate, or wait with wait_until of {HELPERS}: {', '.join(new)}"
    assert PAUSES.keys() <= calm, f"they no longer sleep: {PAUSES.keys() - calm}"


def test_a_test_that_sleeps_is_found() -> None:
    assert pauses(ast.parse("import time\n\ndef f():\n    time.sleep(1)\n")) == [4]


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
