"""`atomic` on PostgreSQL: what a body writes and its marker are one transaction, in whatever way it gets there."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import MetaData, Table, create_engine, text
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.orm import Session, registry, sessionmaker

import everstep
from everstep import STORE, Retry, transaction, workflow
from everstep.effects import atomic
from everstep.effects.databases import database_of
from everstep.effects.postgres_markers import script
from everstep.errors import DatabaseFailed, Misuse, StepError
from everstep.stores.postgres import PostgresStore
from tests.postgres.server import Server
from tests.postgres.shops import Kept, Shop
from tests.postgres.ways import (
    WAYS,
    Way,
    async_engine,
    body_of,
    engine,
    flow_of,
    said,
    sell,
    sell_async,
    selling,
    step_of,
)
from tests.stores.kit import python

OFTEN = Retry(attempts=3, first=0.01, factor=1.0, jitter=0.0)


@pytest.fixture
def shop(server: Server, schema: str) -> Iterator[Shop]:
    made = Shop(server, schema)
    yield made
    made.drop()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


# -- one transaction ---------------------------------------------------------------------------------------------------
def test_what_is_written_and_its_marker_are_committed_together(shop: Shop, way: Way) -> None:
    seen: list[list[str]] = []

    def look(_: Any) -> None:
        seen.append(shop.sales())

    assert shop.run(way, flow_of(way, shop.url(), body_of(way, after=look))) == "sold lamp"
    assert seen == [[]], "nobody sees it before it is committed"
    assert shop.sales() == ["lamp"]
    ((attempt, outcome, guard),) = shop.markers(way)
    assert (attempt, guard) == (1, None)
    assert b'"sold lamp"' in bytes(outcome)
    assert shop.kinds == ["step_started", "step_completed"]


def test_a_body_gets_what_its_library_calls_a_connection(shop: Shop) -> None:
    kinds: dict[str, str] = {}
    for name, way in WAYS.items():

        def note(connection: Any, name: str = name) -> None:
            known = [kind for kind in type(connection).__mro__ if not kind.__module__.startswith("everstep")]
            kinds[name] = f"{known[0].__module__.partition('.')[0]}.{known[0].__name__}"

        shop.run(way, flow_of(way, shop.url(), body_of(way, before=note)), id=name.replace(", ", "-"))
    assert kinds == {
        "psycopg": "psycopg.Connection",
        "psycopg, async": "psycopg.AsyncConnection",
        "store": "psycopg.Connection",
        "store, async": "psycopg.AsyncConnection",
        "engine": "sqlalchemy.Connection",
        "engine, async": "sqlalchemy.AsyncConnection",
        "asyncpg": "sqlalchemy.AsyncConnection",
        "session": "sqlalchemy.Session",
        "session, async": "sqlalchemy.AsyncSession",
    }


def test_what_raises_is_rolled_back_and_goes_by_the_retry_policy(shop: Shop, way: Way) -> None:
    made: list[int] = []

    def check(_: Any) -> None:
        made.append(everstep.current().attempt)
        if len(made) < 3:
            raise ValueError("sold out")

    assert shop.run(way, flow_of(way, shop.url(), body_of(way, after=check), retry=OFTEN)) == "sold lamp"
    assert made == [1, 2, 3]
    assert shop.sales() == ["lamp"]
    assert shop.kinds == ["step_started", "attempt_failed"] * 2 + ["step_started", "step_completed"]


def test_two_attempts_at_once_are_one_commit(shop: Shop, way: Way) -> None:
    """As those of a process that was taken for dead and of another one: one waits for the other, and adopts."""
    step = step_of(way, shop.url(), body_of(way, after=lambda _: time.sleep(0.05)))
    kept = Kept(step)
    shop.run(way, selling(step))
    schema = f"{shop.schema}_store" if way.in_store else shop.schema
    shop.server.ask(f'DELETE FROM "{shop.schema}".sales')
    shop.server.ask(f'DELETE FROM "{schema}".everstep_markers')

    def attempt(number: int) -> atomic.Settled:
        (work,) = kept.works
        mine = {"body": lambda connection: body(connection, "lamp"), "attempt": number, "permit": atomic.Permit()}
        return atomic.perform(msgspec.structs.replace(work, **mine))

    body = way_body(way)
    with ThreadPoolExecutor(4) as pool:
        settled = list(pool.map(attempt, range(1, 5)))
    assert shop.sales() == ["lamp"]
    assert len({one.payload for one in settled}) == 1
    assert sum(one.adopted for one in settled) == 3


def way_body(way: Way) -> Any:
    """A body that needs no run around it, and takes a moment."""

    def plain(connection: Any, item: str) -> str:
        statement = "INSERT INTO sales VALUES ('', 'lamp')"
        connection.execute(text(statement) if way.by_sqlalchemy else statement)
        time.sleep(0.05)
        return "sold"

    async def waiting(connection: Any, item: str) -> str:
        statement = "INSERT INTO sales VALUES ('', 'lamp')"
        await connection.execute(text(statement) if way.by_sqlalchemy else statement)
        await asyncio.sleep(0.05)
        return "sold"

    return waiting if way.is_async else plain


# -- a body cannot end it ----------------------------------------------------------------------------------------------
def swallowed(connection: Any) -> Any:
    try:
        connection.execute("COMMIT")
    except psycopg.Error:
        pass


def went_on(connection: Any) -> None:
    with pytest.raises((psycopg.errors.UndefinedTable, ProgrammingError)):
        said("SELECT 1 FROM nowhere")(connection)


def all_of_it(connection: Any) -> None:
    """End the transaction, and begin and commit another one, and hear nothing."""
    for statement in ("COMMIT", "ROLLBACK", "INSERT INTO sales VALUES ('', 'chair')", "COMMIT"):
        with contextlib.suppress(Misuse, psycopg.Error):
            said(statement)(connection)


def entered(connection: Any) -> None:
    with connection:
        connection.execute("SELECT 1")


def composed(connection: Any) -> None:
    connection.execute(sql.SQL("{} WORK").format(sql.SQL("COMMIT")))


def unread_commit(connection: Any) -> None:
    """What is said behind everybody's back."""
    psycopg.ClientCursor(connection).execute("COMMIT")


