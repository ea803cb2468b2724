"""What a page or a server for agents is told of a store, without the command line."""

import subprocess
import sys
from pathlib import Path

import msgspec

import everstep
from everstep import step, workflow
from everstep.stores.opening import open_store
from everstep.view.history import events_of
from everstep.view.run import run_view
from everstep.view.store import store_view
from everstep.view.summary import summary_of
from tests.waiting import wait_until


@step(effect="once")
async def charge(amount: int) -> int:
    return amount


@step
async def refuse() -> None:
    raise ValueError("sold out")


@workflow
async def selling(amount: int) -> str:
    everstep.publish("paid", await charge(amount))
    if await everstep.receive("go", bool):
        await refuse()
    return "sold"


@workflow
async def counting(left: int) -> int:
    return everstep.continue_as(left - 1) if left else left


def test_a_run_says_what_it_did_what_it_waits_for_and_how_it_ended(tmp_path: Path) -> None:
    url = str(tmp_path / "runs.db")
    with everstep.open(url) as app:
        run = app.start(selling, 5, id="r")
        wait_until(lambda: run.status() == "waiting")
        store = open_store(url)
        row = store.run("r")
        assert row is not None
        view = run_view(store, row, "runs.db")
        (done,) = view.steps
        assert (done.name, done.effect, done.state, done.value) == ("charge", "once", "completed", "5")
        (wait,) = view.waits_for
        assert (wait.signal, wait.command) == ("go", "everstep signal r go true --url runs.db")
        assert (view.published, view.problem, view.result) == ({"paid": 5}, "", None)
        assert store_view(store).runs == {"waiting": 1}
        run.signal("go", False)
        assert run.result() == "sold"
        row = store.run("r")
        assert row is not None
        assert run_view(store, row).result == "sold"
        assert events_of(store, row)[-1].kind == "run_completed"
        assert msgspec.json.decode(msgspec.json.encode(summary_of(row)))["status"] == "completed"
        store.close()


def test_the_read_model_needs_neither_a_terminal_nor_the_command_line() -> None:
    program = "import everstep.view.run, everstep.view.history, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"click", "rich", "everstep.cli"} & set(loaded)


def test_verify_looks_at_all_generations(tmp_path: Path) -> None:
    url = str(tmp_path / "runs.db")
    with everstep.open(url) as app:
        run = app.start(counting, 2, id="r")
        assert run.result() == 0
        found = run.verify()
        assert (found.sound, found.generations) == (True, 3)
        subprocess.run([sys.executable, "-c", DAMAGING, url], check=True)
        found = run.verify()
        assert not found.sound
        assert "run r" in found.problem


DAMAGING = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("UPDATE events SET step = 'other' WHERE run = 'r' AND generation = 1 AND seq = 1")
database.commit()
"""
