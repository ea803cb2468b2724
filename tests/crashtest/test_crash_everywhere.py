"""`crash_everywhere` by itself: what it skips, what it asks for, and what counts as a kept promise."""

from pathlib import Path

import pytest

from everstep.cli.crash_page import page_of
from everstep.errors import Misuse
from everstep.testing import crash_everywhere
from everstep.testing.causes import Causes
from everstep.testing.crash_boundaries import Boundary, chosen, spread
from everstep.testing.crash_trial import Account, Setting
from everstep.testing.crash_verdict import Expected, Judge
from everstep.testing.crashtest import unused
from everstep.worker.loading import load_workflow
from tests.crashtest import kit

MODELS = str(kit.ROOT / "tests" / "crashtest" / "models.py")
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


def test_models_that_are_sent_as_json_keep_their_promises_wherever_the_run_is_killed(tmp_path: Path) -> None:
    facts = kit.crashtest(
        tmp_path,
        f"{MODELS}:ordering",
        *('{"id": "7d444840-9dc0-11d1-b245-5ffdce74fad2", "lines": [{"product": "tea"}]}', "--most", "1"),
        *("--orders", "0", "--signal", 'address={"street": "Elm"}', "--approve", 'ship={"ok": true}'),
        expect=0,
    )
    assert facts["trials"]["broken"] == 0
    assert facts["trials"]["kept"] > 20


def test_a_signal_that_the_workflow_does_not_take_is_refused_with_the_place() -> None:
    with pytest.raises(Misuse, match=r"for the signal address: not a Address: `\$\.street`: Field required"):
        crash_everywhere(
            load_workflow(f"{MODELS}:ordering"), {"lines": [{"product": "tea"}]}, signals={"address": {"road": 1}}
        )


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


def test_signals_come_one_at_a_time_and_requests_in_their_order_and_what_nobody_wants_is_named() -> None:
    report = crash_everywhere(
        load_workflow(f"{SUBJECT}:talk"),
        signals={"yes": "a", "no": "b"},
        requests={"say": ["hello", "bye"], "sya": ["hello"]},
        files=["out/*"],
        most=1,
        orders=0,
    )
    assert report.holds, report.text()
    assert report.count("kept") > 25
    assert report.notes == [
        "Never wanted, undisturbed: --signal no. Is the name right?",
        "Never wanted, undisturbed: --ask sya. Is the name right?",
        "No file matches --files out/*, undisturbed.",
    ]


def test_a_request_that_nobody_makes_is_asked_for() -> None:
    with pytest.raises(Misuse, match="--ask say=JSON"):
        crash_everywhere(
            load_workflow(f"{SUBJECT}:talk"), signals={"yes": "a"}, requests={"say": ["hello"]}, seconds=20
        )


def test_a_signal_that_the_workflow_does_not_take_is_named_with_the_reason() -> None:
    with pytest.raises(Misuse, match="value that is given for the signal word: not a str"):
        crash_everywhere(load_workflow(f"{SUBJECT}:wait_for_word"), signals={"word": 5}, seconds=20)


def expected(*effects: tuple[str, str]) -> Expected:
    return Expected([Account(status="completed", effects=dict.fromkeys(effects, 1), contracts={"mark": "repeat"})])


def test_an_effect_that_no_undisturbed_run_has_is_not_blamed_on_a_receiver_that_ignores_keys() -> None:
    judge = Judge(Causes(SUBJECT, "talk"), expected(("mark", "a")))
    account = Account(status="completed", effects={("mark", "a"): 1, ("mark", "b"): 1}, repeated={"mark": "repeat"})
    broken = judge.judge(account, [Boundary("body.before", 1, "mark")])
    assert broken is not None
    assert "took another way" in broken.why
    assert broken.place.startswith("subject.py:")
    assert "arguments that no undisturbed run has" in broken.found[0]

    account.effects = {("mark", "a"): 2}
    broken = judge.judge(account, [Boundary("body.before", 1, "mark")])
    assert broken is not None
    assert "ignores keys" in broken.why


def test_how_an_undisturbed_run_failed_is_said() -> None:
    account = Account(status="failed", error="ValueError: no such thing")
    assert unused(Setting(target="", file="", arguments="[]"), account) == [
        "Undisturbed, the run ends as failed, ValueError: no such thing; that is what was compared with."
    ]


def test_what_no_kill_shows_since_its_steps_are_quick_is_shown_by_a_replay() -> None:
    report = crash_everywhere(load_workflow(f"{SUBJECT}:look_at_the_clock"), most=1, orders=0)
    (broken,) = report.broken
    assert broken.promise == "replayed code asks for the same as before"
    assert "time.time()" in broken.why
    assert broken.place.startswith("subject.py:")