def unread_rollback(connection: Any) -> None:
    psycopg.ClientCursor(connection).execute("ROLLBACK")
    connection.execute("INSERT INTO sales VALUES ('', 'chair')")


def another_transaction(connection: Any) -> None:
    for act in (connection.rollback, lambda: sell(connection, "chair"), connection.commit):
        with contextlib.suppress(psycopg.Error):
            act()


def autocommitted(connection: Any) -> None:
    connection.rollback()
    connection.autocommit = True
    sell(connection, "chair")


EVERYWHERE: dict[str, Any] = {
    "COMMIT": said("COMMIT"),
    "END": said("end transaction"),
    "ROLLBACK": said("ROLLBACK"),
    "with a comment": said("/* a new one */ ROLLBACK"),
    "to a savepoint, and all": said("SAVEPOINT x; ROLLBACK TO x; COMMIT"),
    "an error, swallowed": went_on,
    "all of it, swallowed": all_of_it,
    "two at once": said("SELECT 1; COMMIT; BEGIN"),
    "PREPARE": said("PREPARE TRANSACTION 'x'"),
    "connection.commit()": lambda connection: connection.commit(),
}
ONLY_PSYCOPG: dict[str, Any] = {
    "connection.rollback()": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
    "swallowed": swallowed,
    "with connection": entered,
    "composed": composed,
    "bytes": said(b"COMMIT"),  # type: ignore[arg-type]
    "many": lambda connection: connection.cursor().executemany("COMMIT", [()]),
    "unread commit": unread_commit,
    "unread rollback": unread_rollback,
    "another transaction": another_transaction,
    "autocommit": autocommitted,
    "the driver's own": lambda connection: psycopg.Connection.commit.__get__(connection)(),
}
ONLY_SQLALCHEMY: dict[str, Any] = {
    "connection.rollback()": lambda connection: connection.rollback(),
    "the driver's own": lambda connection: connection.connection.driver_connection.commit(),
    "the driver's own rollback": lambda connection: connection.connection.driver_connection.rollback(),
    "close": lambda connection: connection.close(),
}
FEW = ("COMMIT", "connection.commit()", "two at once")
ALL_WAYS = [(name, how) for name in WAYS for how in (EVERYWHERE if name in ("psycopg", "engine") else FEW)]
ALL_WAYS.remove(("asyncpg", "two at once"))  # asyncpg sends no two statements at once
MORE = [*(("psycopg", how) for how in ONLY_PSYCOPG), *(("engine", how) for how in ONLY_SQLALCHEMY)]


