"""A session that is lost while the body of an atomic step has it is an attempt, and what ended it is named."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from everstep import Retry
from everstep.errors import DatabaseFailed, Misuse
from tests.postgres.proxy import CuttingProxy
from tests.postgres.server import Server
from tests.postgres.shops import Shop
from tests.postgres.ways import WAYS, Way, body_of, flow_of
from tests.waiting import wait_until

TWICE = Retry(attempts=2, first=0.01)
IDLE = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND state LIKE 'idle in transaction%%'"


@pytest.fixture
def shop(server: Server, schema: str) -> Iterator[Shop]:
    made = Shop(server, schema)
    yield made
    made.drop()


@pytest.fixture
def role(shop: Shop) -> Iterator[Callable[..., str]]:
    """Returns the URI of the server as a role sees it that has some settings."""
    name = f"{shop.schema}_hasty"
    shop.server.ask(f"CREATE ROLE {name} LOGIN SUPERUSER")

    def made(**settings: str) -> str:
        for setting, value in settings.items():
            try:
                shop.server.ask(f"ALTER ROLE {name} SET {setting} = '{value}'")
            except psycopg.errors.UndefinedObject:
                pytest.skip(f"This server does not know {setting}.")
        return shop.server.as_role(name).uri

    yield made
    shop.drop()
    shop.server.ask(f"DROP OWNED BY {name}")
    shop.server.ask(f"DROP ROLE {name}")


def rest_until_it_is_ended(shop: Shop, way: Way, made: list[int]) -> Callable[[Any], Any]:
    """Return what a body does that keeps its transaction waiting until the server has had enough of it."""

    def rest() -> None:
        made.append(1)
        wait_until(lambda: shop.server.ask(IDLE, f"{shop.schema}_hasty") == [(0,)])

    return lambda _: asyncio.to_thread(rest) if way.is_async else rest()


@pytest.mark.parametrize("name", WAYS)
def test_a_body_whose_transaction_was_idle_for_too_long_has_used_up_its_attempts(
    shop: Shop, role: Callable[..., str], name: str
) -> None:
    way, made = WAYS[name], list[int]()
    uri = role(idle_in_transaction_session_timeout="200ms")
    flow = flow_of(way, shop.url(uri), body_of(way, after=rest_until_it_is_ended(shop, way, made)), retry=TWICE)
    with pytest.raises(DatabaseFailed, match=r"idle_in_transaction_session_timeout of its role .*200ms"):
        shop.run(way, flow, uri=uri)
    assert made == [1, 1]
    assert shop.sales() == []
    assert shop.kinds.count("attempt_failed") == 1
    assert shop.kinds[-1] == "step_failed"


@pytest.mark.parametrize("name", ["psycopg", "store", "engine"])
def test_a_body_whose_transaction_took_too_long_has_used_up_its_attempts(
    shop: Shop, role: Callable[..., str], name: str
) -> None:
    way, made = WAYS[name], list[int]()
    uri = role(transaction_timeout="300ms")
    flow = flow_of(way, shop.url(uri), body_of(way, after=rest_until_it_is_ended(shop, way, made)), retry=TWICE)
    with pytest.raises(DatabaseFailed, match=r"transaction_timeout of its role .*300ms"):
        shop.run(way, flow, uri=uri)
    assert made == [1, 1]
    assert shop.sales() == []


@pytest.mark.parametrize("name", ["psycopg", "store", "store, async", "engine", "asyncpg"])
def test_a_statement_of_a_body_that_took_too_long_names_the_setting(
    shop: Shop, role: Callable[..., str], name: str
) -> None:
    way, made = WAYS[name], list[int]()
    uri = role(statement_timeout="300ms")

    def sleep(connection: Any) -> Any:
        made.append(1)
        if way.by_sqlalchemy:
            from sqlalchemy import text

            return connection.execute(text("SELECT pg_sleep(30)"))
        return connection.execute("SELECT pg_sleep(30)")

    flow = flow_of(way, shop.url(uri), body_of(way, after=sleep), retry=TWICE)
    with pytest.raises(DatabaseFailed, match=r"statement_timeout of its role .300ms"):
        shop.run(way, flow, uri=uri)
    assert made == [1, 1]
    assert shop.sales() == []


@pytest.mark.parametrize("name", ["store", "store, async"])
@pytest.mark.parametrize("kind", ["ended", "cut"])
def test_a_session_of_the_store_s_that_is_lost_again_and_again_is_no_outage(
    shop: Shop, server: Server, name: str, kind: str
) -> None:
    """The server is there all the time: what has ended one session may end each."""
    way, made = WAYS[name], list[int]()
    proxy = CuttingProxy(server.socket_path())
    uri = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
    ended = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE application_name LIKE 'everstep %% step' AND query LIKE 'INSERT INTO sales%%'"
    )

    def lose(_: Any) -> None:
        made.append(1)
        if kind == "cut":
            proxy.cut_once("request", b"everstep_markers")
        else:
            assert server.ask(ended) == [(1,)]

    flow = flow_of(way, "", body_of(way, after=lose), retry=TWICE)
    try:
        with pytest.raises(DatabaseFailed, match=r"cut off the transaction of .*Everything was rolled back"):
            shop.run(way, flow, uri=uri)
    finally:
        proxy.close()
    assert made == [1, 1]
    assert shop.sales() == []


@pytest.mark.parametrize("name", WAYS)
def test_a_role_whose_transactions_only_read_writes_in_atomic_steps(
    shop: Shop, role: Callable[..., str], name: str
) -> None:
    uri = role(default_transaction_read_only="on", default_transaction_isolation="repeatable read")
    way = WAYS[name]
    assert shop.run(way, flow_of(way, shop.url(uri)), uri=uri) == "sold lamp"
    assert shop.sales() == ["lamp"]


@pytest.mark.parametrize("name", ["psycopg", "store", "engine"])
def test_a_role_for_which_the_guard_is_not_checked_is_refused(shop: Shop, role: Callable[..., str], name: str) -> None:
    uri = role(session_replication_role="replica")
    way = WAYS[name]
    with pytest.raises(Misuse, match="session_replication_role"):
        shop.run(way, flow_of(way, shop.url(uri)), uri=uri)
    assert shop.sales() == []
