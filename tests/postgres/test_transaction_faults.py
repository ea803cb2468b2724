"""Atomic steps while the server is restarted, backends are ended, replies are lost, and others are in the way."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest

import everstep
from everstep import Retry, transaction
from everstep.effects import atomic, postgres_markers
from everstep.effects.databases import database_of
from everstep.errors import DatabaseFailed, StepTimedOut
from tests.postgres.proxy import CuttingProxy
from tests.postgres.server import Server
from tests.postgres.shops import Kept, Shop
from tests.postgres.ways import WAYS, Way, body_of, engine, flow_of, said, selling, step_of
from tests.waiting import wait_until

ONCE = ["step_started", "step_completed"]


@pytest.fixture
def shop(server: Server, schema: str) -> Iterator[Shop]:
    made = Shop(server, schema)
    yield made
    made.drop()


@pytest.fixture
def proxy(server: Server) -> Iterator[CuttingProxy]:
    made = CuttingProxy(server.socket_path())
    yield made
    made.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def through(proxy: CuttingProxy) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable"


# -- unknown commits ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", ["request", "reply"])
def test_a_commit_whose_answer_is_lost_is_decided_by_its_marker(
    shop: Shop, proxy: CuttingProxy, way: Way, moment: Any
) -> None:
    """Done, its outcome is found. Not done, it is a failed attempt; in the store, which is waited for, it is none."""
    made: list[int] = []

    def arm(_: Any) -> None:
        made.append(1)
        if len(made) == 1:
            proxy.cut_once(moment, b"COMMIT")

    retry = Retry(attempts=2, first=0.01)
    flow = flow_of(way, shop.url(through(proxy)), body_of(way, after=arm), retry=retry)
    assert shop.run(way, flow, uri=through(proxy) if way.in_store else "") == "sold lamp"
    assert proxy.cuts == 1
    assert shop.sales() == ["lamp"]
    assert len(made) == (1 if moment == "reply" else 2)
    assert shop.kinds.count("attempt_failed") == (1 if moment == "request" and not way.in_store else 0)


def test_a_commit_that_is_still_under_way_in_the_server_is_waited_for(shop: Shop, proxy: CuttingProxy) -> None:
    """Its client has lost the connection. Whoever asks too early must not take it for undone."""
    shop.server.ask(
        f'CREATE FUNCTION "{shop.schema}".slow() RETURNS trigger LANGUAGE plpgsql AS '
        "$$ BEGIN PERFORM pg_sleep(1); RETURN NULL; END $$"
    )
    shop.server.ask(
        f'CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON "{shop.schema}".sales DEFERRABLE INITIALLY DEFERRED '
        f'FOR EACH ROW EXECUTE FUNCTION "{shop.schema}".slow()'
    )
    made: list[int] = []

    def arm(_: Any) -> None:
        made.append(1)
        threading.Timer(0.3, proxy.cut_all).start()  # in the middle of the COMMIT

    flow = flow_of(WAYS["psycopg"], shop.url(through(proxy)), body_of(WAYS["psycopg"], after=arm))
    assert shop.run("psycopg", flow) == "sold lamp"
    assert made == [1]
    assert shop.sales() == ["lamp"]
    assert shop.kinds == ONCE


@pytest.mark.parametrize("name", ["psycopg", "store"])
def test_a_server_that_is_killed_in_the_middle_of_a_commit_decides_when_it_is_back(shop: Shop, name: str) -> None:
    """The run waits for it: the history says nothing before it is known whether it has happened."""
    shop.server.skip_unless_ours()
    way = WAYS[name]
    made: list[int] = []
    restarting = threading.Thread(target=shop.server.restart)
    shop.server.ask(
        f'CREATE FUNCTION "{shop.schema}".slow() RETURNS trigger LANGUAGE plpgsql AS '
        "$$ BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END $$"
    )
    shop.server.ask(
        f'CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON "{shop.schema}".sales DEFERRABLE INITIALLY DEFERRED '
        f'FOR EACH ROW EXECUTE FUNCTION "{shop.schema}".slow()'
    )

    def arm(_: Any) -> None:
        made.append(1)
        if len(made) == 1:
            threading.Timer(0.1, restarting.start).start()

    flow = flow_of(way, shop.url(), body_of(way, after=arm), retry=Retry(attempts=2, first=0.01))
    assert shop.run(way, flow) == "sold lamp"
    restarting.join()
    assert made == [1, 1], "the COMMIT was not done, so it is done again"
    assert shop.sales() == ["lamp"]


# -- cancelled ---------------------------------------------------------------------------------------------------------
def when_committed(shop: Shop, does: str) -> None:
    """Let the server do something in the middle of a COMMIT, the first time."""
    shop.server.ask(f'CREATE SEQUENCE "{shop.schema}".times')
    shop.server.ask(
        f'CREATE FUNCTION "{shop.schema}".first() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN '
        f"IF nextval('\"{shop.schema}\".times') = 1 THEN {does}; END IF; RETURN NULL; END $$"
    )
    shop.server.ask(
        f'CREATE CONSTRAINT TRIGGER first AFTER INSERT ON "{shop.schema}".sales DEFERRABLE INITIALLY DEFERRED '
        f'FOR EACH ROW EXECUTE FUNCTION "{shop.schema}".first()'
    )


def test_a_commit_that_is_cancelled_is_decided_by_its_marker_and_made_again(shop: Shop, way: Way) -> None:
    """An operator cancels it. That is no failure of the step, which has no retry policy here."""
    when_committed(shop, "PERFORM pg_sleep(30)")
    made: list[int] = []
    cancelling: list[threading.Thread] = []

    def cancel() -> None:
        asked = (
            "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity "
            "WHERE upper(query) LIKE 'COMMIT%' AND state = 'active' AND wait_event = 'PgSleep'"
        )
        wait_until(lambda: shop.server.ask(asked) != [(0,)])

    def arm(_: Any) -> None:
        made.append(1)
        if len(made) == 1:
            cancelling.append(threading.Thread(target=cancel))
            cancelling[0].start()

    assert shop.run(way, flow_of(way, shop.url(), body_of(way, after=arm))) == "sold lamp"
    cancelling[0].join()
    assert made == [1, 1]
    assert shop.sales() == ["lamp"]
    assert shop.kinds == ONCE


@pytest.mark.parametrize("code", ["53000", "53100", "53200", "53300", "40001", "40P01", "55P03", "57014"])
def test_a_commit_that_fails_for_a_reason_of_the_servers_is_no_failed_attempt(shop: Shop, code: str) -> None:
    when_committed(shop, f"RAISE EXCEPTION USING ERRCODE = '{code}'")
    assert shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body_of(WAYS["psycopg"]))) == "sold lamp"
    assert shop.sales() == ["lamp"]
    assert shop.kinds == ONCE


@pytest.mark.parametrize("code", ["23514", "22003", "P0001"])
def test_a_commit_that_the_shops_own_rules_refuse_is_a_failed_attempt(shop: Shop, code: str) -> None:
    when_committed(shop, f"RAISE EXCEPTION USING ERRCODE = '{code}'")
    with pytest.raises(DatabaseFailed, match="refused the COMMIT"):
        shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body_of(WAYS["psycopg"])))
    assert not shop.sales()


# -- lost connections --------------------------------------------------------------------------------------------------
def test_a_backend_that_is_ended_in_the_body_leaves_nothing_behind(shop: Shop, way: Way) -> None:
    made: list[int] = []

    def end(_: Any) -> None:
        made.append(1)
        if len(made) == 1:
            asked = (
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'INSERT INTO sales%'"
            )
            assert shop.server.ask(asked) == [(1,)]

    flow = flow_of(way, shop.url(), body_of(way, after=end), retry=Retry(attempts=2, first=0.01))
    assert shop.run(way, flow) == "sold lamp"
    assert made == [1, 1]
    assert shop.sales() == ["lamp"]


def test_a_body_that_goes_on_after_its_connection_was_lost_is_refused(shop: Shop) -> None:
    def body(connection: psycopg.Connection[Any], item: str) -> str:
        shop.server.ask("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        return "nothing happened"

    with pytest.raises(everstep.errors.Misuse, match="its body went on"):
        shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url(), body))


@pytest.mark.parametrize("name", ["psycopg", "engine, async"])
def test_a_server_that_is_not_there_is_a_failed_attempt_that_says_so(shop: Shop, name: str) -> None:
    url = "postgresql://ann:hunter2@127.0.0.1:1/shop?connect_timeout=1"
    with pytest.raises(DatabaseFailed, match=r"postgresql://127\.0\.0\.1:1/shop could not be asked") as told:
        shop.run(name, flow_of(WAYS[name], url))
    assert "hunter2" not in str(told.value)


def test_the_store_s_own_server_is_waited_for(shop: Shop) -> None:
    """As by everything else that writes to the store."""
    shop.server.skip_unless_ours()
    way = WAYS["store"]
    made: list[int] = []

    def body(connection: Any, item: str) -> str:
        made.append(1)
        if len(made) == 1:
            shop.server.stop()
            threading.Timer(0.5, shop.server.start).start()
        return str(way.sell(connection, item))

    assert shop.run(way, flow_of(way, shop.url(), body)) == "sold lamp"
    assert made == [1, 1]
    assert shop.sales() == ["lamp"]
    assert shop.kinds == ONCE


def test_another_server_that_a_body_in_the_store_cannot_reach_is_the_body_s_own_affair(shop: Shop) -> None:
    made: list[int] = []

    def body(connection: Any, item: str) -> str:
        made.append(1)
        psycopg.connect("postgresql://127.0.0.1:1/elsewhere", connect_timeout=1)
        return item

    with pytest.raises(psycopg.OperationalError):
        shop.run("store", flow_of(WAYS["store"], "", body))
    assert made == [1]


# -- others in the way -------------------------------------------------------------------------------------------------
SERIALIZABLE = "-cdefault_transaction_isolation%3Dserializable"


@pytest.mark.parametrize("name", ["psycopg", "engine, async"])
def test_two_runs_that_cannot_be_put_in_order_are_both_done_and_that_is_no_attempt(shop: Shop, name: str) -> None:
    """Each reads what the other writes: one of them is refused at its COMMIT, and runs again."""
    way = WAYS[name]
    url = shop.url().replace("options=", f"options={SERIALIZABLE}%20")
    both = threading.Barrier(2)
    made: list[int] = []

    def count(connection: Any) -> Any:
        made.append(1)
        statement = "SELECT count(*) FROM sales"
        if way.by_sqlalchemy:
            from sqlalchemy import text

            return connection.execute(text(statement))
        return connection.execute(statement)

    def meet(_: Any) -> Any:
        if len(made) <= 2:
            return asyncio.to_thread(both.wait, 10) if way.is_async else both.wait(10)
        return None

    async def two() -> list[Any]:
        async with everstep.open("memory:") as app:
            flow = flow_of(way, url, body_of(way, before=count, after=meet))
            runs = [await app.start(flow, id=id) for id in ("one", "two")]
            results = [await run.result(timeout=60) for run in runs]
            kinds = [event.kind for id in ("one", "two") for event in app.store.events(id, 1)]
            assert "attempt_failed" not in kinds
            return results

    assert asyncio.run(two()) == ["sold lamp"] * 2
    assert len(made) == 3
    assert shop.sales() == ["lamp"] * 2


def test_two_runs_that_wait_for_each_other_are_both_done_and_that_is_no_attempt(shop: Shop) -> None:
    way = WAYS["psycopg"]
    shop.server.ask(f"INSERT INTO \"{shop.schema}\".sales VALUES ('', '1'), ('', '2')")
    both = threading.Barrier(2)
    made: list[int] = []

    def body(connection: Any, item: str) -> str:
        made.append(1)
        first, second = ("1", "2") if everstep.current().run == "one" else ("2", "1")
        connection.execute("UPDATE sales SET key = key || 'x' WHERE item = %s", (first,))
        if len(made) <= 2:
            both.wait(10)
        connection.execute("UPDATE sales SET key = key || 'x' WHERE item = %s", (second,))
        return "done"

    async def two() -> list[str]:
        async with everstep.open("memory:") as app:
            flow = flow_of(way, shop.url(), body)
            runs = [await app.start(flow, id=id) for id in ("one", "two")]
            return [await run.result(timeout=60) for run in runs]

    assert asyncio.run(two()) == ["done"] * 2
    assert len(made) == 3
    assert shop.server.ask(f'SELECT key FROM "{shop.schema}".sales') == [("xx",), ("xx",)]


def test_patience_ends_with_an_error_that_says_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sits on the marker: the attempt is not made, and says so in the end."""
    monkeypatch.setattr(atomic, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(postgres_markers, "WAIT", "50ms")
    shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url()))
    with psycopg.connect(shop.server.uri) as other:
        other.execute(f'LOCK TABLE "{shop.schema}".everstep_markers')
        with pytest.raises(DatabaseFailed, match="was locked by others"):
            shop.run("psycopg", flow_of(WAYS["psycopg"], shop.url()))
    assert shop.sales() == ["lamp"]


