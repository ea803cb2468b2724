"""`everstep run`, as a user has it."""

import re
import shlex
import signal

import pytest

from tests.cli.conftest import Folder

REPORT = ("run", "app.py:report", '"tides"', '{"name": "ann"}', "--id", "report-17")


def test_a_run_prints_its_result_and_says_where_it_is_kept(folder: Folder) -> None:
    done = folder.everstep(*REPORT)
    assert done.status == 0, done.err
    assert '"sent": "sent to ann"' in done.out
    assert f"store {folder.path / 'everstep.db'} (new)" in done.err
    assert "run report-17 (new)" in done.err
    assert "✓ send" in done.err
    assert 'progress = {"answers":2}' in done.err
    assert "Reader" in done.out, "the argument became what the signature says"


def test_json_is_all_that_stands_on_standard_output(folder: Folder) -> None:
    done = folder.everstep(*REPORT, "--json")
    facts = done.json()
    assert facts["status"] == "completed"
    assert facts["result"]["sent"] == "sent to ann"
    assert facts["new_run"] is True
    assert facts["new_store"] is True
    assert facts["attempts"] == {"ask": 1, "ask#2": 1, "send": 1}
    assert "printed by the workflow" in done.err


def test_a_finished_run_gives_its_result_again_and_does_nothing_again(folder: Folder) -> None:
    first = folder.everstep(*REPORT)
    effects = folder.effects()
    second = folder.everstep(*REPORT)
    assert second.status == 0
    assert '"sent": "sent to ann"' in first.out
    assert '"sent": "sent to ann"' in second.out
    assert "had ended already" in second.err
    assert folder.effects() == effects


def test_a_killed_run_goes_on_with_the_same_command(folder: Folder) -> None:
    folder.file("slow")
    process = folder.begin(*REPORT)
    folder.wait_for(lambda: any(line.startswith("send") for line in folder.effects()))
    folder.kill(process)
    (folder.path / "slow").unlink()

    done = folder.everstep(*REPORT)
    assert done.status == 0, done.err
    assert "2 steps were done before and are not done again" in done.err
    assert "send was cut off; attempt 2 begins" in done.err
    asked = [line for line in folder.effects() if line.startswith("ask")]
    sent = [line for line in folder.effects() if line.startswith("send")]
    assert sorted(asked) == ["ask tides", "ask why"]
    assert len(sent) == 2
    assert len(set(sent)) == 1, "both attempts had the same key"


def test_a_run_that_waits_prints_the_line_that_lets_it_go_on(folder: Folder) -> None:
    process = folder.begin("run", "app.py:approval", '"may I?"', "--id", "a-1")
    folder.wait_for(lambda: folder.run_row("a-1")[0] == "waiting")
    assert process.stderr is not None
    line = next(line for line in process.stderr if "everstep signal" in line)
    words = shlex.split(line[line.index("everstep signal") :])
    assert words == ["everstep", "signal", "a-1", "approved", "true"]
    assert folder.everstep(*words[1:]).status == 0
    done = folder.finish(process)
    assert done.status == 0
    assert done.out.strip() == "true"


def test_ctrl_c_gives_the_run_back_and_says_how_to_go_on(folder: Folder) -> None:
    process = folder.begin("run", "app.py:approval", '"may I?"', "--id", "a-1")
    folder.wait_for(lambda: folder.run_row("a-1")[0] == "waiting")
    process.send_signal(signal.SIGINT)
    done = folder.finish(process)
    assert done.status == 130
    line = re.search(r"everstep run .*", done.err)
    assert line is not None
    assert shlex.split(line.group()) == ["everstep", "run", "app.py:approval", '"may I?"', "--id", "a-1"]
    assert folder.run_row("a-1")[1] is None, "nobody owns it any more"
    assert "Traceback" not in done.err


SPINNING = """\
from everstep import workflow

@workflow
async def spin() -> None:
    while True:
        pass
"""


def test_code_that_does_not_give_way_is_named_when_somebody_wants_to_stop_and_a_second_signal_ends_it(
    folder: Folder,
) -> None:
    folder.file("spinning.py", SPINNING)
    process = folder.begin("run", "spinning.py:spin", "--id", "s-1")
    folder.wait_for(lambda: folder.run_row("s-1")[0] == "running")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    line = process.stderr.readline()
    while "does not give way" not in line:
        line = process.stderr.readline()
    assert "it is at spinning.py:" in line
    process.send_signal(signal.SIGINT)
    assert folder.finish(process).status == 130
    assert folder.run_row("s-1")[0] == "running"  # nothing was done to it