@pytest.mark.parametrize(("name", "how"), [*ALL_WAYS, *MORE])
def test_a_body_that_would_end_the_transaction_is_refused_and_nothing_is_half_done(
    shop: Shop, name: str, how: str
) -> None:
    way = WAYS[name]
    known = EVERYWHERE | (ONLY_SQLALCHEMY if way.by_sqlalchemy else ONLY_PSYCOPG)
    calls: list[int] = []

    def breaks(connection: Any) -> Any:
        calls.append(1)
        return known[how](connection)

    with pytest.raises(Misuse, match="Everything was rolled back") as told:
        shop.run(way, flow_of(way, shop.url(), body_of(way, after=breaks)))
    assert ("the step itself begins and commits" in str(told.value)) == (not how.startswith("an error"))
    assert shop.sales() == []
    assert [marker for marker in shop.markers(way) if marker[1] is not None] == []
    assert calls == [1]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "connection.commit()", "connection.rollback()"])
@pytest.mark.parametrize("name", ["psycopg, async", "engine, async", "asyncpg", "session, async"])
def test_what_a_body_writes_after_it_has_ended_the_transaction_is_not_committed(
    shop: Shop, name: str, end: str
) -> None:
    """asyncpg does not see that a statement has ended a transaction, and would commit the next one by itself."""
    way = WAYS[name]

    async def end_and_go_on(connection: Any) -> None:
        methods = {"connection.commit()": connection.commit, "connection.rollback()": connection.rollback}
        for act in (methods.get(end) or (lambda: said(end)(connection)), lambda: way.sell(connection, "chair")):
            with contextlib.suppress(Misuse, psycopg.Error):
                await act()

    async def run(connection: Any, item: str) -> None:
        await way.sell(connection, item)
        await end_and_go_on(connection)

    flow = flow_of(way, shop.url(), run)
    if (name, end) == ("session, async", "connection.rollback()"):
        shop.run(way, flow)
        assert shop.sales() == ["chair"], "its own savepoint is all that it has rolled back"
    else:
        with pytest.raises(Misuse, match="Everything was rolled back"):
            shop.run(way, flow)
        assert shop.sales() == []


@pytest.mark.parametrize("name", ["psycopg", "engine"])
@pytest.mark.parametrize(
    "statement",
    [
        "commit and chain",
        " -- well\n COMMIT",
        "SELECT ';'; ABORT",
        "ROLLBACK WORK",
        "ROLLBACK AND CHAIN",
        "ROLLBACK; BEGIN; INSERT INTO sales VALUES ('', 'chair'); COMMIT",
        "START TRANSACTION READ ONLY",
        "DO $$ BEGIN COMMIT; END $$",
    ],
)
def test_in_whatever_words_a_body_ends_the_transaction_nothing_is_committed(
    shop: Shop, name: str, statement: str
) -> None:
    with pytest.raises((Misuse, StepError, psycopg.Error, SQLAlchemyError)):
        shop.run(name, flow_of(WAYS[name], shop.url(), body_of(WAYS[name], after=said(statement))))
    assert shop.sales() == []
    assert shop.markers(WAYS[name]) == []


WRITING = {
    "all": "UPDATE everstep_markers SET at = 0",
    "another": "DELETE FROM everstep_markers WHERE key = 'another'",
    "its own too": "DELETE FROM everstep_markers",
    "truncated": "TRUNCATE everstep_markers",
    "dropped": 'drop table "everstep_markers"',
    "a new one": "INSERT INTO everstep_markers VALUES ('new', '', '', 1, NULL, 0, NULL)",
    "unread": "DO $$ BEGIN DELETE FROM everstep_markers WHERE key = 'another'; END $$",
    "in a savepoint": "SAVEPOINT a; DELETE FROM everstep_markers WHERE key = 'another'; RELEASE a",
}