def test_a_body_has_its_own_patience_and_not_that_of_the_marker(shop: Shop) -> None:
    found: list[str] = []

    def note(connection: Any) -> None:
        found.append(connection.execute("SHOW lock_timeout").fetchone()[0])

    url = shop.url().replace("options=", "options=-clock_timeout%3D7s%20")
    shop.run("psycopg", flow_of(WAYS["psycopg"], url, body_of(WAYS["psycopg"], before=note)))
    assert found == ["7s"]


def test_whoever_has_the_turn_is_waited_for_also_by_a_role_whose_statements_must_be_short(shop: Shop) -> None:
    way = WAYS["psycopg"]
    inside = threading.Event()

    def stay(_: Any) -> None:
        inside.set()
        threading.Event().wait(0.6)

    step = step_of(way, shop.url(), body_of(way, after=stay))
    kept = Kept(step)
    first = threading.Thread(target=lambda: shop.run(way, selling(step)))
    first.start()
    assert inside.wait(10)
    short = database_of(shop.url().replace("options=", "options=-cstatement_timeout%3D100ms%20"))
    (work,) = kept.works
    again = msgspec.structs.replace(work, database=short, attempt=2, permit=atomic.Permit())
    assert atomic.perform(again).adopted
    first.join()
    assert shop.sales() == ["lamp"]


