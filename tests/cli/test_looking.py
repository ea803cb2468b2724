"""`ls`, `show` and `history`; stores that are missing, foreign or newer; and text that must not reach the terminal."""

import os
import time

import pytest

from everstep.stores.sqlite import SqliteStore
from tests.cli.conftest import INSTRUCTIONS, Folder
from tests.waiting import open_sqlite


def test_ls_lists_runs_and_filters_them(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.everstep("run", "app.py:hostile", '"x"', "--id", "h-1", "--tag", "team=a")
    table = folder.everstep("ls").out
    assert "f-1" in table
    assert "failed" in table
    assert f"2 of 2 runs (1 completed, 1 failed) in {folder.path / 'everstep.db'}" in table
    assert [row["id"] for row in folder.json("ls")] == ["h-1", "f-1"]
    assert [row["id"] for row in folder.json("ls", "--status", "failed")] == ["f-1"]
    assert [row["id"] for row in folder.json("ls", "--workflow", "hostile")] == ["h-1"]
    assert [row["id"] for row in folder.json("ls", "--tag", "team=a")] == ["h-1"]
    assert folder.json("ls", "--tag", "team=b") == []
    assert len(folder.json("ls", "--limit", "1")) == 1
    row = folder.json("ls", "--status", "completed")[0]
    assert row["workflow"] == "hostile"
    assert row["created_at"] <= row["ended_at"]


def test_show_says_what_a_waiting_run_did_and_waits_for(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"may I?"')
    facts = folder.json("show", "a-1")
    assert facts["status"] == "waiting"
    assert facts["completed_steps"] == ["ask"]
    assert facts["current_step"] == ""
    assert facts["attempts"] == {"ask": 1}
    assert facts["holds"] == []
    assert facts["waits_for"] == [
        {"signal": "approved", "type": "bool", "command": "everstep signal a-1 approved true"}
    ]
    page = folder.everstep("show", "a-1").out
    assert "✓  ask" in page
    assert "everstep signal a-1 approved true" in page


def test_a_line_to_paste_names_the_store_that_was_named(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"may I?"')
    facts = folder.json("show", "a-1", "--url", "sqlite:///everstep.db")
    assert facts["waits_for"][0]["command"] == "everstep signal a-1 approved true --url sqlite:///everstep.db"


def test_show_makes_crashes_attempts_and_published_values_visible(folder: Folder) -> None:
    words = ("run", "app.py:report", '"tides"', '{"name": "ann"}', "--id", "r-1")
    folder.file("slow")
    process = folder.begin(*words)
    folder.wait_for(lambda: any(line.startswith("send") for line in folder.effects()))
    folder.kill(process)
    (folder.path / "slow").unlink()
    folder.everstep(*words)
    facts = folder.json("show", "r-1")
    assert facts["attempts"]["send"] == 2
    assert facts["published"] == {"progress": {"answers": 2}}
    assert [crash["steps"] for crash in facts["crashes"]] == [["send"]]
    send = next(step for step in facts["steps"] if step["name"] == "send")
    assert [attempt["outcome"] for attempt in send["attempts"]] == ["crashed", "completed"]
    assert send["attempts"][1]["because"] == "crash"
    page = folder.everstep("show", "r-1").out
    assert "killed once" in page
    assert "cut off after" in page
    assert "╳" in page


def test_show_names_the_line_that_raised_and_how_to_go_on(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    page = folder.everstep("show", "f-1").out
    assert "app.py" in page
    assert 'raise RuntimeError(f"broken {HOSTILE}")' in page
    assert "everstep retry f-1" in page
    assert "engine" not in page, "frames of the engine are no help"
    assert folder.json("show", "f-1")["error"]["type"] == "RuntimeError"


def test_show_watch_ends_with_the_run_and_its_exit_status(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    assert folder.everstep("show", "f-1", "--watch").status == 1
    worker = folder.begin("run", "app.py:approval", '"x"', "--id", "a-1")
    folder.wait_for(lambda: folder.run_row("a-1")[0] == "waiting")
    watch = folder.begin("show", "a-1", "--watch")
    folder.everstep("signal", "a-1", "approved", "true")
    assert folder.finish(watch).status == 0
    folder.finish(worker)


def test_history_has_a_line_for_each_event_and_their_bodies_in_json(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    events = folder.json("history", "f-1")
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["kind"] == "run_started"
    assert events[-1]["kind"] == "run_failed"
    assert set(events[0]) == {"seq", "kind", "step", "at", "body"}
    lines = folder.everstep("history", "f-1").out.splitlines()
    assert len(lines) == len(events) + 1


def test_an_earlier_generation_stays_readable(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.file("repaired")
    folder.everstep("run", "app.py:failing", "--id", "f-1", "--on-existing", "restart")
    assert folder.json("history", "f-1")[-1]["kind"] == "run_completed"
    assert folder.json("history", "f-1", "--generation", "1")[-1]["kind"] == "run_failed"
    assert folder.everstep("history", "f-1", "--generation", "9").status == 2


def test_nothing_that_an_agent_wrote_reaches_the_terminal_as_an_instruction(folder: Folder) -> None:
    run = folder.everstep("run", "app.py:hostile", '"\x1b[2J"'.replace("\x1b", "\\u001b"), "--id", "h-1")
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    printed = [run]
    for words in (("ls",), ("show", "h-1"), ("show", "f-1"), ("history", "h-1"), ("history", "f-1")):
        printed += [folder.everstep(*words), folder.everstep(*words, "--json")]
    for done in printed:
        found = INSTRUCTIONS.search(done.out + done.err)
        assert found is None, repr(found)
    page = folder.everstep("show", "h-1").out
    assert "[bold]markup[/bold]" in page, "markup is shown, not obeyed"
    assert folder.json("show", "h-1")["result"].startswith("\x1b[31mred"), "JSON has the value itself, escaped"


def test_an_unknown_run_is_answered_with_the_nearest(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "report-17")
    done = folder.everstep("show", "report-71")
    assert done.status == 2
    assert "Did you mean report-17?" in done.err
    assert "everstep.run.unknown" in done.err
    assert folder.everstep("show", "zzz").status == 2


@pytest.mark.parametrize("words", [("ls",), ("show", "x"), ("holds",), ("signal", "x", "y"), ("verify", "--all")])
def test_a_store_that_is_not_there_is_not_made(folder: Folder, words: tuple[str, ...]) -> None:
    done = folder.everstep(*words)
    assert done.status == 2
    assert "There is no store" in done.err
    assert not (folder.path / "everstep.db").exists()


def test_a_store_that_another_process_is_making_is_waited_for(folder: Folder) -> None:
    store, made = folder.path / "everstep.db", folder.path / "made.db"
    SqliteStore(made).close()
    store.touch()
    looking = folder.begin("ls", "--json")
    time.sleep(0.7)  # it has looked by now
    assert looking.poll() is None
    made.replace(store)  # which takes no time, however busy the machine is
    done = folder.finish(looking)
    assert (done.status, done.json()) == (0, [])
    os.truncate(store, 0)
    assert folder.json("ls")["error"]["message"].endswith("is empty: there is no store in it.")


def test_a_file_that_is_no_store_is_left_alone(folder: Folder) -> None:
    folder.file("text.db", "this is no database at all, and rather long for one line of text\n" * 20)
    done = folder.everstep("ls", "--url", "text.db")
    assert done.status == 2
    assert "is not a store" in done.err
    connection = open_sqlite(folder.path / "other.db")
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    assert "a SQLite database of something else" in folder.everstep("ls", "--url", "other.db").err


def test_a_store_of_a_newer_release_is_left_alone(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.change("UPDATE meta SET value = 99 WHERE name = 'schema_version'")
    for words in (("ls",), ("run", "app.py:failing"), ("migrate",), ("doctor",)):
        done = folder.everstep(*words)
        assert done.status in (1, 2), words
        assert "newer release" in done.err + done.out
        assert "Traceback" not in done.err


def test_the_environment_names_the_store(folder: Folder) -> None:
    env = {"EVERSTEP_URL": "sqlite:///named.db"}
    folder.everstep("run", "app.py:failing", "--id", "f-1", env=env)
    assert (folder.path / "named.db").exists()
    assert [row["id"] for row in folder.json("ls", env=env)] == ["f-1"]