@pytest.mark.parametrize("name", ["psycopg", "psycopg, async", "engine"])
@pytest.mark.parametrize("what", WRITING)
def test_a_body_that_writes_to_the_markers_is_refused_and_nothing_is_half_done(
    shop: Shop, name: str, what: str
) -> None:
    way = WAYS[name]
    shop.run(way, flow_of(way, shop.url(), body_of(way)), id="other")
    shop.server.ask(f"UPDATE \"{shop.schema}\".everstep_markers SET key = 'another'")
    before = shop.markers(way)
    with pytest.raises(Misuse, match="Everything was rolled back") as told:
        shop.run(way, flow_of(way, shop.url(), body_of(way, after=said(WRITING[what]))))
    assert "everstep_markers" in str(told.value)
    assert shop.sales() == ["lamp"]
    assert shop.markers(way) == before


@pytest.mark.parametrize("name", ["psycopg", "engine", "session"])
def test_a_body_may_read_the_markers_and_begin_what_has_begun(shop: Shop, name: str) -> None:
    """The server answers BEGIN in the middle of a transaction with a warning."""
    way = WAYS[name]

    def read(connection: Any) -> None:
        for statement in (
            "SELECT key FROM everstep_markers FOR UPDATE",
            "BEGIN",
            "SAVEPOINT x",
            "ROLLBACK TO x",
            "ROLLBACK TRANSACTION TO SAVEPOINT x",
            "rollback work to x",
            "SELECT 'COMMIT'; SELECT $x$ ; COMMIT $x$",
            "SELECT CASE WHEN 1 = 1 THEN 1 END",
            'SELECT start, "end" FROM (SELECT 1, 2) AS ranges (start, "end")',
            f"PREPARE plan_{everstep.current().run} AS SELECT 1",
            "DO $$ BEGIN PERFORM 1; END $$",
            "/* ; COMMIT */ SELECT 1",
        ):
            said(statement)(connection)

    for id in ("one", "two"):
        assert shop.run(way, flow_of(way, shop.url(), body_of(way, after=read)), id=id) == "sold lamp"
    assert shop.sales() == ["lamp"] * 2
    assert [guard for _, _, guard in shop.markers(way)] == [None, None]


def test_what_a_body_commits_in_a_transaction_of_its_own_is_said_and_not_done_again(shop: Shop) -> None:
    """Nothing keeps a body from it that ends the step's transaction, and then asks for another one that writes."""
    calls: list[int] = []

    def body(connection: psycopg.Connection[Any], item: str) -> None:
        calls.append(1)
        sell(connection, item)
        connection.execute("ROLLBACK AND CHAIN")
        sell(connection, "chair")
        psycopg.ClientCursor(connection).execute("COMMIT")

    with pytest.raises(Misuse, match="nothing undoes what a body commits in a transaction of its own"):
        shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body, retry=OFTEN))
    assert calls == [1]
    assert shop.sales() == ["chair"]
    assert shop.markers(WAYS["psycopg"]) == []


def test_a_body_that_begins_anew_beside_a_void_marker_is_refused_too(shop: Shop) -> None:
    """The void marker is there, and committed; the transaction that may complete it is not."""
    step = step_of(WAYS["psycopg"], shop.url())
    kept = Kept(step)
    shop.run("psycopg", selling(step))
    shop.server.ask(f'DELETE FROM "{shop.schema}".sales')
    shop.server.ask(f'UPDATE "{shop.schema}".everstep_markers SET outcome = NULL')
    (work,) = kept.works
    settled = atomic.perform(msgspec.structs.replace(work, body=unread_rollback, attempt=2, permit=atomic.Permit()))
    assert isinstance(settled.refused, Misuse)
    assert shop.sales() == []
    assert [(attempt, outcome) for attempt, outcome, _ in shop.markers(WAYS["psycopg"])] == [(1, None)]


