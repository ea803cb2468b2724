"""`ask` and `stream`, and what the other commands say about requests and streams."""

import json
import shutil
from pathlib import Path

from tests.cli.conftest import INSTRUCTIONS, Folder
from tests.forked import Program


def helping(folder: Folder) -> Program:
    """Start a run that waits for requests."""
    shutil.copy(Path(__file__).with_name("helping.py"), folder.path / "helping.py")
    process = folder.begin("run", "helping.py:helping", "--id", "h-1")
    folder.wait_for(lambda: folder.run_row("h-1")[0] == "waiting")
    return process


def test_a_run_is_asked_from_another_process_and_shows_how(folder: Folder) -> None:
    process = helping(folder)
    assert any("everstep ask h-1 rename" in said for said in process.stderr), "it says so itself, while it waits"
    shown = folder.everstep("show", "h-1").out
    assert "takes requests rename (str)" in shown
    assert "everstep ask h-1 rename '\"text\"'" in shown
    (wait,) = folder.json("show", "h-1")["waits_for"]
    assert wait["request"] == "rename"
    done = folder.everstep("ask", "h-1", "rename", '"tides"', "--ask-id", "one")
    assert (done.status, done.out) == (0, '"TIDES"\n')
    assert folder.json("ask", "h-1", "rename", '"tides"', "--ask-id", "one")["answer"] == "TIDES"
    refused = folder.everstep("ask", "h-1", "rename", '""')
    assert refused.status == 1
    assert "a name is not empty" in refused.err
    wrong = folder.everstep("ask", "h-1", "rename", "1")
    assert "everstep.request.refused" in wrong.err
    slow = folder.everstep("ask", "h-1", "other", "1", "--timeout", "0.1")
    assert slow.status == 1
    assert "everstep.request.unanswered" in slow.err
    assert folder.everstep("ask", "h-1", "rename", '"end"').out == '"END"\n'
    ended = folder.finish(process)
    assert ended.status == 0
    assert "request rename answered" in ended.err
    late = folder.everstep("ask", "h-1", "rename", '"x"')
    assert "everstep.run.ended" in late.err
    assert folder.everstep("ask", "h-1", "rename", '"tides"', "--ask-id", "one").out == '"TIDES"\n'
    assert folder.everstep("check").status == 0


def test_asking_a_run_that_nobody_drives_says_so_and_is_answered_later(folder: Folder) -> None:
    folder.kill(helping(folder))
    done = folder.everstep("ask", "h-1", "rename", '"tides"', "--ask-id", "one", "--timeout", "0.2")
    assert done.status == 1
    assert "No process drives the run" in done.err
    asking = folder.begin("ask", "h-1", "rename", '"tides"', "--ask-id", "one")
    process = folder.begin("run", "helping.py:helping", "--id", "h-1")
    assert folder.finish(asking).out == '"TIDES"\n'
    assert folder.everstep("ask", "h-1", "rename", '"end"').status == 0
    assert folder.finish(process).status == 0


def test_a_stream_is_printed_and_followed(folder: Folder) -> None:
    process = helping(folder)
    follower = folder.begin("stream", "h-1", "tokens", "--follow", "--json")
    now = folder.everstep("stream", "h-1", "tokens")
    assert [line.split()[0] for line in now.out.splitlines()] == ["1", "2", "3"]
    assert "talk, attempt 1" in now.out
    assert not INSTRUCTIONS.search(now.out)
    assert folder.everstep("stream", "h-1", "tokens", "--text", "--after", "1").out.startswith("one ")
    folder.everstep("ask", "h-1", "rename", '"end"')
    assert folder.finish(process).status == 0
    lines = [json.loads(line) for line in folder.finish(follower).out.splitlines()]
    assert [line["position"] for line in lines] == [1, 2, 3, 4]
    assert [line["first"] for line in lines] == [False, True, False, False]
    assert folder.json("show", "h-1")["streams"] == {"tokens": 4}
    assert "stream tokens: 4 entries" in folder.everstep("show", "h-1").out
    assert folder.everstep("verify", "h-1").status == 0
    folder.change("UPDATE streams SET value = x'725b315d' WHERE position = 2")
    damaged = folder.everstep("verify", "h-1")
    assert damaged.status == 1
    assert "Entry 2 of stream 'tokens'" in damaged.out + damaged.err
    assert "does not match its digest" in folder.everstep("stream", "h-1", "tokens").err
