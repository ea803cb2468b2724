"""A client without the workflows' code, and starting and signalling inside a caller's own transaction."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

import everstep
from everstep import workflow
from everstep.errors import IdConflict, Misuse, RunEnded, UnknownRun
from everstep.stores.sqlite import SqliteStore
from tests.crash.figures import FIGURES
from tests.waiting import open_raw

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("outbox_programs.py")


@workflow
async def greet(name: str, times: int = 1) -> str:
    return f"hello {name} " * times


@workflow
async def listen() -> str:
    everstep.publish("ready", True)
    async for request in everstep.requests("sum", list[int]):
        request.answer(sum(request.value))
        break
    return await everstep.receive("word", str)


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


def worker(folder: Path) -> Any:
    return everstep.open(url(folder), recover=True, durability="process")


CLIENT = """
import asyncio, sys, everstep
from everstep.engine.code.workflow import DECLARED

async def main():
    async with everstep.connect(sys.argv[1]) as client:
        run = await client.start("greet", "ann", 2, id="g-1", tags={"from": "client"}, priority=3)
        assert await run.status() in ("queued", "running", "completed")
        assert await run.result(timeout=60) == "hello ann hello ann "
        run = await client.start("listen", id="l-1")
        assert await client.ask("l-1", "sum", [1, 2], timeout=30) == 3
        assert await run.published() == {"ready": True}
        await client.signal("l-1", "word", "bye", id="once")
        assert await client.get("l-1").result(timeout=60) == "bye"
        run = await client.start("listen", id="l-2")
        await client.cancel("l-2", now=True)
        try:
            await run.result(timeout=60)
        except everstep.errors.RunCancelled:
            pass
        assert [row.id for row in await client.list(tags={"from": "client"})] == ["g-1"]
        assert not DECLARED.names()

asyncio.run(main())

with everstep.connect(sys.argv[1]) as client:
    assert client.start("greet", "ann", 2, id="g-1").result(timeout=60) == "hello ann hello ann "
    client.start("listen", id="l-3")
    assert client.ask("l-3", "sum", [4], timeout=30) == 4
    client.signal("l-3", "word", "end")
    assert client.get("l-3").result(timeout=60) == "end"
    assert len(client.list(workflow="listen")) == 3
