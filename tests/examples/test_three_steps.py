"""The textbook: three steps, the second of which fails at first."""

from pathlib import Path

from tests.examples import kit

STEP_EVENTS = (
    "step_started step_completed step_started step_failed step_started step_completed step_started step_completed"
)


def test_the_second_run_goes_on_from_the_step_that_failed(tmp_path: Path) -> None:
    first = kit.run("three_steps", tmp_path)
    assert first.startswith("load_data runs\nsummarize runs\nfailed: the summary service is down. Run me again.\n")
    assert not (tmp_path / "report.txt").exists()

    second = kit.run("three_steps", tmp_path)
    assert second.startswith("summarize runs\nwrite_report runs\ndone: report.txt\n")
    assert (tmp_path / "report.txt").read_text() == "5 numbers, their sum is 14\n"

    events = kit.history(tmp_path, "report-1")
    assert " ".join(event.kind for event in events if event.kind.startswith("step_")) == STEP_EVENTS
    names = [event.step for event in events if event.kind == "step_started"]
    assert names == ["load_data", "summarize", "summarize", "write_report"]


def test_a_third_run_does_nothing_but_give_the_result(tmp_path: Path) -> None:
    for _ in range(2):
        kit.run("three_steps", tmp_path)
    before = kit.history(tmp_path, "report-1")
    assert kit.run("three_steps", tmp_path).startswith("done: report.txt\n")
    assert kit.history(tmp_path, "report-1") == before
