"""What somebody else in the same database does: with our locks, on our channel, in a schema of our name."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import everstep
from everstep import transaction
from everstep.errors import Misuse, StoreUnusable
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.opening import places_of, script, stored_version
from everstep.stores.protocol import StartRun
from everstep.stores.rows.queues import ChangeQueue, TakeSlot
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, new_run


@pytest.fixture
def stranger(server: Server, schema: str) -> Iterator[str]:
    """A role that may connect, and nothing else."""
    made = f"{schema}_stranger"
    server.ask(f"CREATE ROLE {made} LOGIN")
    yield made
    server.drop(schema)
    server.ask(f"DROP OWNED BY {made} CASCADE")
    server.ask(f"DROP ROLE {made}")


# -- locks -------------------------------------------------------------------------------------------------------------
def test_a_lock_that_a_stranger_has_taken_keeps_no_dead_worker_alive(postgres: PostgresHarness, stranger: str) -> None:
    """The locks can be seen, and so taken, by anybody. It counts who has one, as soon as the lease has lapsed."""
    server, store, places = postgres.server, postgres.postgres, places_of(postgres.schema)
    postgres.enter("dead", lease_until=50)
    postgres.enter("alive", lease_until=50)
    (place,) = [row.place for row in store.workers() if row.id == "dead"]
    store.commit([ChangeQueue("limit", "l", {"concurrency": 1}, 1), TakeSlot("l", "r", 1, "dead", 1)])
    with psycopg.connect(server.as_role(stranger).uri, autocommit=True) as thief:
        postgres.kill("dead")
        assert thief.execute("SELECT pg_try_advisory_lock(%s, %s)", (places, place)).fetchone() == (True,)
        assert store.bury_dead(60) == [], "until the lease has lapsed, the lock is believed"
        assert store.lapse("dead", 50)
        assert store.bury_dead(60) == ["dead"]
        assert [slot.worker for slot in store.slots()] == []
        assert store.lapse("alive", 50)
        assert store.bury_dead(60) == [], "its own session has its lock"


def test_a_lock_that_a_stranger_has_taken_keeps_no_worker_out(postgres: PostgresHarness, stranger: str) -> None:
    server, store, places = postgres.server, postgres.postgres, places_of(postgres.schema)
    postgres.enter("me")
    (row,) = store.workers()
    with psycopg.connect(server.as_role(stranger).uri, autocommit=True) as thief:
        postgres.kill("me")
        thief.execute("SELECT pg_advisory_lock(%s, place) FROM generate_series(1, 5) AS place", (places,))
        assert not store.is_in_use()
        assert not store.is_alive(row)
        entered = store.register_worker("me", 1, "host", 10_000)
        assert entered.place == 6
        assert store.is_alive(entered)
        assert store.is_in_use()


# -- the channel -------------------------------------------------------------------------------------------------------
async def test_news_that_a_stranger_makes_up_changes_nothing(server: Server, schema: str, stranger: str) -> None:
    @everstep.step
    async def one() -> int:
        return 1

    @everstep.workflow
    async def flow() -> int:
        return sum([await one() for _ in range(5)])

    async with everstep.open(server.url(schema)) as app:
        with psycopg.connect(server.as_role(stranger).uri, autocommit=True) as liar:
            for _ in range(50):
                liar.execute("SELECT pg_notify(%s, repeat('x', 7999))", (f"everstep_{schema}",))
                liar.execute(f'NOTIFY everstep_{schema}, \'{{"run": "r", "status": "failed"}}\'')
            assert await app.run(flow, id="r") == 5


# -- what was there before ---------------------------------------------------------------------------------------------
def plant_store(server: Server, schema: str, stranger: str) -> None:
    """Let a stranger make a store with a trigger, and give everybody all rights to it."""
    server.ask(f"GRANT CREATE ON DATABASE postgres TO {stranger}")
    theirs = server.as_role(stranger)
    theirs.ask(script(schema))
    theirs.ask(f"CREATE TABLE {schema}.caught AS SELECT current_user AS who LIMIT 0")
    theirs.ask(
        f"CREATE FUNCTION {schema}.catch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"INSERT INTO {schema}.caught SELECT current_user; RETURN NULL; END $$"
    )
    theirs.ask(f"CREATE TRIGGER catch AFTER INSERT OR UPDATE ON {schema}.meta EXECUTE FUNCTION {schema}.catch()")
    theirs.ask(f"GRANT ALL ON SCHEMA {schema} TO PUBLIC")
    theirs.ask(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO PUBLIC")


@pytest.fixture
def worker(server: Server, schema: str, stranger: str) -> Iterator[str]:
    made = f"{schema}_worker"
    server.ask(f"CREATE ROLE {made} LOGIN")
    server.ask(f"GRANT CREATE ON DATABASE postgres TO {made}")
    yield made
    server.drop(schema)
    server.ask(f"DROP OWNED BY {made} CASCADE")
    server.ask(f"DROP ROLE {made}")


def test_a_store_that_a_stranger_has_made_is_not_opened(
    server: Server, schema: str, stranger: str, worker: str
) -> None:
    plant_store(server, schema, stranger)
    url = server.as_role(worker).url(schema)
    with pytest.raises(StoreUnusable, match=rf"belongs to the role {stranger}.*\?owner={stranger}"):
        PostgresStore(url)
    with pytest.raises(StoreUnusable, match="belongs to the role"):
        stored_version(url)
    assert server.ask(f"SELECT * FROM {schema}.caught") == []


def test_a_schema_that_a_stranger_has_made_is_not_used(server: Server, schema: str, stranger: str, worker: str) -> None:
    server.ask(f"CREATE SCHEMA {schema} AUTHORIZATION {stranger}")
    server.ask(f"GRANT ALL ON SCHEMA {schema} TO PUBLIC")
    with pytest.raises(StoreUnusable, match="belongs to the role"):
        PostgresStore(server.as_role(worker).url(schema))
    assert server.ask("SELECT 1 FROM pg_tables WHERE schemaname = %s", schema) == []


def test_a_table_that_a_stranger_has_put_into_our_schema_is_not_used(
    server: Server, schema: str, stranger: str, worker: str
) -> None:
    server.ask(f"CREATE SCHEMA {schema}")
    server.ask(f"GRANT ALL ON SCHEMA {schema} TO PUBLIC")
    server.as_role(stranger).ask(f"CREATE TABLE {schema}.meta (name text PRIMARY KEY, value text)")
    with pytest.raises(StoreUnusable, match="belongs to the role"):
        PostgresStore(server.as_role(worker).url(schema))


def test_a_store_may_belong_to_a_role_that_is_named(server: Server, schema: str, stranger: str, worker: str) -> None:
    plant_store(server, schema, stranger)
    server.ask(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {worker}")
    store = PostgresStore(server.as_role(worker).url(schema, owner=stranger))
    store.commit([StartRun(new_run("a"))])
    store.close()
    server.ask(f"GRANT {stranger} TO {worker}")
    PostgresStore(server.as_role(worker).url(schema)).close()


def test_markers_that_a_stranger_has_made_are_not_used(server: Server, schema: str, stranger: str, worker: str) -> None:
    plant_store(server, schema, stranger)
    database = server.as_role(worker).url(schema)

    async def run(url: str) -> Any:
        @transaction(url)
        def sell(connection: Any) -> str:
            return "sold"

        @everstep.workflow
        async def sale() -> str:
            return await asyncio.to_thread(sell)

        async with everstep.open("memory:") as app:
            return await app.run(sale)

    with pytest.raises(Misuse, match=f"is of the role {stranger}"):
        asyncio.run(run(database))
    assert asyncio.run(run(f"{database}&owner={stranger}")) == "sold"


def test_a_new_schema_is_for_nobody_else(server: Server, schema: str, stranger: str, worker: str) -> None:
    """Whatever the role gives away of each new table."""
    server.as_role(worker).ask("ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC")
    server.as_role(worker).ask("ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO PUBLIC")
    PostgresStore(server.as_role(worker).url(schema)).close()
    asked = "SELECT has_schema_privilege(%s, %s, 'USAGE'), has_table_privilege(%s, %s, 'SELECT')"
    server.ask(f"GRANT USAGE ON SCHEMA {schema} TO {stranger}")
    assert server.ask(asked, stranger, schema, stranger, f"{schema}.events") == [(True, False)]
    server.ask(f"REVOKE USAGE ON SCHEMA {schema} FROM {stranger}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        server.as_role(stranger).ask(f"SELECT * FROM {schema}.events")
