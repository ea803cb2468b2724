"""`atomic` when its database is locked, loses its answers, fails, is away, or is one that nobody has thought of yet."""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Retry, transaction, workflow
from everstep.effects import atomic
from everstep.effects.databases import STORE, Meaning, SqliteFile
from everstep.errors import DatabaseFailed, RunHeld
from everstep.model.markers import Marker
from everstep.stores.sqlite.marked import MarkedTransaction
from tests.effects.shops import Shop, Stop, Troubled, sqlite_error, store_rows
from tests.engine.resume_helpers import Machine
from tests.waiting import open_sqlite
from tests.worlds.ledger import NOTES

BUSY, FULL, IO_ERROR_WRITE, IO_ERROR_FSYNC = 5, 13, 778, 1034


def sell(connection: Any, item: str) -> str:
    NOTES.append(everstep.current().attempt)
    connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
    return f"sold {item}"


def selling_flow(database: Any, body: Callable[..., str] = sell, **options: Any) -> Any:
    selling = transaction(database, name="selling", **options)(body)

    @workflow(name="troubled-sale")
    async def flow() -> str:
        return await asyncio.to_thread(selling, "lamp")

    return flow


# -- locked ------------------------------------------------------------------------------------------------------------
async def test_others_who_write_are_waited_for_and_that_is_no_attempt(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    other = open_sqlite(shop.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    _, run = await machine.start(selling_flow(shop.path), id="r")
    await asyncio.sleep(0.3)
    assert machine.status("r") == "running"
    other.execute("COMMIT")
    other.close()
    assert await run.result(timeout=60) == "sold lamp"
    assert machine.kinds("r", "step_", "attempt_") == ["step_started", "step_completed"]
    assert shop.sales() == ["lamp"]


async def test_those_who_read_are_waited_for_by_the_commit(machine: Machine) -> None:
    """Without a write-ahead log a COMMIT has to wait for readers; the body does not run again for that."""
    shop = Shop(machine.folder / "shop.db")
    reader = open_sqlite(shop.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sales").fetchall()
    _, run = await machine.start(selling_flow(shop.path), id="r")
    await asyncio.sleep(0.3)
    assert machine.status("r") == "running"
    reader.execute("COMMIT")
    reader.close()
    assert await run.result(timeout=60) == "sold lamp"
    assert NOTES == [1]
    assert shop.sales() == ["lamp"]


async def test_a_body_that_meets_a_lock_is_run_again_and_that_is_no_attempt(machine: Machine) -> None:
    """As a serialization failure of a larger database would be."""
    shop = Shop(machine.folder / "shop.db")

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        if len(NOTES) < 4:
            raise sqlite_error(BUSY, "database is locked")
        return sold

    app = await machine.boot()
    assert await app.run(selling_flow(shop.path, body), id="r") == "sold lamp"
    assert NOTES == [1, 1, 1, 1]
    assert machine.kinds("r", "step_", "attempt_") == ["step_started", "step_completed"]
    assert shop.sales() == ["lamp"]


async def test_patience_ends_with_an_error_that_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "PATIENCE_SECONDS", 0.1)
    shop = Shop(machine.folder / "shop.db")
    other = open_sqlite(shop.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    app = await machine.boot()
    with pytest.raises(DatabaseFailed, match=r"shop\.db was locked by others"):
        await app.run(selling_flow(shop.path), id="r")
    other.close()
    assert shop.sales() == []


async def test_the_store_goes_on_while_an_atomic_body_in_it_runs(machine: Machine) -> None:
    """Its body keeps the store's one writer. Others wait, nobody fails, and the loop is not blocked."""
    stop = Stop()

    @transaction(STORE)
    def slowly(connection: Any) -> str:
        connection.execute("CREATE TABLE sales (key TEXT, item TEXT)")
        stop()
        return sell(connection, "lamp")

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(slowly)

    @workflow
    async def other() -> str:
        return "other"

    app = await machine.boot(clock=None)
    run = await app.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    waiting = asyncio.create_task(app.run(other, id="o"))
    for _ in range(20):  # the loop is free: it turns while the transaction is open, which is ended here
        await asyncio.sleep(0.01)
    assert not waiting.done()
    stop.opened.set()
    assert await run.result(timeout=60) == "sold lamp"
    assert await waiting == "other"
    assert store_rows(machine.path) == ["lamp"]


# -- lost answers ------------------------------------------------------------------------------------------------------
def failing_commits(error: Exception, *, after: bool, times: int) -> Callable[[Callable[[], None]], None]:
    """Let commits fail: before they are done, or after, so that only the answer is lost."""
    left = [times]

    def commit(really: Callable[[], None]) -> None:
        if not left[0]:
            really()
            return
        left[0] -= 1
        if after:
            really()
        raise error

    return commit


ERRORS = {
    "something unheard of": RuntimeError("the reply was lost"),
    "locked": sqlite_error(BUSY, "database is locked"),
    "no room": sqlite_error(FULL, "database or disk is full"),
    "a failed write": sqlite_error(IO_ERROR_WRITE, "disk I/O error"),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_a_commit_whose_answer_was_lost_is_found_by_its_marker(machine: Machine, name: str) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    database.instead_of_commit = failing_commits(ERRORS[name], after=True, times=1)
    app = await machine.boot()
    assert await app.run(selling_flow(database), id="r") == "sold lamp"
    assert NOTES == [1]
    assert shop.sales() == ["lamp"]
    assert machine.kinds("r", "step_", "attempt_") == ["step_started", "step_completed"]


@pytest.mark.parametrize("name", ERRORS)
async def test_a_commit_that_was_not_done_is_a_failed_attempt_or_none(machine: Machine, name: str) -> None:
    """It is not assumed to have happened either: the marker is not there."""
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    database.instead_of_commit = failing_commits(ERRORS[name], after=False, times=1)
    _, run = await machine.start(selling_flow(database, retry=Retry(attempts=2, first=1.0, jitter=0.0)), id="r")
    if name != "locked":
        await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
        assert shop.sales() == []
        await machine.advance(1.1)
    assert await run.result(timeout=60) == "sold lamp"
    assert ([1, 1] if name == "locked" else [1, 2]) == NOTES
    assert shop.sales() == ["lamp"]


async def test_a_marker_that_finds_no_room_takes_everything_with_it(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    database.marker_errors = [ERRORS["locked"], ERRORS["no room"]]
    app = await machine.boot()
    with pytest.raises(DatabaseFailed, match="marker"):
        await app.run(selling_flow(database), id="r")
    assert NOTES == [1, 1], "a lock is waited for, and is no attempt"
    assert shop.sales() == []


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
async def test_a_refused_commit_without_attempts_left_says_what_was_written(machine: Machine, after: bool) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    database.instead_of_commit = failing_commits(ERRORS["no room"], after=after, times=99)
    app = await machine.boot()
    if after:
        assert await app.run(selling_flow(database), id="r") == "sold lamp"
    else:
        with pytest.raises(DatabaseFailed, match=r"full.*|rolled back"):
            await app.run(selling_flow(database), id="r")
    assert len(shop.sales()) == after


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
async def test_a_database_that_is_away_after_a_commit_is_asked_again_until_it_answers(
    machine: Machine, after: bool
) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    is_away = [False]

    def begin() -> None:
        if is_away[0]:
            raise OSError("no route to host")

    def commit(really: Callable[[], None]) -> None:
        if not is_away[0] and database.begun == 1:
            if after:
                really()
            is_away[0] = True
            raise OSError("connection reset")
        really()

    database.before_begin, database.instead_of_commit = begin, commit
    _, run = await machine.start(selling_flow(database), id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    for _ in range(3):
        await machine.advance(10)
    assert machine.status("r") in ("running", "waiting")
    assert {body.answer for body in machine.bodies("r", "probe_answered")} == {"unknown"}
    is_away[0] = False
    for _ in range(10):
        await machine.advance(60)
    assert await run.result(timeout=60) == "sold lamp"
    assert ([1] if after else [1, 2]) == NOTES
    assert shop.sales() == ["lamp"]
    assert not machine.replay("r").differences


async def test_a_database_that_stays_away_is_a_question_for_a_person(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)

    def commit(really: Callable[[], None]) -> None:
        really()
        database.before_begin = away
        raise OSError("connection reset")

    def away() -> None:
        raise OSError("no route to host")

    database.instead_of_commit = commit
    app, run = await machine.start(selling_flow(database), id="r")
    await machine.until(lambda: "step_doubted" in machine.kinds("r"))
    for _ in range(30):
        await machine.advance(61)
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold("r")
    assert (hold.reason, hold.resolutions) == ("in-doubt", ["done", "not-done", "probe", "cancel"])
    database.before_begin = lambda: None
    await app.resolve("r", "probe")
    assert await run.result(timeout=60) == "sold lamp"
    assert NOTES == [1]
    assert shop.sales() == ["lamp"]
    assert machine.bodies("r", "step_completed")[0].adopted


@pytest.mark.parametrize("resolution", ["not-done", "probe", "done"])
@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
async def test_after_a_failed_sync_nothing_is_assumed_and_a_person_decides(
    machine: Machine, after: bool, resolution: str
) -> None:
    """Even what can be read back may not be on the disk. Whatever is said then, there is one sale at the most."""
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)
    error = sqlite_error(IO_ERROR_FSYNC, "disk I/O error")
    database.instead_of_commit = failing_commits(error, after=after, times=1)
    app, run = await machine.start(selling_flow(database), id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    hold = machine.hold("r")
    assert hold.reason == "in-doubt"
    assert "nothing may be assumed" in hold.summary
    assert [body.because for body in machine.bodies("r", "step_doubted")] == ["commit"]
    assert database.begun == 1, "it is not read back"
    await machine.stop(app)
    app = await machine.boot()
    await app.resolve("r", resolution, value="sold lamp" if resolution == "done" else None)
    assert await app.get("r").result(timeout=60) == "sold lamp"
    assert len(shop.sales()) == (0 if resolution == "done" and not after else 1)
    assert not machine.replay("r").differences


async def test_a_marker_that_cannot_be_read_is_a_question_for_a_person(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()
    database = Troubled(shop.path)

    def commit(really: Callable[[], None]) -> None:
        really()
        stop()

    database.instead_of_commit = commit
    flow = selling_flow(database)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    await machine.kill(app)
    stop.opened.set()
    with shop.open() as connection:
        connection.execute("UPDATE everstep_markers SET outcome = ?", (b"[\xff]",))
    app = await machine.boot()
    with pytest.raises(RunHeld):
        await (await app.start(flow, id="r")).result(timeout=60)
    assert machine.hold("r").reason == "in-doubt"
    assert NOTES == [1]
    await app.resolve("r", "done", value="sold lamp")
    assert await app.get("r").result(timeout=60) == "sold lamp"
    assert shop.sales() == ["lamp"]


async def test_a_database_that_cannot_be_asked_after_a_crash_does_not_let_the_step_fail(machine: Machine) -> None:
    """It may have happened, so neither is the error raised nor is anything done, before the marker was read."""
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()
    database = Troubled(shop.path)

    def commit(really: Callable[[], None]) -> None:
        really()
        stop()

    database.instead_of_commit = commit
    flow = selling_flow(database)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    await machine.kill(app)
    stop.opened.set()
    away = machine.folder / "away.db"
    shop.path.rename(away)
    shop.path.mkdir()
    app, run = await machine.start(flow, id="r")
    await machine.until(lambda: "probe_answered" in machine.kinds("r"))
    shop.path.rmdir()
    away.rename(shop.path)
    for _ in range(3):
        await machine.advance(10)
    assert await run.result(timeout=60) == "sold lamp"
    assert NOTES == [1]
    assert shop.sales() == ["lamp"]


# -- a disk that really fails ------------------------------------------------------------------------------------------
FAILING = """
import asyncio, sqlite3, sys
import everstep
from everstep import transaction, workflow

folder, = sys.argv[1:]

@transaction(folder + "/shop.db")
def selling(connection: sqlite3.Connection) -> str:
    connection.execute("INSERT INTO sales VALUES ('', 'lamp')")
    with open(folder + "/body", "a") as file:
        file.write("x")
    return "sold"

@workflow
def flow() -> str:
    return selling()

async def main():
    async with everstep.open(folder + "/runs.db") as app:
        run = await app.start(flow, id="r")
        try:
            print(await run.result(timeout=60))
        except everstep.errors.RunHeld as held:
            print("held", held.reason)

asyncio.run(main())
"""


@pytest.mark.parametrize("failing", ["shop.db", "shop.db-journal", "shop.db-wal"])
def test_a_disk_that_fails_while_it_syncs_puts_the_run_on_hold(tmp_path: Path, failing: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    shop = Shop(tmp_path / "shop.db")
    if failing == "shop.db-wal":
        with shop.open() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    program = tmp_path / "program.py"
    program.write_text(FAILING)
    calls = "fsync,fdatasync"
    trace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(tmp_path / "trace"),
        "-P",
        str(tmp_path / failing),
        "-e",
        f"trace={calls}",
    ]
    traced = [*trace, "-e", f"inject={calls}:error=EIO", sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(traced, capture_output=True, text=True, timeout=60)
    if "ptrace" in done.stderr.lower():
        pytest.skip("strace may not trace here")
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert (done.returncode, done.stdout.strip()) == (0, "held in-doubt"), done.stderr
    assert (tmp_path / "body").read_text() == "x", "it is not done again by itself"
    assert len(shop.sales()) <= 1


# -- a database of another kind ----------------------------------------------------------------------------------------
class Later:
    """A transaction whose methods are coroutines, as those of drivers for asyncio are."""

    def __init__(self, inner: MarkedTransaction) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()

    def lend(self) -> sqlite3.Connection:
        assert asyncio.get_running_loop() is self._loop, "everything is on one loop"
        connection: sqlite3.Connection = self._inner.lend()
        return connection

    async def take_back(self, *, returned: bool) -> str:
        await asyncio.sleep(0)
        return self._inner.take_back(returned=returned)

    async def read_marker(self, key: str) -> Marker | None:
        await asyncio.sleep(0)
        return self._inner.read_marker(key)

    async def write_marker(self, marker: Marker) -> None:
        await asyncio.sleep(0)
        self._inner.write_marker(marker)

    async def marked_runs(self, before: int) -> list[str]:
        return self._inner.marked_runs(before)

    async def forget_markers(self, run: str, before: int) -> int:
        return self._inner.forget_markers(run, before)

    async def commit(self) -> None:
        assert asyncio.get_running_loop() is self._loop
        await asyncio.sleep(0)
        self._inner.commit()

    async def close(self) -> None:
        self._inner.close()

    def interrupt(self) -> None:
        self._inner.interrupt()


class LaterDatabase:
    """A database for asyncio, which nobody has built in."""

    name = "later"
    is_async = True

    def __init__(self, shop: Shop) -> None:
        self._inner = SqliteFile(str(shop.path))

    async def begin(self, store: Any) -> Later:
        await asyncio.sleep(0)
        return Later(self._inner.begin(store))

    def meaning(self, error: BaseException) -> Meaning:
        return self._inner.meaning(error)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_database_for_asyncio_fits_behind_the_same_protocol(machine: Machine, is_async: bool) -> None:
    shop = Shop(machine.folder / "shop.db")
    declared = transaction(LaterDatabase(shop), name="selling", retry=Retry(attempts=2, first=0.0))
    fails = [True]

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        if fails:
            fails.clear()
            raise OSError("not yet")
        return sold

    async def coroutine(connection: sqlite3.Connection, item: str) -> str:
        await asyncio.sleep(0)
        return body(connection, item)

    selling: Any = declared(coroutine) if is_async else declared(body)

    @workflow
    async def flow() -> str:
        return str(await (selling("lamp") if is_async else asyncio.to_thread(selling, "lamp")))

    app = await machine.boot(clock=None)
    assert await app.run(flow, id="r") == "sold lamp"
    assert NOTES == [1, 2]
    assert shop.sales() == ["lamp"]
    assert len(shop.outcomes()) == 1
    assert machine.bodies("r", "step_started")[0].database == "later"
    assert await app.forget_markers(LaterDatabase(shop), older_than=0) == 1


def test_a_database_that_hides_its_coroutines_is_told_so(tmp_path: Path) -> None:
    class Hiding(LaterDatabase):
        is_async = False

        async def begin(self, store: Any) -> Later:
            await asyncio.sleep(0)
            raise AssertionError

    selling = transaction(Hiding(Shop(tmp_path / "shop.db")), name="selling")(sell)

    @workflow
    def flow() -> str:
        try:
            return selling("lamp")
        except everstep.errors.Misuse as refused:
            return str(refused)

    assert "is_async" in everstep.run(flow, url="memory:")


# -- retention ---------------------------------------------------------------------------------------------------------
async def test_markers_of_ended_runs_are_forgotten_when_they_are_old_enough(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    selling = transaction(shop.path, name="selling")(sell)

    @workflow
    async def flow(waits: bool) -> None:
        await asyncio.to_thread(selling, "lamp")
        if waits:
            await everstep.receive("go")

    app = await machine.boot()
    await app.run(flow, False, id="ended")
    run = await app.start(flow, True, id="waiting")
    await machine.rest()
    with shop.open() as connection:
        connection.execute("INSERT INTO everstep_markers VALUES ('k', 'of another store', 'selling', 1, '[1]', 0)")
    assert await app.forget_markers(shop.path) == 0
    await machine.advance(31 * 86400)
    assert await app.forget_markers(shop.path) == 1
    assert {marker["run"] for marker in shop.markers()} == {"waiting", "of another store"}
    await run.signal("go")
    await run.result(timeout=60)
    assert await app.forget_markers(f"sqlite:///{shop.path}", older_than=0) == 1
    assert {marker["run"] for marker in shop.markers()} == {"of another store"}
    assert await app.forget_markers(STORE) == 0


async def test_markers_are_kept_while_somebody_who_was_overtaken_could_wake_up(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    database, stop = Troubled(shop.path), Stop()
    database.before_begin = stop
    flow = selling_flow(database)
    first = await machine.boot(lease=5)
    await first.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    await first.pump.stop()  # it stands still, and its process lives
    second, run = await machine.start(flow, id="r")
    await machine.watch(second, 60)
    assert await run.result(timeout=60) == "sold lamp"
    machine.clock.advance(100)
    assert await second.forget_markers(shop.path, older_than=1) == 0
    stop.opened.set()
    await machine.until(lambda: not first.acting.runs())
    await machine.kill(first)
    second.store.bury_dead(machine.clock.now())
    assert await second.forget_markers(shop.path, older_than=1) == 1
    assert shop.sales() == ["lamp"]


def test_blocking_code_forgets_markers_too(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "shop.db")
    flow = selling_flow(shop.path)
    with everstep.open(str(tmp_path / "runs.db")) as app:
        app.run(flow)
        assert app.forget_markers(shop.path, older_than=0) == 1