def test_savepoints_and_rows_of_any_shape_are_a_body_s_own_affair(shop: Shop) -> None:
    def body(connection: psycopg.Connection[Any], item: str) -> str:
        connection.row_factory = dict_row
        connection.execute("CREATE TEMP TABLE notes (text text) ON COMMIT DROP")
        with connection.transaction():
            sell(connection, item)
        with connection.transaction():
            sell(connection, "chair")
            raise psycopg.Rollback
        connection.execute("SAVEPOINT mine")
        sell(connection, "table")
        connection.execute("ROLLBACK TO SAVEPOINT mine")
        connection.execute("INSERT INTO notes VALUES ('COMMIT; ROLLBACK'), ($$; commit $$)")
        connection.execute("CREATE FUNCTION one() RETURNS int LANGUAGE sql BEGIN ATOMIC SELECT 1; END")
        row = connection.execute("SELECT count(*) AS notes FROM notes").fetchone()
        assert row is not None
        return f"{row['notes']} notes"

    assert shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body)) == "2 notes"
    assert shop.sales() == ["lamp"]


def test_a_session_s_objects_are_sent_before_the_commit_and_what_that_raises_is_the_body_s(shop: Shop) -> None:
    made = engine(shop.url())
    shop.server.ask(f'CREATE TABLE "{shop.schema}".goods (name text PRIMARY KEY)')
    table = Table("goods", MetaData(), autoload_with=made)
    good: Any = type("Good", (), {})
    registry().map_imperatively(good, table)

    def body(session: Session, item: str) -> str:
        one = good()
        one.name = item
        session.add(one)
        return "added"

    def stocked() -> list[Any]:
        return shop.server.ask(f'SELECT name FROM "{shop.schema}".goods')

    step = transaction(sessionmaker(made), name="sell")(body)
    assert shop.run("session", selling(step)) == "added"
    assert stocked() == [("lamp",)]
    with pytest.raises(IntegrityError, match="duplicate key"):
        shop.run("session", selling(step))
    assert stocked() == [("lamp",)]

    def other_body(session: Session, item: str) -> str:
        body(session, item)
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        with session.begin_nested():
            body(session, "chair")
        return "went on"

    assert shop.run("session", selling(transaction(sessionmaker(made), name="sell")(other_body))) == "went on"
    assert stocked() == [("lamp",), ("chair",)]


# -- the table of markers ----------------------------------------------------------------------------------------------
def test_many_who_need_the_table_of_markers_at_once_make_it_once(shop: Shop) -> None:
    steps = [step_of(WAYS["psycopg"], shop.url()) for _ in range(8)]
    barrier = threading.Barrier(8)

    def begin(step: Any) -> int:
        barrier.wait(10)
        return int(atomic.in_transaction(step.database, None, lambda one: one.forget_markers("r", 0), commits=True))  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(begin, steps)) == [0] * 8


@pytest.mark.parametrize("name", ["psycopg", "engine"])
def test_a_role_that_may_not_make_the_table_is_told_what_to_run(shop: Shop, server: Server, name: str) -> None:
    role = f"{shop.schema}_clerk"
    server.ask(f"CREATE ROLE {role} LOGIN")
    try:
        server.ask(f'GRANT USAGE ON SCHEMA "{shop.schema}" TO {role}')
        server.ask(f'GRANT INSERT ON "{shop.schema}".sales TO {role}')
        url = shop.url(server.as_role(role).uri)
        flow = flow_of(WAYS[name], url)
        with pytest.raises(Misuse, match="may not make the table of markers") as told:
            shop.run(name, flow)
        assert script(shop.schema) in str(told.value)
        server.ask(str(told.value).partition("\n")[2].partition(";\n")[2])  # the schema itself is there
        with pytest.raises(Misuse, match="may not use the table of markers"):
            shop.run(name, flow)
        server.ask(f'GRANT SELECT, INSERT, UPDATE, DELETE ON "{shop.schema}".everstep_markers TO {role}')
        assert shop.run(name, flow) == "sold lamp"
    finally:
        server.ask(f"DROP OWNED BY {role}")
        server.ask(f"DROP ROLE {role}")


