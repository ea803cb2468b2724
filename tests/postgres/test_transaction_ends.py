"""An atomic step on PostgreSQL whose body raises: was that in the step's own transaction, or in yet another one?"""

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everstep import Retry
from everstep.errors import Misuse
from tests.postgres.pooler import TransactionPooler
from tests.postgres.server import Server
from tests.postgres.shops import Shop
from tests.postgres.ways import WAYS, body_of, flow_of, said

OFTEN = Retry(attempts=3, first=0.01, factor=1.0, jitter=0.0)


@pytest.fixture
def shop(server: Server, schema: str) -> Iterator[Shop]:
    made = Shop(server, schema)
    yield made
    made.drop()


OF_ITS_OWN = "ROLLBACK; BEGIN READ WRITE; INSERT INTO {}.sales VALUES ('', 'chair'); COMMIT; BEGIN"
THEN = {
    "in it": "SELECT 1",
    "after an error in it": "SELECT 1 / 0",
    "in a savepoint of it": "SAVEPOINT x; SELECT 1 / 0",
}
RAISES = ["psycopg", "psycopg, async", "store", "store, async"]


@pytest.mark.parametrize("by", ["directly", "by a pooler"])
@pytest.mark.parametrize("then", [*THEN, "and an error is swallowed"])
@pytest.mark.parametrize("name", RAISES)
def test_a_body_that_raises_in_yet_another_transaction_is_not_tried_again(
    shop: Shop, name: str, then: str, by: str
) -> None:
    """It has committed something by hand, whatever it raises then."""
    way, calls = WAYS[name], list[int]()
    steps = [said(OF_ITS_OWN.format(shop.schema)), said(THEN.get(then, "SELECT 1 / 0"))]

    def body(connection: Any, item: str) -> None:
        calls.append(1)
        steps[0](connection)
        with contextlib.suppress(psycopg.Error) if then not in THEN else contextlib.nullcontext():
            steps[1](connection)
        if then in THEN:
            raise ValueError("sold out")

    async def body_async(connection: Any, item: str) -> None:
        calls.append(1)
        await steps[0](connection)
        with contextlib.suppress(psycopg.Error) if then not in THEN else contextlib.nullcontext():
            await steps[1](connection)
        if then in THEN:
            raise ValueError("sold out")

    with contextlib.ExitStack() as stack:
        uri = ""
        if by == "by a pooler":
            pooler = TransactionPooler(shop.server.socket_path())
            stack.callback(pooler.close)
            uri = f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres?pooler=on"
        flow = flow_of(way, shop.url(uri), body_async if way.is_async else body, retry=OFTEN)
        with pytest.raises(Misuse, match="nothing undoes what a body commits in a transaction of its own"):
            shop.run(way, flow, uri=uri)
    assert calls == [1]
    assert shop.sales() == ["chair"]
    assert [marker for marker in shop.markers(way) if marker[1] is not None] == []


FAILING = {
    "an error": "SELECT 1 / 0",
    "in a savepoint": "SAVEPOINT x; SELECT 1 / 0",
    "after a savepoint": "SAVEPOINT x; SAVEPOINT y; RELEASE x; SELECT 1 / 0",
    "after rolling back to one": "SAVEPOINT x; SAVEPOINT y; ROLLBACK TO x; SELECT 1 / 0",
    "a second BEGIN": "BEGIN; SELECT 1 / 0",
    "in a block": "DO $$ BEGIN BEGIN PERFORM 1 / 0; EXCEPTION WHEN OTHERS THEN NULL; END; PERFORM 1 / 0; END $$",
    "at an end that is checked early": "SET CONSTRAINTS ALL DEFERRED; SELECT 1 / 0",
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("name", RAISES)
def test_a_body_that_fails_in_the_step_s_own_transaction_is_tried_again(shop: Shop, name: str, how: str) -> None:
    calls: list[int] = []

    def fail(connection: Any) -> Any:
        calls.append(1)
        return said(FAILING[how] if len(calls) < 3 else "SELECT 1")(connection)

    flow = flow_of(WAYS[name], shop.url(), body_of(WAYS[name], after=fail), retry=OFTEN)
    assert shop.run(name, flow) == "sold lamp"
    assert len(calls) == 3
    assert shop.sales() == ["lamp"]
