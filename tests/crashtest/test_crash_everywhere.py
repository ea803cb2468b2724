"""`crash_everywhere` by itself: what it skips, what it asks for, and what counts as a kept promise."""

import pytest

from everstep.cli.crash_page import page_of
from everstep.errors import Misuse
from everstep.testing import crash_everywhere
from everstep.testing.crash_boundaries import Boundary, chosen, spread
from everstep.worker.loading import load_workflow
from tests.crashtest import kit

SUBJECT = str(kit.ROOT / "tests" / "crashtest" / "subject.py")


def boundaries(name: str, count: int) -> list[Boundary]:
    return [Boundary(name, number) for number in range(1, count + 1)]


def test_a_once_step_without_a_probe_that_is_cut_off_is_held_and_keeps_its_promise() -> None:
    report = crash_everywhere(load_workflow(f"{SUBJECT}:post_once"), "hello", most=1, orders=0)
    assert report.holds, report.text()
    assert report.count("held") > 0
    assert report.count("kept") > 0
    page = page_of(report)
    assert "all promises hold" in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page  # nothing is loaded from anywhere


def test_a_signal_that_is_waited_for_in_vain_is_asked_for_and_a_day_of_sleep_takes_no_time() -> None:
    with pytest.raises(Misuse, match="--signal word=JSON"):
        crash_everywhere(load_workflow(f"{SUBJECT}:wait_for_word"), seconds=20)


def test_a_workflow_that_other_processes_cannot_import_is_refused() -> None:
    with pytest.raises(Misuse, match="is not a workflow"):
        crash_everywhere(lambda: None)


def test_without_a_limit_all_boundaries_are_chosen_and_with_one_so_many_of_each_kind() -> None:
    passed = [*boundaries("body.before", 10), *boundaries("run.end", 1)]
    assert chosen(passed, None, 100) == passed
    assert [one.count for one in chosen(passed, 2, 100)] == [1, 10, 1]
    assert len(chosen(passed, None, 6)) == 6
    assert [one.count for one in spread(boundaries("rest", 9), 3)] == [1, 5, 9]


@pytest.mark.parametrize("answer", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_an_approved_effect_happens_once_wherever_the_process_is_killed(answer: bool) -> None:
    workflow = load_workflow(f"{SUBJECT}:post_if_approved")
    report = crash_everywhere(workflow, "hello", approvals={"post": answer}, most=1, orders=0)
    assert report.holds, report.text()
    assert report.count("kept") > 15


def test_an_approval_that_nobody_gives_is_asked_for() -> None:
    with pytest.raises(Misuse, match="--approve post=JSON"):
        crash_everywhere(load_workflow(f"{SUBJECT}:wait_for_approval"), seconds=20)
