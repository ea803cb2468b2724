"""What a command says about a run is true, and says how to go on."""

import shlex
from pathlib import Path

import pytest

import everstep
from tests.cli.conftest import Folder

WAITING = """\
import asyncio
import everstep
from everstep import workflow

@workflow
async def either() -> str:
    yes = asyncio.create_task(everstep.receive("yes", str))
    no = asyncio.create_task(everstep.receive("no", str))
    done, given_up = await asyncio.wait([yes, no], return_when=asyncio.FIRST_COMPLETED)
    for one in given_up:
        one.cancel()
    everstep.stream("log").append("decided")
    await asyncio.sleep(86400)
    async for request in everstep.requests("add", int):
        request.answer(request.value)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.file("waiting.py", WAITING)
    return made


def test_a_signal_that_the_code_may_have_given_up_is_not_said_to_be_waited_for(folder: Folder) -> None:
    folder.left_waiting("e-1", "waiting.py:either")
    done = folder.everstep("show", "e-1")
    assert "✉ waits for the signal yes (str):" in done.out
    assert "✉ waits for the signal no (str):" in done.out

    folder.everstep("signal", "e-1", "yes", '"x"')
    process = folder.begin("run", "waiting.py:either", "--id", "e-1")
    folder.wait_for(lambda: folder.count("SELECT count(*) FROM events WHERE kind = 'timer_started'"))
    folder.kill(process)
    done = folder.everstep("show", "e-1")
    assert "waits for unless its code has given up, the signal no (str):" in done.out
    waits = folder.json("show", "e-1")["waits_for"]
    assert [one["certain"] for one in waits if "signal" in one] == [False]

    done = folder.everstep("stream", "e-1", "lgo")
    assert "has appended nothing to a stream lgo. It has log." in done.err
    done = folder.everstep("ask", "e-1", "add", "5", "--timeout", "0.1")
    assert done.status == 1
    line = next(line for line in done.err.splitlines() if "--ask-id" in line)
    assert shlex.split(line)[:5] == ["everstep", "ask", "e-1", "add", "5"]


def test_a_run_that_nobody_serves_is_shown_as_such_and_arguments_that_do_not_fit_are_named(folder: Folder) -> None:
    with everstep.connect(str(folder.path / "everstep.db")) as client:
        client.start("nosuch", 1, id="n-1")
        client.start("either", 5, id="bad")
    assert "no worker serves nosuch in queue default" in folder.everstep("show", "n-1").out
    process = folder.begin("worker", "waiting.py")
    folder.wait_for(lambda: folder.run_row("bad")[0] == "held")
    folder.kill(process)
    assert "the arguments do not fit the code: either() takes" in folder.everstep("holds").out


def test_a_command_to_paste_is_one_line_however_long_it_is(folder: Folder) -> None:
    run = "r" + "-very-long" * 19
    folder.left_waiting(run, "waiting.py:either")
    assert f"\n  everstep signal {run} yes '\"text\"'\n" in folder.everstep("show", run).out
    assert f" everstep signal {run} yes " not in folder.everstep("ls").out
    folder.everstep("hold", run)
    assert f"\n  everstep resolve {run} --hold " in folder.everstep("holds").out
    assert folder.everstep("export", run, "f.jsonl", "--leave").status == 0
    folder.everstep("resolve", run, "--retry")
    (folder.path / "f.jsonl").unlink()
    assert folder.everstep("export", run, "f.jsonl", "--hold").status == 0
    url = f"sqlite:///{folder.path}/{'x' * 150}.db"
    done = folder.everstep("import", "f.jsonl", "--url", url)
    assert f"everstep worker app.py --url {url}" in done.out
