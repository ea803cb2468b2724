"""`atomic` after crashes, take-overs, timeouts and cancels: one commit, and nobody is told before it is settled."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import everstep
from everstep import Fatal, Retry, transaction, workflow
from everstep.effects import atomic
from everstep.effects.databases import STORE, SqliteFile
from everstep.errors import RunCancelled, RunFailed, RunHeld, StepTimedOut
from everstep.view.timeline import timeline_of
from tests.effects.shops import Shop, Stop, Troubled, store_rows
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw, open_sqlite
from tests.worlds.ledger import NOTES


def sell(connection: Any, item: str) -> str:
    NOTES.append(f"{everstep.current().attempt} {item}")
    connection.execute("CREATE TABLE IF NOT EXISTS sales (key TEXT, item TEXT)")
    connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
    return f"sold {item}"


def selling_flow(database: Any, body: Callable[..., str] = sell, **options: Any) -> Any:
    selling = transaction(database, name="selling", **options)(body)

    @workflow(name="recovering-sale")
    async def flow() -> str:
        return await asyncio.to_thread(selling, "lamp")

    return flow


def adopted(machine: Machine) -> list[bool]:
    return [body.adopted for body in machine.bodies("r", "step_completed")]


class Late(SqliteFile):
    """A database whose first transaction is committed, and then its thread waits: nobody knows the outcome yet."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(str(shop.path))
        self.stop = Stop()

    def begin(self, store: Any) -> Any:
        transaction = super().begin(store)
        close = transaction.close

        def late() -> None:
            close()
            self.stop()

        transaction.close = late  # type: ignore[method-assign]
        return transaction


