"""`everstep hold`: whatever a run does, and whoever drives it, it is held, and goes on when that is resolved."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.conftest import Folder
from tests.forked import Program

APP = """
import asyncio
import sys
from pathlib import Path
import everstep
from everstep import step, workflow

@step(effect="repeat")
async def work(number: int) -> bool:
    with Path("effects.txt").open("a") as file:
        file.write(f"{number}\\n")
    await asyncio.sleep(0.2)
    return Path("enough").exists()

@workflow
async def busy() -> str:
    for number in range(20):
        if await work(number):
            break
    return "worked"

@workflow
async def patient() -> str:
    return await everstep.receive("word", str)

@workflow
async def idle() -> str:
    await asyncio.sleep(3600)
    return "slept"

async def main(name: str, delay: float) -> None:
    async with everstep.open() as app:
        run = await app.start(globals()[name], id="r", delay=delay)
        await asyncio.sleep(3600)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


@pytest.fixture
def place(folder: Folder) -> Folder:
    folder.file("app.py", APP)
    return folder


def begin(folder: Folder, workflow: str, delay: str) -> Program:
    """Start a program that starts a run and drives it."""
    words = [sys.executable, "app.py", workflow, delay]
    process = Program(words, cwd=folder.path, env=folder.environment(), stderr=subprocess.PIPE, text=True)
    folder.processes.append(process)
    return process


def held(folder: Folder) -> bool:
    return bool(folder.run_row("r")[0] == "held")


KINDS: dict[str, tuple[str, str, str]] = {
    # what it does: (workflow, delay, status)
    "at work on a step": ("busy", "0", "running"),
    "waiting for a signal": ("patient", "0", "waiting"),
    "waiting for a timer": ("idle", "0", "waiting"),
    "not begun yet": ("patient", "3600", "waiting"),
}


@pytest.mark.parametrize("is_alive", [True, False], ids=["driven", "left alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_held_whatever_it_does(place: Folder, kind: str, is_alive: bool) -> None:
    workflow, delay, status = KINDS[kind]
    process = begin(place, workflow, delay)
    place.wait_for(lambda: place.run_row("r")[0] == status)
    if not is_alive:
        place.kill(process)
    done = place.everstep("hold", "r", "--note", "wait for Ann")
    assert done.status == 0, done.err
    place.wait_for(lambda: held(place))
    (hold,) = place.json("holds")
    assert (hold["reason"], hold["summary"]) == ("asked", "wait for Ann")
    again = place.everstep("hold", "r")
    assert (again.status, "held already" in again.err) == (2, True)
    if is_alive:
        place.kill(process)
    assert place.everstep("verify", "r").status == 0
    assert place.everstep("resolve", "r", "--retry").status == 0
    finish: dict[str, Callable[[], object]] = {
        "patient": lambda: place.everstep("signal", "r", "word", '"go"'),
        "busy": lambda: place.file("enough"),
        "idle": lambda: place.everstep("cancel", "r"),
    }
    finish[workflow]()
    worker = place.begin("worker", "app.py")
    place.wait_for(lambda: place.run_row("r")[0] in ("completed", "cancelled"))
    worker.send_signal(signal.SIGTERM)
    assert place.finish(worker).status == 0
    assert place.everstep("verify", "r").status == 0


def test_a_run_that_waits_for_a_worker_is_held_and_no_worker_takes_it_up(place: Folder) -> None:
    process = begin(place, "busy", "0")
    place.wait_for(lambda: place.run_row("r")[0] == "running")
    place.kill(process)
    assert place.everstep("hold", "r").status == 0
    assert place.everstep("resolve", "r", "--retry").status == 0
    assert place.run_row("r")[0] == "queued"
    assert place.everstep("hold", "r").status == 0
    before = place.effects()
    worker = place.begin("worker", "app.py")
    place.wait_for(lambda: place.json("top")["workers"])
    assert held(place)
    worker.send_signal(signal.SIGTERM)
    assert place.finish(worker).status == 0
    assert place.effects() == before


def test_a_run_that_has_ended_or_is_not_there_cannot_be_held(place: Folder) -> None:
    place.file("enough")
    assert place.everstep("run", "app.py:busy", "--id", "r").status == 0
    for run in ("r", "nobody"):
        done = place.everstep("hold", run, "--json")
        assert done.status == 2, done.out
        assert json.loads(done.out)["error"]["code"].startswith("everstep.")
