"""Nothing depends on what a role, a database or a session has set, with and without a pooler."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from everstep.errors import StoreUnusable
from everstep.stores.postgres import PostgresStore
from everstep.stores.protocol import Accepted, Claim, Claimed, Operation, Posted, RunFilter, StartRun
from everstep.stores.protocol import Post as Delivery
from everstep.stores.rows.queues import ChangeQueue, NoSlot, TakeSlot
from tests.postgres.pooler import TransactionPooler
from tests.postgres.server import Server
from tests.postgres.test_races import at_once
from tests.stores.kit import append_to, new_run
from tests.waiting import wait_until

SETTINGS = {
    "search_path": "nothing",
    "default_transaction_isolation": "repeatable read",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "statement_timeout": "300ms",
    "lock_timeout": "300ms",
    "idle_in_transaction_session_timeout": "300ms",
    "idle_session_timeout": "300ms",
    "transaction_timeout": "300ms",
    "client_encoding": "LATIN1",
    "synchronous_commit": "off",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "row_security": "on",
    "session_replication_role": "replica",
    "plan_cache_mode": "force_custom_plan",
    "enable_indexscan": "off",
    "lc_messages": "C",
    "default_text_search_config": "simple",
}
IN_FORCE = {
    "transaction_isolation": "read committed",
    "transaction_read_only": "off",
    "transaction_deferrable": "off",
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_timeout": "0",
    "client_encoding": "UTF8",
    "synchronous_commit": "on",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "array_nulls": "on",
    "row_security": "off",
}
"""What each transaction that writes must see, if the server knows it."""
TIMEOUTS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
ROUNDS = 8
WAYS = ("direct", "transaction pooler", "session pooler")
Opening = Callable[[str], str]


@pytest.fixture
def opening(server: Server, schema: str) -> Iterator[Opening]:
    """Returns the URL of a store as a role sees it, by one of the ways."""
    role = f"{schema}_odd"
    server.ask(f"CREATE ROLE {role} LOGIN SUPERUSER")
    poolers: list[TransactionPooler] = []

    def url(way: str) -> str:
        if way == "direct":
            return server.as_role(role).url(schema)
        poolers.append(TransactionPooler(server.socket_path(), keeps_sessions=way == "session pooler"))
        more = "&pooler=on" if way == "transaction pooler" else ""
        return f"postgresql://{role}@127.0.0.1:{poolers[-1].port}/postgres?schema={schema}{more}"

    yield url
    for pooler in poolers:
        pooler.close()
    wait_until(lambda: server.ask("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", role) == [(0,)])
    server.drop(schema)
    server.ask(f"DROP OWNED BY {role}")
    server.ask(f"DROP ROLE {role}")


def settle(server: Server, schema: str, name: str, value: str) -> None:
    try:
        server.ask(f"ALTER ROLE {schema}_odd SET {name} = '{value}'")
    except psycopg.errors.UndefinedObject:
        pytest.skip(f"This server does not know {name}.")


def use(store: PostgresStore, id: str) -> None:
    """Write and read something of each kind, with texts and bytes that some settings would change."""
    text = f"{id} ü€ \\ '"
    assert store.commit([StartRun(new_run(id, status="running", preview=text, tags={"t": text}))]) == [Accepted()]
    row = store.run(id)
    assert row is not None
    assert (row.preview, row.tags) == (text, {"t": text})
    assert store.commit([append_to(row)]) == [Accepted()]
    (posted,) = store.commit([Delivery(id, "signal", value=b"\\\0'\xff", name=text)])
    assert isinstance(posted, Posted)
    assert [(one.name, one.value) for one in store.inbox(id)] == [(text, b"\\\0'\xff")]
    assert [found.id for found in store.runs(RunFilter(text=f"{id} ü€", limit=1))] == [id]
    store.register_worker(f"w{id}", 1, "h", store.now())
    assert store.renew(f"w{id}", store.now() + 1)
    (claimed,) = store.commit([Claim(id, f"w{id}", 1, ["running"])])
    assert isinstance(claimed, Claimed)
    dump = store.dump(id)
    assert dump is not None
    assert len(dump.events) == 2
    store.commit([ChangeQueue("limit", id, {"concurrency": 1, "rate": 3, "seconds": 0.1}, 1)])
    assert [one.seconds for one in store.queues() if one.name == id] == [0.1]
    takes = store.commit([TakeSlot(id, id, call, f"w{id}", 1) for call in (1, 2)])
    assert [type(one) for one in takes] == [Accepted, NoSlot]
    store.leave(f"w{id}")


def spy_on(server: Server, schema: str) -> None:
    """Let the server note in which settings events are written."""
    names = ", ".join(f"'{name}'" for name in IN_FORCE)
    server.ask(f"CREATE TABLE {schema}.spied (name text, value text)")
    server.ask(
        f"CREATE FUNCTION {schema}.spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"INSERT INTO {schema}.spied SELECT name, pg_catalog.current_setting(name, true) "
        f"FROM pg_catalog.unnest(ARRAY[{names}]) AS name; RETURN NULL; END $$"
    )
    server.ask(f"CREATE TRIGGER spy AFTER INSERT ON {schema}.events EXECUTE FUNCTION {schema}.spy()")
    server.ask(f"ALTER TABLE {schema}.events ENABLE ALWAYS TRIGGER spy")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_role_changes_nothing(server: Server, schema: str, opening: Opening, name: str) -> None:
    settle(server, schema, name, SETTINGS[name])
    for way in WAYS:
        store = PostgresStore(opening(way))
        if way == "direct":
            spy_on(server, schema)
        try:
            use(store, way.split()[0])
        finally:
            store.close()
    known = dict(server.ask("SELECT name, name FROM pg_settings"))
    found = server.ask(f"SELECT DISTINCT name, value FROM {schema}.spied WHERE value IS NOT NULL ORDER BY name")
    assert found == sorted((name, value) for name, value in IN_FORCE.items() if name in known)


@pytest.mark.parametrize("way", WAYS)
def test_no_timeout_of_the_role_ends_what_waits(
    server: Server, schema: str, opening: Opening, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has a lock for longer than any of them; and what rests between two transactions is not ended either."""
    for name in (
        TIMEOUTS if way != "session pooler" else TIMEOUTS[:-1]
    ):  # where options are dropped, nobody can say the last
        server.ask(f"ALTER ROLE {schema}_odd SET {name} = '300ms'")
    if server.ask("SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'"):
        server.ask(f"ALTER ROLE {schema}_odd SET transaction_timeout = '300ms'")
    store = PostgresStore(opening(way))
    rows = []
    for id in ("a", "b"):
        store.commit([StartRun(new_run(id, status="running"))])
        rows.append(store.run(id))
    waits = (
        "SELECT 1 FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock' "
        "AND clock_timestamp() - query_start > interval '600 ms'"
    )
    verdicts: list[Any] = []
    with psycopg.connect(server.uri) as other:
        other.execute(f"LOCK TABLE {schema}.runs IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=lambda: verdicts.extend(store.commit([*map(append_to, rows)])))
        thread.start()
        wait_until(lambda: server.ask(waits, f"{schema}_odd"))
        other.rollback()
    thread.join()
    assert verdicts == [Accepted()] * 2
    assert store.run("a") is not None
    store.close()
    assert not caplog.records


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("way", WAYS)
def test_limits_hold_whatever_isolation_a_role_has(
    server: Server, schema: str, opening: Opening, way: str, level: str
) -> None:
    settle(server, schema, "default_transaction_isolation", level)
    url = opening(way)
    stores = [PostgresStore(url) for _ in range(3)]
    workers = [f"w{place}" for place in range(3)]
    for store, worker in zip(stores, workers, strict=True):
        store.register_worker(worker, 1, "h", 10**18)
    for number in range(ROUNDS):
        queue = f"q{number}"
        stores[0].commit([ChangeQueue(kind, queue, {"concurrency": 2}, 1) for kind in ("queue", "limit")])
        runs = [f"r{number}-{part}" for part in range(6)]
        stores[0].commit([StartRun(new_run(run, queue=queue)) for run in runs])
        claims: list[list[Operation]] = [
            [Claim(run, worker, 1, ["queued"], queued=True) for run in runs[place::3]]
            for place, worker in enumerate(workers)
        ]
        found = [verdict for batch in at_once(stores, claims) for verdict in batch]
        assert sum(isinstance(verdict, Claimed) for verdict in found) == 2
        takes: list[list[Operation]] = [
            [TakeSlot(queue, runs[call], call, worker, 1) for call in (place, 3 + place)]
            for place, worker in enumerate(workers)
        ]
        taken = [verdict for batch in at_once(stores, takes) for verdict in batch]
        assert sum(isinstance(verdict, Accepted) for verdict in taken) == 2
    for store in stores:
        store.close()


def test_a_session_of_a_pooler_that_others_use_is_left_as_it_was(server: Server, schema: str, opening: Opening) -> None:
    url = opening("transaction pooler")
    before = _settings(url)
    store = PostgresStore(url)
    use(store, "a")
    assert _settings(url) == before
    store.close()
    with pytest.raises(StoreUnusable, match="pooler=on"):
        PostgresStore(url.replace("&pooler=on", ""))
    assert _settings(url) == before


def _settings(url: str) -> list[tuple[str, str]]:
    with psycopg.connect(url.partition("&")[0].partition("?")[0], autocommit=True) as connection:
        return connection.execute(
            "SELECT name, setting FROM pg_settings WHERE context IN ('user', 'superuser') AND name NOT LIKE '%.%'"
        ).fetchall()  # one with a dot is there as soon as a session has loaded what it is for
