"""What a process remembers of children that ended in it: enough to believe them, and not what they returned."""

import tracemalloc

import msgspec
import pytest

from everstep.engine.run import children
from everstep.engine.run.children import ChildEnd, RecentEnds


def test_ends_of_children_with_large_outcomes_take_next_to_no_memory() -> None:
    recent = RecentEnds()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(240):
            recent.note(f"child {number}", "completed", b'"' + b"x" * 1_000_000 + b'"', secret=False)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 8_000_000


@pytest.mark.parametrize(("status", "outcome"), [("completed", b"2"), ("failed", b"1"), ("completed", b"null")])
def test_an_end_that_is_told_otherwise_than_it_was_is_not_believed(status: str, outcome: bytes) -> None:
    recent = RecentEnds()
    recent.note("child", "completed", b"1", secret=True)
    assert not recent.has("child", ChildEnd(status, msgspec.Raw(outcome)))
    told = ChildEnd("completed", msgspec.Raw(b"1"))
    assert recent.has("child", told)
    assert told.secret


def test_an_end_without_an_outcome_is_believed() -> None:
    recent = RecentEnds()
    recent.note("child", "cancelled", None, secret=False)
    assert recent.has("child", ChildEnd("cancelled"))


def test_only_the_newest_ends_are_remembered() -> None:
    recent = RecentEnds()
    for number in range(children.RECENT_MAX + 1):
        recent.note(f"child {number}", "completed", b"1", secret=False)
    assert not recent.has("child 0", ChildEnd("completed", msgspec.Raw(b"1")))
    assert recent.has("child 1", ChildEnd("completed", msgspec.Raw(b"1")))
