"""`atomic`: what a body writes and its marker are one transaction, whatever the body does and whatever it raises."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

import everstep
from everstep import STORE, Fatal, Live, Retry, step, transaction, workflow
from everstep.errors import DatabaseFailed, Misuse, NotEncodable, RunHeld
from everstep.model.chains import ChainKeys
from everstep.model.digests import step_key
from everstep.model.markers import seal_outcome
from everstep.stores.sqlite import SqliteStore
from tests.effects.shops import Shop, store_rows
from tests.engine.lives import prove_life
from tests.engine.resume_helpers import Machine
from tests.waiting import open_raw, open_sqlite

ANY_LIBRARY = (sqlite3.Error, apsw.Error)
RETRY = Retry(attempts=3, first=5.0, factor=1.0, jitter=0.0)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.db")


def sell(connection: Any, item: str) -> str:
    """The body of most steps here. It fits a file and the store, and makes its table if that is missing."""
    connection.execute("CREATE TABLE IF NOT EXISTS sales (key TEXT, item TEXT)")
    connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
    return f"sold {item}"


# -- declaring ---------------------------------------------------------------------------------------------------------
def test_a_transaction_needs_its_database() -> None:
    def body(connection: Any) -> None: ...

    for wrong in (body, 5, None, Shop):
        with pytest.raises(Misuse, match="database"):
            transaction(wrong)  # type: ignore[call-overload]
    for url in ("mysql://localhost/shop", "sqlite://shop.db", ":memory:", "", "a\0b"):
        with pytest.raises(Misuse):
            transaction(url)
    with pytest.raises(Misuse, match="first parameter"):
        transaction("shop.db")(lambda: None)  # type: ignore[call-overload]


def test_a_plain_step_cannot_be_atomic_and_says_how() -> None:
    with pytest.raises(Misuse, match=r"everstep\.transaction"):
        step(sell, effect="atomic")  # type: ignore[call-overload]


@pytest.mark.parametrize("form", ["path", "text", "url"])
def test_a_database_is_named_by_a_path_or_a_url(shop: Shop, form: str) -> None:
    named: Any = {"path": shop.path, "text": str(shop.path), "url": f"sqlite:///{shop.path}"}[form]
    selling = transaction(named, name="selling")(sell)

    @workflow
    def flow() -> str:
        return selling("lamp")

    assert everstep.run(flow, url="memory:") == "sold lamp"
    assert shop.sales() == ["lamp"]


def test_outside_of_any_run_it_is_the_plain_function(shop: Shop) -> None:
    @transaction(shop.path)
    def selling(connection: sqlite3.Connection, item: str) -> str:
        connection.execute("INSERT INTO sales VALUES ('', ?)", (item,))
        return item

    with shop.open() as connection:
        assert selling(connection, "lamp") == "lamp"
    assert shop.sales() == ["lamp"]
    assert shop.markers() == []


@pytest.mark.parametrize("effect", ["read", "repeat", "once", "atomic"])
def test_an_atomic_step_inside_of_another_step_is_refused(shop: Shop, effect: str) -> None:
    selling = transaction(shop.path, name="selling")(sell)

    def outer(connection: Any = None) -> str:
        return selling("lamp")

    made: Any = transaction(shop.path)(outer) if effect == "atomic" else step(outer, effect=effect)  # type: ignore[call-overload]

    @workflow
    def flow() -> str:
        try:
            return str(made())
        except Misuse as refused:
            return str(refused)

    if effect == "once":  # it does not say whether the effect happened, so a person is asked
        with pytest.raises(RunHeld):
            everstep.run(flow, url="memory:")
    else:
        assert "call it in the workflow" in everstep.run(flow, url="memory:")
    assert shop.sales() == []


def test_a_plain_step_called_by_an_atomic_body_is_the_plain_function(shop: Shop) -> None:
    @step
    def price(item: str) -> int:
        return len(item)

    @transaction(shop.path)
    def selling(connection: sqlite3.Connection, item: str) -> int:
        connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
        return price(item)

    @workflow
    def flow() -> int:
        return selling("lamp")

    assert everstep.run(flow, url="memory:") == 4


class Till:
    def __init__(self, name: str) -> None:
        self.name = name

    def sell(self, connection: sqlite3.Connection, item: str, *, note: str = "", by: Live[object] = None) -> str:
        connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), item))
        return f"{self.name} {item} {note} {by is not None}"


def test_methods_keywords_and_live_parameters_work_as_with_other_steps(shop: Shop) -> None:
    class Kept(Till):
        sell = transaction(shop.path)(Till.sell)

    @workflow
    def flow() -> str:
        return Kept("till").sell("lamp", note="old", by=object())

    assert everstep.run(flow, url="memory:") == "till lamp old True"
    assert shop.sales() == ["lamp"]


# -- one transaction ---------------------------------------------------------------------------------------------------
def flows(database: Any, *, is_async: bool, in_def: bool) -> Any:
    """Return a workflow with one atomic step, in each way to write it."""
    if is_async:

        @transaction(database, name="selling")
        async def coroutine(connection: Any, item: str) -> str:
            await asyncio.sleep(0)
            return sell(connection, item)

        @workflow(name="one-atomic-step")
        async def awaiting() -> str:
            return await coroutine("lamp")

        return awaiting
    plain = transaction(database, name="selling")(sell)

    @workflow(name="one-atomic-step")
    def direct() -> str:
        return plain("lamp")

    @workflow(name="one-atomic-step")
    async def threaded() -> str:
        return await asyncio.to_thread(plain, "lamp")

    return direct if in_def else threaded


WAYS = [(False, True), (False, False), (True, False)]


@pytest.mark.parametrize("where", ["file", "store"])
@pytest.mark.parametrize(("is_async", "in_def"), WAYS, ids=["def in def", "def in async", "async in async"])
async def test_what_is_written_and_its_marker_are_committed_together(
    machine: Machine, where: str, is_async: bool, in_def: bool
) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path
    flow = flows(path if where == "file" else STORE, is_async=is_async, in_def=in_def)
    app = await machine.boot()
    assert await app.run(flow, id="r") == "sold lamp"
    assert store_rows(path) == ["lamp"]
    (started,) = machine.bodies("r", "step_started")
    (run_started,) = machine.bodies("r", "run_started")
    assert (started.effect, started.by, bytes(started.whole)) == ("atomic", app.worker, b'[["lamp"]]')
    assert started.database == ("store" if where == "store" else f"sqlite:///{path}")
    (marker,) = markers_in(path)
    key = step_key(run_started.entropy, "selling", started.arguments)
    assert marker[:5] == (key, "r", "selling", 1, seal_outcome(ChainKeys(), key, b'["sold lamp"]'))
    (completed,) = machine.bodies("r", "step_completed")
    assert not completed.adopted
    assert not machine.replay("r").differences


def markers_in(path: Path) -> list[Any]:
    connection = open_raw(path, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return connection.execute("SELECT * FROM everstep_markers").fetchall()
    finally:
        connection.close()


def test_the_store_in_memory_has_room_for_atomic_steps_too() -> None:
    selling = transaction(STORE, name="selling")(sell)

    @transaction(STORE)
    def count(connection: Any) -> int:
        return int(connection.execute("SELECT count(*) FROM sales").fetchall()[0][0])

    @workflow
    def flow() -> int:
        selling("lamp")
        selling("chair")
        return count()

    async def main() -> tuple[int, int]:
        async with everstep.open("memory:") as app:
            first = await app.run(flow)
        async with everstep.open("memory:") as app:
            return first, await app.run(flow)

    assert asyncio.run(main()) == (2, 2), "each store has a database of its own"


@pytest.mark.parametrize("where", ["file", "store"])
async def test_what_raises_is_rolled_back_and_goes_by_the_retry_policy(machine: Machine, where: str) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path
    attempts: list[int] = []

    @transaction(path if where == "file" else STORE, retry=RETRY)
    def selling(connection: Any, item: str) -> str:
        attempts.append(everstep.current().attempt)
        sold = sell(connection, f"{item} {len(attempts)}")
        if len(attempts) < 3:
            raise ConnectionError("not yet")
        return sold

    @workflow
    def flow() -> str:
        return selling("lamp")

    _, run = await machine.start(flow, id="r")
    for count in (1, 2):
        await machine.rest()
        assert attempts == list(range(1, count + 1))
        assert store_rows(path) == [], "nothing is left of what raised"
        await machine.advance(5.1)
    assert await run.result(timeout=60) == "sold lamp 3"
    assert store_rows(path) == ["lamp 3"]
    assert len(markers_in(path)) == 1
    assert machine.kinds("r").count("attempt_failed") == 2
    assert "step_doubted" not in machine.kinds("r")
    assert not machine.replay("r").differences


def test_errors_come_back_as_themselves_and_a_fallback_takes_the_place_of_the_outcome(shop: Shop) -> None:
    class SoldOut(Exception):
        pass

    def failing(connection: sqlite3.Connection, item: str) -> str:
        sell(connection, item)
        raise SoldOut(item)

    raising = transaction(shop.path, name="raising", raises=(SoldOut,))(failing)
    fatal = transaction(shop.path, retry=Retry(attempts=3, never=(SoldOut,)), fallback=lambda item: f"no {item}")
    falling = fatal(failing)

    @workflow
    def flow() -> list[str]:
        try:
            raising("lamp")
        except SoldOut as error:
            return [str(error), falling("chair")]
        return []

    assert everstep.run(flow, url="memory:") == ["lamp", "no chair"]
    assert shop.sales() == []
    assert shop.markers() == []


async def test_exhausted_attempts_may_ask_a_person_who_gives_fresh_ones(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")
    broken = [True]

    @transaction(shop.path, retry=Retry(attempts=1, then="hold"))
    def selling(connection: sqlite3.Connection) -> str:
        sold = sell(connection, "lamp")
        if broken:
            raise OSError("no")
        return sold

    @workflow
    def flow() -> str:
        return selling()

    app, run = await machine.start(flow, id="r")
    with pytest.raises(RunHeld):
        await run.result(timeout=60)
    assert machine.hold("r").reason == "exhausted"
    broken.clear()
    await app.resolve("r", "retry")
    assert await run.result(timeout=60) == "sold lamp"
    assert shop.sales() == ["lamp"]


async def test_an_outcome_that_cannot_be_stored_is_noticed_before_the_commit(machine: Machine) -> None:
    shop = Shop(machine.folder / "shop.db")

    @transaction(shop.path, retry=RETRY)
    def selling(connection: sqlite3.Connection) -> Any:
        sell(connection, "lamp")
        return threading.Lock()

    @workflow
    def flow() -> str:
        try:
            selling()
        except NotEncodable as refused:
            return str(refused)
        return ""

    app = await machine.boot()
    assert "selling" in await app.run(flow, id="r")
    assert shop.sales() == []
    assert shop.markers() == []
    assert machine.kinds("r", "step_", "attempt_") == ["step_started", "step_failed"], "another attempt is useless"


def test_a_large_outcome_is_in_the_marker_too(shop: Shop, tmp_path: Path) -> None:
    @transaction(shop.path)
    def selling(connection: sqlite3.Connection) -> str:
        sell(connection, "lamp")
        return "x" * 100_000

    @workflow
    def flow() -> int:
        return len(selling())

    assert everstep.run(flow, url=str(tmp_path / "runs.db")) == 100_000
    assert len(shop.outcomes()[0]) > 100_000


def test_each_call_and_each_run_has_a_marker_of_its_own(shop: Shop, tmp_path: Path) -> None:
    selling = transaction(shop.path, name="selling")(sell)

    @workflow
    def flow() -> None:
        for _ in range(3):
            selling("lamp")

    async def main() -> None:
        async with everstep.open(str(tmp_path / "runs.db")) as app:
            await app.run(flow, id="a")
            await app.run(flow, id="b")
            await app.run(flow, id="a", on_existing="restart")

    asyncio.run(main())
    assert len(shop.sales()) == len({marker["key"] for marker in shop.markers()}) == 9


# -- a body that would break it ----------------------------------------------------------------------------------------
def swallowed(connection: Any) -> None:
    try:
        connection.execute("COMMIT")
    except ANY_LIBRARY:
        pass


def rolled_back_by_a_constraint(connection: Any) -> None:
    """SQLite itself ends the transaction. What follows would be committed statement by statement."""
    connection.execute("CREATE TABLE once (a UNIQUE)")
    connection.execute("INSERT INTO once VALUES (1)")
    for _ in range(2):
        try:
            connection.execute("INSERT OR ROLLBACK INTO once VALUES (1)")
        except ANY_LIBRARY:
            pass
    connection.execute("CREATE TABLE IF NOT EXISTS sales (key TEXT, item TEXT)")
    connection.execute("INSERT INTO sales VALUES ('', 'half')")


def rolled_back_and_silent(connection: Any) -> None:
    connection.execute("CREATE TABLE once (a UNIQUE)")
    try:
        connection.execute("INSERT OR ROLLBACK INTO once VALUES (1), (1)")
    except ANY_LIBRARY:
        pass


def entered_twice(connection: Any) -> None:
    with connection:
        sell(connection, "chair")


BREAKING: dict[str, Any] = {
    "COMMIT": lambda connection: connection.execute("COMMIT"),
    "END": lambda connection: connection.execute("end transaction"),
    "ROLLBACK": lambda connection: connection.execute("ROLLBACK"),
    "BEGIN": lambda connection: connection.execute("BEGIN"),
    "commit and begin": lambda connection: [connection.execute(text) for text in ("COMMIT", "BEGIN IMMEDIATE")],
    "a swallowed commit": swallowed,
    "an error that rolled back": rolled_back_by_a_constraint,
    "an error that rolled back, swallowed": rolled_back_and_silent,
    "close": lambda connection: connection.close(),
    "attach": lambda connection: connection.execute("ATTACH ':memory:' AS other"),
    "a marker": lambda connection: connection.execute("DELETE FROM everstep_markers"),
    "a marker in other letters": lambda connection: connection.execute("DELETE FROM Everstep_MARKERS"),
    "the table of markers": lambda connection: connection.execute("DROP TABLE everstep_markers"),
    "another table of markers": lambda connection: connection.execute("CREATE TEMP TABLE everstep_markers (key)"),
    "a trigger on the markers": lambda connection: connection.execute(
        "CREATE TEMP TRIGGER t AFTER INSERT ON main.everstep_markers BEGIN DELETE FROM sales; END"
    ),
}
ONLY_STDLIB: dict[str, Any] = {
    "connection.commit()": lambda connection: connection.commit(),
    "connection.rollback()": lambda connection: connection.rollback(),
    "with connection": entered_twice,
    "executescript": lambda connection: connection.executescript("DELETE FROM sales"),
    "isolation_level": lambda connection: setattr(connection, "isolation_level", None),
}


@pytest.mark.parametrize(
    ("where", "how"),
    [*(("file", how) for how in (*BREAKING, *ONLY_STDLIB)), *(("store", how) for how in BREAKING)],
)
async def test_a_body_that_would_end_the_transaction_is_refused_and_nothing_is_half_done(
    machine: Machine, where: str, how: str
) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path
    calls: list[int] = []

    @transaction(path if where == "file" else STORE, retry=RETRY)
    def breaking(connection: Any) -> str:
        calls.append(1)
        sold = sell(connection, "lamp")
        (BREAKING | ONLY_STDLIB)[how](connection)
        return sold

    @workflow
    def flow() -> str:
        try:
            return breaking()
        except Misuse as refused:
            return f"refused: {refused}"

    app = await machine.boot()
    told = await app.run(flow, id="r")
    assert told.startswith("refused: ")
    assert "Everything was rolled back." in told
    assert store_rows(path) == store_rows(path, "once") == []
    assert markers_in(path) == [] if where == "store" or Path(path).stat().st_size else True
    assert calls == [1], "another attempt is useless"


@pytest.mark.parametrize("where", ["file", "store"])
async def test_a_statement_that_is_prepared_already_writes_nothing_when_the_transaction_is_gone(
    machine: Machine, where: str
) -> None:
    """The same text a second time need not be prepared again, so nobody would be asked about it again."""
    path = machine.folder / "shop.db" if where == "file" else machine.path
    insert = "INSERT INTO sales VALUES (?)"

    @transaction(path if where == "file" else STORE)
    def making(connection: Any) -> None:
        connection.execute("CREATE TABLE sales (item UNIQUE)")

    @transaction(path if where == "file" else STORE)
    def breaking(connection: Any) -> str:
        connection.execute(insert, ("lamp",))
        for text, item in (("INSERT OR ROLLBACK INTO sales VALUES (?)", "lamp"), (insert, "chair"), (insert, "desk")):
            try:
                connection.execute(text, (item,))
            except ANY_LIBRARY:
                pass
        return "done"

    @workflow
    def flow() -> str:
        making()
        try:
            return breaking()
        except Misuse as refused:
            return f"refused: {refused}"

    app = await machine.boot()
    assert "let that error pass" in await app.run(flow, id="r")
    assert store_rows(path) == []


@pytest.mark.parametrize("where", ["file", "store"])
async def test_savepoints_temporary_tables_and_triggers_of_its_own_are_a_body_s_own_affair(
    machine: Machine, where: str
) -> None:
    path = machine.folder / "shop.db" if where == "file" else machine.path

    @transaction(path if where == "file" else STORE)
    def selling(connection: Any) -> int:
        connection.execute("CREATE TABLE sales (number INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT)")
        connection.execute("CREATE TABLE log (item TEXT)")
        connection.execute("CREATE TRIGGER t AFTER INSERT ON sales BEGIN INSERT INTO log VALUES (new.item); END")
        connection.execute("CREATE TEMP TABLE kept (item)")
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO sales (item) VALUES ('chair')")
        connection.execute("ROLLBACK TO a")
        connection.execute("RELEASE a")
        connection.execute("INSERT INTO sales (item) VALUES ('lamp')")
        return int(connection.execute("SELECT count(*) FROM log").fetchall()[0][0])

    @workflow
    def flow() -> int:
        return selling()

    app = await machine.boot()
    assert await app.run(flow, id="r") == 1
    assert store_rows(path) == store_rows(path, "log") == ["lamp"]


STORE_WRITES = [
    "UPDATE runs SET status = 'completed'",
    "DELETE FROM main.events",
    "INSERT INTO meta VALUES ('a', 'b')",
    "DELETE FROM SIGNALS",
    "UPDATE sqlite_sequence SET seq = 0",
    "DROP TABLE holds",
    "ALTER TABLE runs ADD COLUMN mine",
    "CREATE INDEX mine ON runs (queue)",
    "CREATE TRIGGER mine AFTER INSERT ON events BEGIN SELECT 1; END",
    "CREATE TEMP TRIGGER mine AFTER INSERT ON main.events BEGIN SELECT 1; END",
    "DROP INDEX runs_free",
    "CREATE TABLE schedules (a)",
    "CREATE VIEW streams AS SELECT 1",
    "PRAGMA application_id = 5",
    "PRAGMA user_version = 5",
    "PRAGMA writable_schema = 1",
]


@pytest.mark.parametrize("statement", STORE_WRITES)
async def test_the_store_s_own_tables_are_protected(machine: Machine, statement: str) -> None:
    @transaction(STORE)
    def breaking(connection: Any) -> None:
        sell(connection, "lamp")
        connection.execute(statement)

    @workflow
    def flow() -> str:
        try:
            breaking()
        except Misuse as refused:
            return f"refused: {refused}"
        return "done"

    app = await machine.boot()
    assert (await app.run(flow, id="r")).startswith("refused: ")
    assert store_rows(machine.path) == []
    assert not machine.replay("r").differences


async def test_the_store_s_own_tables_may_be_read(machine: Machine) -> None:
    @transaction(STORE)
    def reading(connection: Any) -> list[Any]:
        columns = connection.execute("PRAGMA table_info(runs)").fetchall()
        return [connection.execute("SELECT id FROM runs").fetchall()[0][0], len(columns) > 5]

    @workflow
    def flow() -> list[Any]:
        return reading()

    app = await machine.boot()
    assert await app.run(flow, id="r") == ["r", True]


@pytest.mark.parametrize("which", ["this store", "a link to it", "another store"])
async def test_a_store_is_not_opened_by_a_second_library(
    machine: Machine, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a file frees all locks on it that the process has, so the store's own would be gone."""
    opened: list[str] = []
    really = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **more: opened.append(path) or really(path, **more))
    app = await machine.boot()
    link, elsewhere = machine.folder / "link.db", machine.folder / "elsewhere.db"
    link.symlink_to(machine.path)
    SqliteStore(elsewhere).close()
    path = {"this store": machine.path, "a link to it": link, "another store": elsewhere}[which]
    selling = transaction(path, name="selling")(sell)

    @workflow
    def flow() -> str:
        try:
            return selling("lamp")
        except Misuse as refused:
            return str(refused)

    assert "everstep.STORE" in await app.run(flow)
    assert store_rows(path) == []
    assert len(opened) == (which == "another store"), "one that is open here is not even looked at"