# -- after a crash -----------------------------------------------------------------------------------------------------
async def test_cut_off_after_its_commit_the_marker_s_outcome_is_adopted(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Late(shop)
    flow = selling_flow(database)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(database.stop.reached.wait, 20)
    assert shop.sales() == ["lamp"]
    await machine.kill(app)
    again = await machine.boot()
    assert await (await again.start(flow, id="r")).result(timeout=60) == "sold lamp"
    database.stop.opened.set()
    assert NOTES == ["1 lamp"], "the body does not run a second time"
    assert shop.sales() == ["lamp"]
    assert adopted(machine) == [True]
    assert [body.because for body in machine.bodies("r", "step_started")] == ["", "crash"]
    assert timeline_of(machine.store, "r", 1).steps[0].note == "adopted from its marker"
    assert "step_doubted" not in machine.kinds("r")
    assert not machine.replay("r").differences


async def test_an_attempt_that_still_runs_elsewhere_is_waited_for_and_adopted(machine: Machine) -> None:
    """The first process lost its run in the middle of the body, and goes on: its transaction is open."""
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        stop()
        return sold

    flow = selling_flow(shop.path, body)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    await machine.kill(app)
    _, run = await machine.start(flow, id="r")
    await machine.until(lambda: len(machine.bodies("r", "step_started")) == 2)
    await asyncio.sleep(0.05)
    assert machine.status("r") == "running"
    stop.opened.set()
    assert await run.result(timeout=60) == "sold lamp"
    assert NOTES == ["1 lamp"]
    assert shop.sales() == ["lamp"]
    assert adopted(machine) == [True]


async def test_a_late_attempt_finds_that_another_one_has_committed(machine: Machine) -> None:
    """The first process is stopped just before its transaction, another one does the step, then the first wakes."""
    shop = Shop(machine.folder / "shop.db")
    database, stop = Troubled(shop.path), Stop()
    database.before_begin = stop
    flow = selling_flow(database)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    acting = app.acting
    await machine.kill(app)
    again = await machine.boot()
    assert await (await again.start(flow, id="r")).result(timeout=60) == "sold lamp"
    assert NOTES == ["2 lamp"]
    assert adopted(machine) == [False]
    stop.opened.set()
    await machine.until(lambda: not acting.runs())
    assert NOTES == ["2 lamp"], "its body does not run"
    assert shop.sales() == ["lamp"]


@pytest.mark.parametrize("retried", [False, True])
async def test_a_late_attempt_cannot_do_what_the_history_says_has_failed(machine: Machine, retried: bool) -> None:
    """As before, but the other process's attempt fails for good: nobody may do the step any more, until a retry."""
    shop = Shop(machine.folder / "shop.db")
    database, stop = Troubled(shop.path), Stop()
    database.before_begin = stop

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        if everstep.current().attempt == 2:
            raise Fatal("sold out")
        return sold

    flow = selling_flow(database, body)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    acting = app.acting
    await machine.kill(app)
    again = await machine.boot()
    with pytest.raises(Fatal):
        await (await again.start(flow, id="r")).result(timeout=60)
    assert [(marker["attempt"], marker["outcome"]) for marker in shop.markers()] == [(2, None)]
    stop.opened.set()
    await machine.until(lambda: not acting.runs())
    assert NOTES == ["2 lamp"]
    assert shop.sales() == [], "a failed step has not happened"
    if retried:
        run = await again.retry("r")
        assert await run.result(timeout=60) == "sold lamp"
        assert shop.sales() == ["lamp"]
        assert [marker["attempt"] for marker in shop.markers()] == [3]
    assert not machine.replay("r").differences


async def test_an_ordinary_failure_leaves_nothing_behind(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")

    def body(connection: sqlite3.Connection, item: str) -> str:
        sell(connection, item)
        raise Fatal("sold out")

    app = await machine.boot()
    with pytest.raises(Fatal):
        await app.run(selling_flow(shop.path, body), id="r")
    assert shop.markers() == [], "nobody was cut off, so nobody has to be ruled out"


async def test_a_retried_run_does_a_failed_step_again_with_the_same_key(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    keys: list[str] = []

    def body(connection: sqlite3.Connection, item: str) -> str:
        keys.append(everstep.key())
        if len(keys) == 1:
            raise Fatal("not yet")
        return sell(connection, item)

    app = await machine.boot()
    flow = selling_flow(shop.path, body)
    with pytest.raises(Fatal):
        await app.run(flow, id="r")
    run = await app.retry("r")
    assert await run.result(timeout=60) == "sold lamp"
    assert len(set(keys)) == 1
    assert shop.sales() == ["lamp"]


async def test_another_database_than_the_one_it_was_begun_in_is_a_question_for_a_person(machine: Machine) -> None:
    """A changed path would find no marker, and do the step a second time."""
    old, new = Shop(machine.folder / "old.db"), Shop(machine.folder / "new.db")
    database = Late(old)
    app, _ = await machine.start(selling_flow(database), id="r")
    await asyncio.to_thread(database.stop.reached.wait, 20)
    await machine.kill(app)
    database.stop.opened.set()
    flow = selling_flow(new.path)
    for _ in range(2):
        app = await machine.boot()
        with pytest.raises(RunHeld):
            await (await app.start(flow, id="r")).result(timeout=60)
        hold = machine.hold("r")
        assert (hold.reason, hold.resolutions) == ("in-doubt", ["done", "not-done", "probe", "cancel"])
        assert "old.db" in hold.summary
        assert "new.db" in hold.summary
        assert new.sales() == []
        await machine.stop(app)
    app = await machine.boot()
    await app.resolve("r", "done", value="sold lamp", by="ann")
    assert await app.get("r").result(timeout=60) == "sold lamp"
    assert new.sales() == []


async def test_changed_arguments_of_a_begun_step_cannot_be_accepted(machine: Machine) -> None:
    """They are part of its key: the marker of what was begun would not be found."""
    shop = Shop(machine.folder / "shop.db")
    database = Late(shop)
    items = ["lamp"]
    selling = transaction(database, name="selling")(sell)

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(selling, items[0])

    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(database.stop.reached.wait, 20)
    await machine.kill(app)
    database.stop.opened.set()
    items[0] = "chair"
    app = await machine.boot()
    with pytest.raises(RunHeld):
        await (await app.start(flow, id="r")).result(timeout=60)
    assert machine.hold("r").reason == "diverged"
    assert "accept" not in machine.hold("r").resolutions
    items[0] = "lamp"
    assert await (await app.start(flow, id="r")).result(timeout=60) == "sold lamp"
    assert shop.sales() == ["lamp"]


# -- timeouts ----------------------------------------------------------------------------------------------------------
async def test_an_attempt_past_its_timeout_cannot_commit_any_more(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        stop()
        return sold

    app, run = await machine.start(selling_flow(shop.path, body, timeout=0.05), id="r")
    with pytest.raises(StepTimedOut):
        await run.result(timeout=60)
    assert app.acting.runs() == {"r"}, "its thread still runs"
    stop.opened.set()
    await machine.until(lambda: not app.acting.runs())
    assert shop.sales() == []
    assert shop.markers() == []


async def test_after_a_timeout_the_next_attempt_waits_for_the_thread_of_the_last(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        stop()
        return sold

    app = await machine.boot(clock=None)
    flow = selling_flow(shop.path, body, timeout=0.3, retry=Retry(attempts=2, first=0.0, jitter=0.0))
    run = await app.start(flow, id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    stop.opened.set()
    assert await run.result(timeout=60) == "sold lamp"
    assert NOTES == ["1 lamp", "2 lamp"]
    assert shop.sales() == ["lamp"]


async def test_a_statement_that_runs_too_long_is_interrupted(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")

    def body(connection: sqlite3.Connection, item: str) -> str:
        sell(connection, item)
        endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
        connection.execute(endless).fetchall()
        return "never"

    app, run = await machine.start(selling_flow(shop.path, body, timeout=0.1), id="r")
    with pytest.raises(StepTimedOut):
        await run.result(timeout=60)
    await machine.until(lambda: not app.acting.runs(), seconds=5)
    assert shop.sales() == []


async def test_an_async_body_past_its_timeout_is_cancelled(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")

    @transaction(shop.path, timeout=0.1)
    async def selling(connection: sqlite3.Connection) -> None:
        sell(connection, "lamp")
        try:
            await asyncio.sleep(60)
        finally:
            NOTES.append("cleaned up")

    @workflow
    async def flow() -> str:
        try:
            await selling()
        except StepTimedOut:
            return "too late"
        return "in time"

    app = await machine.boot()
    assert await app.run(flow, id="r") == "too late"
    await machine.until(lambda: not app.acting.runs(), seconds=5)
    assert NOTES == ["1 lamp", "cleaned up"]
    assert shop.sales() == []


async def test_a_commit_that_is_under_way_when_its_time_is_over_counts(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    database = Troubled(shop.path)

    def slowly(commit: Callable[[], None]) -> None:
        time.sleep(0.3)
        commit()

    database.instead_of_commit = slowly
    app = await machine.boot()
    assert await app.run(selling_flow(database, timeout=0.1), id="r") == "sold lamp"
    assert shop.sales() == ["lamp"]


@pytest.mark.parametrize("has_happened", [False, True])
async def test_a_timeout_after_a_crash_is_told_when_the_earlier_attempt_is_settled(
    machine: Machine, has_happened: bool
) -> None:
    """The second attempt cannot even begin in its time, and nobody knows about the first before the lock is free."""
    shop = Shop(machine.folder / "shop.db")
    database: Any = Late(shop) if has_happened else Troubled(shop.path)
    stop = database.stop if has_happened else Stop()
    if not has_happened:
        database.before_begin = stop
    flow = selling_flow(database, timeout=0.2)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    acting = app.acting
    await machine.kill(app)
    blocking = open_sqlite(shop.path, isolation_level=None)
    blocking.execute("BEGIN IMMEDIATE")
    _, run = await machine.start(flow, id="r")
    await asyncio.sleep(0.5)
    assert machine.status("r") == "running", "its time is over, and the code is not told yet"
    blocking.execute("ROLLBACK")
    blocking.close()
    if has_happened:
        assert await run.result(timeout=60) == "sold lamp"
        assert adopted(machine) == [True]
    else:
        with pytest.raises(StepTimedOut):
            await run.result(timeout=60)
    stop.opened.set()
    await machine.until(lambda: not acting.runs())
    assert len(shop.sales()) == has_happened


# -- cancels -----------------------------------------------------------------------------------------------------------
def by_timeout(pay: Any) -> Any:
    @workflow(name="recovering-sale")
    async def flow() -> str:
        try:
            async with asyncio.timeout(5):
                await asyncio.to_thread(pay, "lamp")
        except TimeoutError:
            return "too late"
        return "in time"

    return flow


def by_cancel(pay: Any) -> Any:
    @workflow(name="recovering-sale")
    async def flow() -> str:
        task = asyncio.create_task(asyncio.to_thread(pay, "lamp"))
        await asyncio.sleep(5)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "too late"
        return "in time"

    return flow


CUT_OFF = ["no", "before its transaction", "after its commit"]


@pytest.mark.parametrize("made", [by_timeout, by_cancel])
@pytest.mark.parametrize("cut_off", CUT_OFF)
async def test_a_cancel_reaches_the_code_only_after_the_step_is_settled(
    machine: Machine, made: Callable[[Any], Any], cut_off: str
) -> None:
    shop = Shop(machine.folder / "shop.db")
    database: Any = Late(shop) if cut_off == "after its commit" else Troubled(shop.path)
    stop = database.stop if cut_off == "after its commit" else Stop()
    if cut_off == "before its transaction":
        database.before_begin = stop

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        if cut_off == "no":
            stop()
        return sold

    flow = made(transaction(database, name="selling")(body))
    app, run = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    machine.clock.advance(6)
    await machine.until(lambda: "timer_fired" in machine.kinds("r"))
    await asyncio.sleep(0.05)
    assert machine.status("r") == "running", "the code is not told yet"
    assert "step_cancelled" not in machine.kinds("r")
    if cut_off == "no":
        stop.opened.set()
    else:
        acting = app.acting
        await machine.kill(app)
        app, run = await machine.start(flow, id="r")
    assert await run.result(timeout=60) == "too late"
    if cut_off != "no":
        stop.opened.set()
        await machine.until(lambda: not acting.runs())
    happened = cut_off != "before its transaction"
    assert len(shop.sales()) == happened, "what was not done is not done later, by nobody"
    assert ["1 lamp"] * happened == NOTES, "and nothing is begun again for a code that was cancelled"
    assert (machine.kinds("r").count("step_completed"), machine.kinds("r").count("step_failed")) == (
        happened,
        not happened,
    )
    assert not machine.replay("r").differences


@pytest.mark.parametrize("cut_off", CUT_OFF)
async def test_a_run_that_is_ended_without_its_code_waits_until_the_step_is_settled(
    machine: Machine, cut_off: str
) -> None:
    shop = Shop(machine.folder / "shop.db")
    database: Any = Late(shop) if cut_off == "after its commit" else Troubled(shop.path)
    stop = database.stop if cut_off == "after its commit" else Stop()
    if cut_off == "before its transaction":
        database.before_begin = stop

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        if cut_off == "no":
            stop()
        return sold

    flow = selling_flow(database, body)
    app, run = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    await run.cancel(now=True)
    await machine.until(lambda: "cancel_requested" in machine.kinds("r"))
    assert machine.status("r") == "running"
    if cut_off == "no":
        stop.opened.set()
    else:
        acting = app.acting
        await machine.kill(app)
        app, run = await machine.start(flow, id="r")
    with pytest.raises(RunCancelled):
        await run.result(timeout=60)
    if cut_off != "no":
        stop.opened.set()
        await machine.until(lambda: not acting.runs())
    assert len(shop.sales()) == (cut_off != "before its transaction")
    assert ["1 lamp"] * (cut_off != "before its transaction") == NOTES


async def test_a_cancel_during_the_back_off_settles_the_step_as_not_done(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")

    def body(connection: sqlite3.Connection, item: str) -> str:
        sell(connection, item)
        raise OSError("not yet")

    selling = transaction(shop.path, retry=Retry(attempts=3, first=10.0, jitter=0.0))(body)
    _, run = await machine.start(by_timeout(selling), id="r")
    await machine.until(lambda: "attempt_failed" in machine.kinds("r"))
    await machine.advance(6)
    await machine.advance(6)
    assert await run.result(timeout=60) == "too late"
    assert NOTES == ["1 lamp"]
    assert shop.sales() == []


async def test_closing_waits_for_an_atomic_body_that_runs(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()

    def body(connection: sqlite3.Connection, item: str) -> str:
        stop()
        return sell(connection, item)

    flow = selling_flow(shop.path, body)
    app, _ = await machine.start(flow, id="r")
    await asyncio.to_thread(stop.reached.wait, 20)
    closing = asyncio.ensure_future(machine.stop(app))
    await machine.until(lambda: app.draining)
    assert not closing.done()
    stop.opened.set()
    await closing
    assert shop.sales() == ["lamp"]
    assert "step_completed" in machine.kinds("r")


# -- several at once ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["file", "store"])
async def test_many_attempts_at_once_are_one_commit(machine: Machine, where: str) -> None:
    """What epochs and attempt numbers prevent, the marker alone would survive as well."""
    path = machine.folder / "shop.db" if where == "file" else machine.path
    app = await machine.boot()
    works: list[atomic.Work] = []
    selling = transaction(path if where == "file" else STORE, name="selling")(sell)
    work_of = selling.work  # type: ignore[attr-defined]

    def kept(*args: Any, **more: Any) -> atomic.Work:
        works.append(work_of(*args, **more))
        return works[-1]

    selling.work = kept  # type: ignore[attr-defined]

    @workflow
    async def flow() -> str:
        return await asyncio.to_thread(selling, "lamp")

    await app.run(flow, id="r")
    with contextlib.closing(open_raw(path)) as connection:
        connection.execute("DELETE FROM sales; DELETE FROM everstep_markers")
    (work,) = works

    def body(connection: Any) -> str:
        connection.execute("INSERT INTO sales VALUES ('', 'lamp')")
        time.sleep(0.001)
        return "sold"

    def attempt(number: int) -> atomic.Settled:
        return atomic.perform(msgspec.structs.replace(work, body=body, attempt=number, permit=atomic.Permit()))

    settled = await asyncio.gather(*(asyncio.to_thread(attempt, number) for number in range(1, 9)))
    assert store_rows(path) == ["lamp"]
    assert [one.payload for one in settled] == [b'["sold"]'] * 8
    assert sum(one.adopted for one in settled) == 7


async def test_many_runs_write_to_one_file_at_once_and_nothing_is_lost(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    flow = selling_flow(shop.path)
    app = await machine.boot(clock=None)
    other = await machine.boot(clock=None)
    runs = [await (app if number % 2 else other).start(flow, id=f"r{number}") for number in range(60)]
    await asyncio.gather(*(run.result(timeout=60) for run in runs))
    assert len(shop.sales()) == len(shop.markers()) == 60
    assert all(len(machine.bodies(f"r{n}", "step_started")) == 1 for n in range(60)), "waiting is no attempt"


async def test_a_failed_run_with_an_atomic_step_beside_the_failure_settles_it_first(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    stop = Stop()

    def body(connection: sqlite3.Connection, item: str) -> str:
        sold = sell(connection, item)
        stop()
        return sold

    selling = transaction(shop.path, name="selling")(body)

    @everstep.step(effect="read")
    def failing() -> None:
        stop.reached.wait(20)
        raise KeyError("now")

    @workflow
    async def flow() -> None:
        await asyncio.gather(asyncio.to_thread(selling, "lamp"), asyncio.to_thread(failing))

    _, run = await machine.start(flow, id="r")
    await machine.until(lambda: "step_failed" in machine.kinds("r"))
    assert machine.status("r") == "running", "an effect must be known before the run may end"
    stop.opened.set()
    with pytest.raises((KeyError, RunFailed)):
        await run.result(timeout=60)
    assert shop.sales() == ["lamp"]
    assert "step_completed" in machine.kinds("r")