@pytest.mark.parametrize("name", ["engine", "session"])
def test_a_connection_that_a_pool_kept_although_the_server_has_closed_it_is_no_failed_attempt(
    shop: Shop, name: str
) -> None:
    made = WAYS[name].database(shop.url())
    way = WAYS[name]._replace(database=lambda url: made)
    shop.run(way, flow_of(way, ""))
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state = 'idle' AND query = 'COMMIT'"
    assert shop.server.ask(ended)[0][0] >= 1
    assert shop.run(way, flow_of(way, "")) == "sold lamp"
    assert shop.kinds == ONCE
    assert shop.sales() == ["lamp"] * 2


def test_a_pool_gets_its_connections_back_as_they_were(shop: Shop) -> None:
    """Also after a body that failed, and never one whose statement was stopped from outside."""
    made = engine(shop.url(), pool_size=1, max_overflow=0)
    way = WAYS["engine"]._replace(database=lambda url: made)

    def fail(_: Any) -> None:
        raise ValueError("no")

    def stay(connection: Any) -> None:
        from sqlalchemy import text

        connection.execute(text("SELECT pg_sleep(20)"))

    with pytest.raises(ValueError, match="no"):
        shop.run(way, flow_of(way, "", body_of(way, after=fail)))
    with made.connect() as connection:
        kept = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    with pytest.raises(everstep.errors.StepTimedOut):
        shop.run(way, flow_of(way, "", body_of(way, after=stay), timeout=0.3))
    assert shop.run(way, flow_of(way, "")) == "sold lamp"
    with made.connect() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "0"
        assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() != kept
    assert shop.sales() == ["lamp"]


# -- timeouts ----------------------------------------------------------------------------------------------------------
def test_a_statement_that_runs_too_long_is_stopped_in_the_server(shop: Shop, way: Way) -> None:
    flow = flow_of(way, shop.url(), body_of(way, after=said("SELECT pg_sleep(600)")), timeout=0.4)
    with pytest.raises(StepTimedOut):
        shop.run(way, flow)
    assert shop.sales() == []
    asked = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(600)%' AND state = 'active'"
    wait_until(lambda: shop.server.ask(asked) == [(0,)])


def test_a_pool_without_a_connection_to_spare_is_waited_for(shop: Shop) -> None:
    small = engine(shop.url(), pool_size=1, max_overflow=0, pool_timeout=0.05)
    held = small.connect()
    threading.Timer(0.4, held.close).start()
    assert shop.run("engine", selling(transaction(small, name="sell")(WAYS["engine"].sell))) == "sold lamp"
    assert shop.kinds == ["step_started", "step_completed"]