def test_the_table_is_the_same_as_a_store_s_and_a_store_finds_room_beside_it(shop: Shop) -> None:
    """Also where atomic steps came first."""
    assert shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url())) == "sold lamp"
    shop.run("store", flow_of(WAYS["store"], ""))
    asked = (
        "SELECT column_name, data_type, is_nullable FROM information_schema.columns "
        "WHERE table_schema = %s AND table_name = 'everstep_markers' ORDER BY ordinal_position"
    )
    indexes = "SELECT indexname FROM pg_indexes WHERE schemaname = %s AND tablename = 'everstep_markers' ORDER BY 1"
    for question in (asked, indexes):
        assert shop.server.ask(question, shop.schema) == shop.server.ask(question, f"{shop.schema}_store") != []
    shop.server.ask(f'DROP TABLE "{shop.schema}".sales')
    store = PostgresStore(shop.url())
    store.close()
    assert len(shop.markers(WAYS["psycopg"])) == 1


def test_markers_of_ended_runs_are_forgotten(shop: Shop, way: Way) -> None:
    async def forget() -> list[int]:
        async with everstep.open(shop.store_url() if way.in_store else "memory:") as app:
            await app.run(flow_of(way, shop.url()), id="r")
            await asyncio.sleep(0.01)
            forgotten = [await app.forget_markers(way.database(shop.url()), older_than=age) for age in (60.0, 0.0)]
            assert shop.markers(way) == []
            return forgotten

    assert asyncio.run(forget()) == [0, 1]
    assert shop.sales() == ["lamp"]


# -- durability --------------------------------------------------------------------------------------------------------
def test_a_commit_waits_for_the_disk_whatever_the_role_and_the_body_say(shop: Shop) -> None:
    """The run will remember it as done. Who wants more than that (`remote_apply`) gets it."""
    found: list[str] = []
    for wanted in ("off", "on", "remote_apply"):

        def body(connection: Any, item: str, wanted: str = wanted) -> str:
            connection.execute(f"SET LOCAL synchronous_commit = {wanted}")
            connection.add_notice_handler(lambda notice: found.append(str(notice.message_primary)))
            connection.execute("CREATE TEMP TABLE once (x int)")
            connection.execute(
                "CREATE FUNCTION pg_temp.tell() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE NOTICE 'sync %', current_setting('synchronous_commit'); RETURN NULL; END $$"
            )
            connection.execute(
                "CREATE CONSTRAINT TRIGGER tell AFTER INSERT ON pg_temp.once DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION pg_temp.tell()"
            )
            connection.execute("INSERT INTO once VALUES (1)")
            return wanted

        shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body))
    assert found == ["sync on", "sync on", "sync remote_apply"]


# -- names and secrets -------------------------------------------------------------------------------------------------
def test_one_database_has_one_name_without_any_secret() -> None:
    for given in (
        "postgresql://ann:hunter2@db.example:5433/shop",
        "postgres://db.example:5433/shop?sslmode=require&password=hunter2",
        "postgresql://bob@db.example/shop?port=5433",
        create_engine("postgresql+psycopg://ann:hunter2@db.example:5433/shop"),
    ):
        assert database_of(given).name == "postgresql://db.example:5433/shop"
        assert "hunter2" not in repr(database_of(given))
    assert database_of("postgresql:///shop?host=/tmp&schema=x").name == "postgresql:///shop?host=/tmp&schema=x"