def test_a_failed_run_exits_with_1_and_retry_goes_on_from_what_failed(folder: Folder) -> None:
    done = folder.everstep("run", "app.py:failing", "--id", "f-1")
    assert done.status == 1
    assert "RuntimeError: broken" in done.err
    assert "everstep retry f-1" in done.err
    assert "Traceback" not in done.err

    folder.file("repaired")
    assert folder.everstep("retry", "f-1").status == 0
    again = folder.everstep("run", "app.py:failing", "--id", "f-1")
    assert again.status == 0, again.err
    assert again.out.strip() == '"fine"'
    assert folder.effects() == ["ask first"], "what was done stays done"


def test_on_existing_retry_does_both_at_once(folder: Folder) -> None:
    assert folder.everstep("run", "app.py:failing", "--id", "f-1").status == 1
    folder.file("repaired")
    done = folder.everstep("run", "app.py:failing", "--id", "f-1", "--on-existing", "retry")
    assert done.status == 0, done.err


def test_the_id_of_a_run_with_other_arguments_is_a_conflict(folder: Folder) -> None:
    folder.everstep(*REPORT)
    done = folder.everstep("run", "app.py:report", '"winds"', '{"name": "ann"}', "--id", "report-17")
    assert done.status == 2
    assert "everstep.run.id_conflict" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("app.py:report", "tides", "{}"), """write it as '"tides"'"""),
        (("app.py:report", '"tides"'), "report takes (topic: str, reader: Reader); 1 argument was given"),
        (("app.py:report", '"tides"', '{"name": 3}'), "The argument reader is not of the type Reader"),
        (("app.py:reprot",), "app.py declares no workflow named 'reprot'"),
        (("app.py",), "app.py declares 8 workflows. Say which one is meant"),
        (("app.py:note",), "note in app.py is not a workflow"),
        (("gone.py:report",), "There is no file gone.py"),
        (("gone.module:report",), "There is no module 'gone.module'"),
        (("app.py:approval", '"x"', "--id", "two words"), "is not a run id"),
        (("app.py:approval", '"x"', "--tag", "novalue"), "'novalue' is not NAME=VALUE"),
    ],
)
def test_a_mistake_is_answered_with_one_clear_message(folder: Folder, words: tuple[str, ...], said: str) -> None:
    done = folder.everstep("run", *words)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (folder.path / "everstep.db").exists(), "nothing was begun"


def test_a_file_with_one_workflow_needs_no_name_and_finds_what_lies_beside_it(folder: Folder) -> None:
    folder.file("beside.py", "ANSWER = 42\n")
    folder.file(
        "one.py", "import everstep, beside\n@everstep.workflow\nasync def only() -> int:\n    return beside.ANSWER\n"
    )
    done = folder.everstep("run", "one.py")
    assert done.status == 0, done.err
    assert done.out.strip() == "42"
    assert folder.everstep("run", "one:only", "--id", "by-module").out.strip() == "42"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_here\n", "bad.py:1: import nothing_here"),
        ("def broken(:\n", "bad.py cannot be imported: SyntaxError"),
        ("raise SystemExit(3)\n", "bad.py cannot be imported: SystemExit: 3"),
        (
            "import everstep\n@everstep.workflow\nasync def w() -> None: ...\neverstep.run(w)\n",
            'if __name__ == "__main__":',
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_explained(folder: Folder, text: str, said: str) -> None:
    folder.file("bad.py", text)
    done = folder.everstep("run", "bad.py")
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_an_error_in_json_is_json(folder: Folder) -> None:
    done = folder.everstep("run", "app.py:reprot", "--json")
    assert done.status == 2
    assert done.json()["error"]["code"] == "everstep.workflow.unknown"
    usage = folder.everstep("run", "--json")
    assert usage.status == 2
    assert usage.json()["error"]["code"] == "everstep.usage"


def test_arguments_may_be_given_by_name_and_are_the_same_run(folder: Folder) -> None:
    named = ("run", "app.py:report", 'reader={"name": "ann"}', 'topic="tides"', "--id", "report-17")
    assert folder.everstep(*named).status == 0
    effects = folder.effects()
    again = folder.everstep(*REPORT)
    assert "had ended already" in again.err
    assert folder.effects() == effects
    mixed = folder.everstep("run", "app.py:report", '"tides"', 'reader={"name": "ann"}', "--id", "report-17")
    assert mixed.status == 0, mixed.err
    for words, said in (
        (('"tides"', 'writer="x"'), "unexpected keyword argument 'writer'"),
        (('"tides"', 'topic="x"'), "multiple values for argument 'topic'"),
        (('topic="x"', 'topic="y"'), "topic was given twice"),
        (("topic=tides",), "is missing the required argument 'reader'"),
    ):
        wrong = folder.everstep("run", "app.py:report", *words)
        assert (wrong.status, said in wrong.err) == (2, True), wrong.err