async def test_a_database_that_cannot_be_opened_is_a_failed_attempt_that_says_so(machine: Machine) -> None:
    folder = machine.folder / "folder.db"
    folder.mkdir()
    selling = transaction(folder, name="selling", retry=Retry(attempts=2, first=1.0, jitter=0.0))(sell)

    @workflow
    def flow() -> str:
        try:
            return selling("lamp")
        except DatabaseFailed as failed:
            return str(failed)

    _, run = await machine.start(flow, id="r")
    await machine.rest()
    await machine.advance(1.1)
    assert "folder.db" in await run.result(timeout=60)
    assert machine.kinds("r", "attempt_", "step_f") == ["attempt_failed", "step_failed"]


def test_foreign_keys_are_checked_if_the_url_says_so(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with open_sqlite(path) as connection:
        connection.execute("CREATE TABLE items (name TEXT PRIMARY KEY)")
        connection.execute("CREATE TABLE sales (item TEXT REFERENCES items)")
    connection.close()

    def selling(connection: sqlite3.Connection) -> str:
        connection.execute("INSERT INTO sales VALUES ('a ghost')")
        return "sold"

    def setting(connection: sqlite3.Connection) -> str:
        connection.execute("PRAGMA foreign_keys = ON")
        return "set"

    steps = [
        transaction(f"sqlite:///{path}?foreign_keys=on", name="checked")(selling),
        transaction(f"sqlite:///{path}", name="silent")(setting),
        transaction(path, name="unchecked")(selling),
    ]

    @workflow
    def flow() -> list[str]:
        told = []
        for one in steps:
            try:
                told.append(one())
            except (sqlite3.IntegrityError, Misuse) as error:
                told.append(str(error))
        return told

    checked, silent, unchecked = everstep.run(flow, url="memory:")
    assert "FOREIGN KEY" in checked
    assert "foreign_keys=on" in silent
    assert unchecked == "sold"
    with pytest.raises(Misuse, match="foreign_keys"):
        transaction("sqlite:///shop.db?mode=ro")


# -- replay ------------------------------------------------------------------------------------------------------------
def test_every_prefix_of_a_history_with_atomic_steps_leads_to_the_same_end(shop: Shop) -> None:
    failures = {"c"}

    def body(connection: sqlite3.Connection, name: str) -> str:
        connection.execute("INSERT INTO sales VALUES (?, ?)", (everstep.key(), name))
        if name in failures:
            failures.discard(name)
            raise Fatal("no") if name == "x" else OSError("not this time")
        return name.upper()

    selling = transaction(shop.path, retry=Retry(attempts=2, first=1.0))(body)

    @transaction(shop.path)
    async def slowly(connection: sqlite3.Connection, name: str) -> str:
        return body(connection, name)

    @workflow
    async def flow() -> list[str]:
        told = [await asyncio.to_thread(selling, "a")]
        told += await asyncio.gather(slowly("b"), asyncio.to_thread(selling, "c"))
        try:
            async with asyncio.timeout(1):
                await everstep.receive("never")
        except TimeoutError:
            told.append(await slowly("d"))
        return told

    life = prove_life(flow)
    assert life.value == ["A", "B", "C", "D"]
    with shop.open() as connection:
        counted = connection.execute("SELECT item, count(*) FROM sales GROUP BY key").fetchall()
    assert sorted(counted) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)], "in all lives together"