ADDRESSES = [
    *(
        f"ann:{password}@127.0.0.1:1"
        for password in ("hunter2", "hunter2@home", "hunter2/x", "hunter2:x", "%zzhunter2")
    ),
    "ann:hunter2",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_password_is_never_shown(server: Server, address: str) -> None:
    with pytest.raises((Misuse, DatabaseFailed)) as told:
        asyncio.run(_run_in_memory(f"postgresql://{address}/shop?connect_timeout=1"))
    error: BaseException | None = told.value
    while error is not None:
        assert "hunter2" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


async def _run_in_memory(url: str) -> Any:
    async with everstep.open("memory:") as app:
        return await app.run(flow_of(WAYS["psycopg"], url))


def test_what_is_no_database_for_it_is_refused_with_a_word_of_advice(tmp_path: Any) -> None:
    for given, why in (
        (create_engine(f"sqlite:///{tmp_path}/x.db"), "name the file itself"),
        (sessionmaker(), "bound to an engine"),
        (create_engine("postgresql+psycopg://h/d", execution_options={"everstep_schema": "No"}), "name of a schema"),
        ("postgresql://h/d?schema=pg_x", "name of a schema"),
    ):
        with pytest.raises(Misuse, match=why):
            transaction(given)  # type: ignore[call-overload]
    with pytest.raises(Misuse, match="needs an `async def` body"):
        transaction(async_engine("postgresql://h/d"))(sell)


UNUSED = """
import sys
import everstep
everstep.transaction("shop.db")(lambda connection: None)
everstep.transaction(everstep.STORE)(lambda connection: None)
assert not {"psycopg", "sqlalchemy"} & set(sys.modules)
everstep.transaction("postgresql://host/shop")(lambda connection: None)
assert "sqlalchemy" not in sys.modules
"""
MISSING = """
import sys
import everstep
sys.modules["psycopg"] = None
try:
    everstep.transaction("postgresql://host/shop")
except everstep.errors.Misuse as told:
    print(told)
"""


def test_a_library_that_nobody_uses_is_not_imported_and_one_that_is_missing_is_named() -> None:
    python(UNUSED)
    assert "pip install 'everstep[postgres]'" in python(MISSING)


def test_a_pooler_that_gives_each_transaction_another_session_is_fine(shop: Shop) -> None:
    """No session is set up, and no statement is prepared."""
    prepared: list[Any] = []

    def body(connection: Any, item: str) -> str:
        for _ in range(8):
            connection.execute("SELECT %s", (item,))
        prepared.extend(connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone())
        return str(sell(connection, item))

    url = shop.url().replace("&schema", "&pooler=on&schema")
    assert shop.run("psycopg", flow_of(WAYS["psycopg"], url, body)) == "sold lamp"
    assert prepared[0] == 0


def test_a_body_in_the_store_may_start_another_run_in_its_transaction(shop: Shop) -> None:
    """The run is there if and only if the step has happened."""

    @workflow(name="other")
    async def other() -> str:
        return "went"

    async def both() -> list[Any]:
        async with everstep.open(shop.store_url()) as app:
            loop = asyncio.get_running_loop()
            made: list[int] = []

            def start(connection: Any) -> None:
                made.append(1)
                going = app.start(other, id=f"other{len(made)}", transaction=connection)
                asyncio.run_coroutine_threadsafe(going, loop).result(60)
                if len(made) == 1:
                    raise ValueError("not yet")

            flow = flow_of(WAYS["store"], "", body_of(WAYS["store"], after=start), retry=OFTEN)
            assert await app.run(flow, id="r") == "sold lamp"
            return [app.store.run(id) is not None for id in ("other1", "other2")]

    assert asyncio.run(both()) == [False, True]


@pytest.mark.parametrize("wish", ["read-write", "primary", "any"])
def test_a_url_may_ask_for_a_server_that_writes(shop: Shop, wish: str) -> None:
    hosts = shop.url().replace("&schema", f"&target_session_attrs={wish}&schema")
    assert shop.run("psycopg", flow_of(WAYS["psycopg"], hosts)) == "sold lamp"
    with pytest.raises(Misuse, match="Everything was rolled back"):
        shop.run("psycopg", flow_of(WAYS["psycopg"], hosts, body_of(WAYS["psycopg"], after=another_transaction)))
    assert shop.sales() == ["lamp"]


def test_an_engine_that_commits_each_statement_is_refused(shop: Shop) -> None:
    eager = engine(shop.url(), isolation_level="AUTOCOMMIT")
    with pytest.raises(Misuse, match="commits each statement by itself"):
        shop.run("engine", selling(transaction(eager, name="sell")(WAYS["engine"].sell)))
    assert shop.sales() == []


def test_an_async_body_may_use_a_plain_engine(shop: Shop) -> None:
    async def body(connection: Any, item: str) -> str:
        await asyncio.sleep(0)
        return str(WAYS["engine"].sell(connection, item))

    assert shop.run("engine", selling(transaction(engine(shop.url()), name="sell")(body))) == "sold lamp"
    assert shop.sales() == ["lamp"]


def test_a_store_on_postgresql_gives_async_bodies_a_connection_for_asyncio(shop: Shop) -> None:
    assert shop.run("store, async", selling(transaction(STORE, name="sell")(sell_async))) == "sold lamp"
    assert shop.sales() == ["lamp"]