print("done")
"""


async def test_a_client_in_a_process_without_the_code_starts_asks_signals_cancels_and_reads(tmp_path: Path) -> None:
    async with worker(tmp_path):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", CLIENT, url(tmp_path)], capture_output=True, text=True, timeout=60
        )
    assert done.stdout == "done\n", done.stderr


async def test_what_a_client_starts_is_queued_until_a_worker_that_knows_it_is_there(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client:
        run = await client.start("greet", "ann", timeout=60, version="3", queue="slow")
        unknown = await client.start("nobody.knows_it", {"any": [1, None]})
        assert await run.status() == "queued"
        row = await run.row()
        assert (row.owner, row.epoch, row.version, row.queue) == (None, 0, "3", "slow")
        assert unknown.id.startswith("knows-it-")
        assert (await run.history())[0].body["timeout"] == 60
    async with worker(tmp_path) as app:
        assert await app.get(run.id).result(timeout=60) == "hello ann "
        assert await app.get(unknown.id).status() == "queued"


async def test_a_client_and_an_app_that_start_the_same_run_start_one(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client, worker(tmp_path) as app:
        await client.start("greet", "ann", id="g")
        assert await app.run(greet, "ann", id="g") == "hello ann "
        await client.start("greet", "ann", id="g")
        with pytest.raises(IdConflict, match="other arguments"):
            await client.start("greet", "ben", id="g")
        with pytest.raises(IdConflict, match="belongs to a run of greet"):
            await client.start("listen", id="g")
        with pytest.raises(IdConflict, match="exists already"):
            await client.start("greet", "ann", id="g", on_existing="fail")
        with pytest.raises(Misuse, match="attach, fail"):
            await client.start("greet", "ann", id="g", on_existing="restart")  # type: ignore[arg-type]


async def test_a_run_that_a_client_delays_begins_later(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client, worker(tmp_path):
        run = await client.start("greet", "ann", delay=0.3)
        assert await run.status() == "waiting"
        assert await run.result(timeout=60) == "hello ann "


def test_a_client_is_not_a_worker(tmp_path: Path) -> None:
    with everstep.connect(url(tmp_path)) as client:
        client.start("greet", "ann")
        assert client._blocking.inner.store.workers() == []


# -- in the caller's own transaction ---------------------------------------------------------------------------------
class Shop:
    """A caller's connection to the store's file, with a table of its own."""

    def __init__(self, folder: Path) -> None:
        self.connection = open_raw(folder / "store.db")
        self.connection.execute("CREATE TABLE IF NOT EXISTS orders (name TEXT)")

    def order(self, name: str) -> None:
        self.connection.execute("INSERT INTO orders VALUES (?)", (name,))

    def orders(self) -> list[str]:
        return [name for (name,) in self.connection.execute("SELECT name FROM orders")]


async def test_a_run_is_there_if_and_only_if_the_caller_commits(tmp_path: Path) -> None:
    async with worker(tmp_path) as app:
        shop = Shop(tmp_path)
        shop.connection.execute("BEGIN IMMEDIATE")
        shop.order("ann")
        run = await app.start(greet, "ann", id="g", transaction=shop.connection)
        with pytest.raises(UnknownRun):
            await run.status()
        shop.connection.execute("ROLLBACK")
        assert shop.orders() == []
        with pytest.raises(UnknownRun):
            await run.status()
        with shop.connection:
            shop.order("ann")
            await app.start(greet, "ann", id="g", transaction=shop.connection)
        assert shop.orders() == ["ann"]
        assert await run.result(timeout=60) == "hello ann "
        with shop.connection:
            await app.start(greet, "ann", id="g", transaction=shop.connection)  # it is there: the same run
        shop.connection.close()


async def test_a_signal_is_sent_if_and_only_if_the_caller_commits(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client:
        shop = Shop(tmp_path)
        await client.start("listen", id="l")
        shop.connection.execute("BEGIN IMMEDIATE")
        await client.signal("l", "word", "lost", transaction=shop.connection)
        shop.connection.execute("ROLLBACK")
        store = client._app.store
        assert store.signals("l") == []
        shop.connection.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            await client.signal("l", "word", "kept", id="i", transaction=shop.connection)
        await client.start("listen", id="m", transaction=shop.connection)
        await client.signal("m", "word", "both", transaction=shop.connection)
        assert store.signals("l") == []
        shop.connection.execute("COMMIT")
        assert [(one.name, one.value) for one in store.signals("l")] == [("word", b'["kept"]')]
        assert len(store.signals("m")) == 1
        shop.connection.close()


async def test_a_mistake_in_it_leaves_the_caller_s_transaction_as_it_was(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client, worker(tmp_path) as app:
        await client.start("greet", "ann", id="g")
        await app.get("g").result(timeout=60)
        shop = Shop(tmp_path)
        with shop.connection:
            shop.order("first")
            with pytest.raises(IdConflict):
                await client.start("greet", "ben", id="g", transaction=shop.connection)
            with pytest.raises(RunEnded):
                await client.signal("g", "word", transaction=shop.connection)
            with pytest.raises(UnknownRun):
                await client.signal("none", "word", transaction=shop.connection)
            with pytest.raises(Misuse, match="attach or fail"):
                await app.start(greet, "ann", id="g", on_existing="restart", transaction=shop.connection)
            shop.order("second")
        assert shop.orders() == ["first", "second"]
        shop.connection.close()


async def test_a_connection_that_is_no_good_for_it_is_refused_with_a_remedy(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client:
        other = open_raw(tmp_path / "other.db")
        with other, pytest.raises(Misuse, match="to another"):
            await client.start("greet", transaction=other)
        memory = apsw.Connection(":memory:")
        with memory, pytest.raises(Misuse, match="to another"):
            await client.start("greet", transaction=memory)
        mine = open_raw(tmp_path / "store.db")
        with pytest.raises(Misuse, match="BEGIN IMMEDIATE"):
            await client.start("greet", transaction=mine)
        standard = sqlite3.connect(":memory:")  # not to the store's file: that would be the danger itself
        with pytest.raises(Misuse, match="another copy of SQLite"):
            await client.start("greet", transaction=standard)
        assert await client.list() == []
        for one in (other, memory, mine, standard):
            one.close()
    async with everstep.open("memory:") as app:
        with pytest.raises(Misuse, match="no database"):
            await app.start(greet, "ann", transaction=apsw.Connection(":memory:"))


async def test_the_caller_s_own_way_to_see_rows_stays_as_it_is(tmp_path: Path) -> None:
    async with everstep.connect(url(tmp_path)) as client:
        shop = Shop(tmp_path)
        shop.connection.row_trace = lambda cursor, row: {"row": row}
        with shop.connection:
            await client.start("greet", "ann", id="g", transaction=shop.connection)
            await client.start("greet", "ann", id="g", transaction=shop.connection)
        assert list(shop.connection.execute("SELECT 1")) == [{"row": (1,)}]
        assert await client.get("g").status() == "queued"
        shop.connection.close()


def test_blocking_code_starts_in_its_own_transaction_on_its_own_thread(tmp_path: Path) -> None:
    with everstep.open(url(tmp_path), recover=True, durability="process") as app:
        shop, threads = Shop(tmp_path), set()
        shop.connection.exec_trace = lambda *_: threads.add(threading.get_ident()) or True
        with shop.connection:
            run = app.start(greet, "ann", transaction=shop.connection)
            listening = app.start(listen, id="l", transaction=shop.connection)
            app.signal("l", "word", "yes", transaction=shop.connection)
        assert threads == {threading.get_ident()}
        assert run.result(timeout=60) == "hello ann "
        assert app.ask("l", "sum", [1], timeout=30) == 1
        assert listening.result(timeout=60) == "yes"
        shop.connection.close()


@pytest.mark.parametrize("point", ["outbox.written:1", "outbox.written:2", "commit", "committed"])
def test_a_caller_that_is_killed_around_its_commit_leaves_both_or_neither(tmp_path: Path, point: str) -> None:
    armed = {"EVERSTEP_CRASH_AT": point} if ":" in point else {"DIES_AT": point}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    seen = set()
    for number in range(5):
        process = subprocess.run(
            [sys.executable, str(PROGRAMS), str(tmp_path), str(number)],
            env={**os.environ, "PYTHONPATH": path, **armed},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        FIGURES.trials += 1
        if point.startswith("outbox."):
            FIGURES.fired.add(point.partition(":")[0])
        store = SqliteStore(tmp_path / "store.db", create=False)
        connection = store.connect()
        orders = list(connection.execute("SELECT 1 FROM orders WHERE name = ?", (f"o-{number}",)))
        connection.close()
        is_there = bool(orders)
        assert (store.run(f"o-{number}") is not None) == is_there
        assert len(store.signals("desk")) == (number + 1 if is_there else 0)
        seen.add(is_there)
        store.close()
    assert seen == {point == "committed"}


def test_blocking_code_schedules_as_well(tmp_path: Path) -> None:
    with everstep.open(url(tmp_path), recover=True, durability="process") as app:
        schedule = app.schedule(greet, "ann", name="s", every=3600)
        assert app.get_schedule("s").show() == schedule.show() == app.schedules()[0]
        schedule.pause("why")
        assert schedule.show().note == "why"
        schedule.resume()
        run = schedule.trigger()
        (past,) = schedule.backfill("2020-01-01T00:00:00Z", "2020-01-01T00:30:00Z")
        while len(app.list(tags={"schedule": "s"})) < 2:
            threading.Event().wait(0.01)
        assert [app.get(one).result(timeout=60) for one in (run, past)] == ["hello ann "] * 2
        schedule.delete()
        assert app.schedules() == []
