"""Which of the mistakes in a file a crash test names."""

from pathlib import Path

import pytest

from everstep.testing.causes import BY_CHANCE, BY_ORDER, IN_MEMORY, Causes

PROGRAM = """\
import time
import everstep
from everstep import step, workflow
seen = []

@step
def note(word):
    seen.append(word)

@step
def count():
    return len(seen)

@workflow
def other():
    note(time.time())

def helper():
    return time.time()

@workflow
def mine():
    note(helper())
    time.sleep(
        1
    )
    note(time.time())  # everstep: ok, this person is wrong
    return count()
"""


@pytest.fixture
def causes(tmp_path: Path) -> Causes:
    (tmp_path / "app.py").write_text(PROGRAM)
    return Causes(str(tmp_path / "app.py"), "mine")


def test_the_nearest_mistake_above_the_line_in_code_of_the_workflow_is_named(causes: Causes) -> None:
    lines = [found.line if found else 0 for found in (causes.likeliest([BY_CHANCE], line) for line in (0, 23, 99))]
    assert lines == [19, 19, 27]  # not 16, which is of another workflow; 27 is silenced and named all the same


def test_the_first_group_that_has_a_mistake_decides(causes: Causes) -> None:
    found = causes.likeliest((BY_ORDER, IN_MEMORY, BY_CHANCE), 99)
    assert found is not None
    assert (found.rule, found.line) == ("globals", 8)
    assert causes.likeliest([BY_ORDER]) is None


def test_a_mistake_is_found_by_its_step_and_by_a_line_that_the_engine_refused(causes: Causes) -> None:
    assert causes.of_step("globals", "note#2") is not None
    assert causes.of_step("globals", "count") is None
    refused = causes.refused(24)
    assert refused is not None
    assert refused.rule == "sleep"
    assert causes.refused(27) is None


def test_a_step_is_placed_where_it_is_defined(causes: Causes) -> None:
    assert causes.place_of("count#3") == "app.py:11"
    assert causes.place_of("nowhere") == "app.py"
    assert causes.place_of("") == ""


SEVERAL = """\
import time

import everstep
from everstep import workflow


@workflow
async def stranger() -> float:
    return time.time()


@workflow
async def child() -> float:
    return time.monotonic()


@workflow
async def parent() -> float:
    return await child()


@workflow
async def alone() -> int:
    return 1
"""


def test_a_mistake_of_another_workflow_in_the_file_explains_nothing_unless_it_is_called(tmp_path: Path) -> None:
    file = tmp_path / "several.py"
    file.write_text(SEVERAL)
    assert Causes(str(file), "alone").likeliest([BY_CHANCE]) is None
    found = Causes(str(file), "parent").likeliest([BY_CHANCE])
    assert found is not None
    assert "time.monotonic()" in found.what
    found = Causes(str(file), "stranger").likeliest([BY_CHANCE])
    assert found is not None
    assert "time.time()" in found.what
