"""What is found where a driver did not see that a body has ended the transaction, and what goes back to the pool."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

import everstep
from everstep import Retry, transaction, workflow
from everstep.errors import Misuse
from tests.postgres.server import Server
from tests.postgres.shops import Shop
from tests.postgres.ways import WAYS, engine, flow_of, sell

OFTEN = Retry(attempts=3, first=0.01, factor=1.0, jitter=0.0)


@pytest.fixture
def shop(server: Server, schema: str) -> Iterator[Shop]:
    made = Shop(server, schema)
    yield made
    made.drop()


@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
def test_what_asyncpg_commits_statement_by_statement_is_found_also_if_the_body_raises(shop: Shop, end: str) -> None:
    """asyncpg sees no statement that ends a transaction, and each one after it is committed by itself."""
    way = WAYS["asyncpg"]
    calls: list[int] = []

    async def body(connection: Any, item: str) -> None:
        calls.append(1)
        await way.sell(connection, item)
        with contextlib.suppress(DBAPIError):  # the server refuses a COMMIT, and rolls back
            await connection.exec_driver_sql(f"-- well\n{end}")
        await way.sell(connection, "chair")
        raise ValueError("sold out")

    with pytest.raises(Misuse, match="nothing undoes what a body commits in a transaction of its own"):
        shop.run(way, flow_of(way, shop.url(), body, retry=OFTEN))
    assert calls == [1]
    assert shop.sales() == ["chair"]


def test_what_was_committed_before_the_driver_s_connection_was_closed_is_not_done_again(shop: Shop) -> None:
    way = WAYS["engine"]
    calls: list[int] = []

    def body(connection: Any, item: str) -> None:
        calls.append(1)
        driver = connection.connection.driver_connection
        driver.rollback()
        driver.autocommit = True
        sell(driver, item)
        driver.close()

    with pytest.raises(Misuse, match="nothing undoes what a body commits in a transaction of its own"):
        shop.run(way, flow_of(way, shop.url(), body, retry=OFTEN))
    assert calls == [1]
    assert shop.sales() == ["lamp"]


def test_a_connection_whose_transaction_was_ended_does_not_go_back_to_the_pool(shop: Shop) -> None:
    one = engine(shop.url(), pool_size=1)

    def body(connection: Any) -> None:
        driver = connection.connection.driver_connection
        driver.rollback()
        driver.autocommit = True

    spoiling = transaction(one, name="spoiling")(body)

    @workflow
    def flow() -> None:
        spoiling()

    with pytest.raises(Misuse):
        everstep.run(flow, url="memory:")
    with one.connect() as connection:
        assert not connection.connection.driver_connection.autocommit
    one.dispose()
