"""Opening a store on PostgreSQL: schemas, migrations by many at once, roles with few rights, and texts that say why."""

import threading
from typing import Any

import psycopg
import pytest

from everstep.cli.mistakes import EXIT_FAILED, exit_status_of
from everstep.errors import Misuse, StoreError, StoreReadOnly, StoreUnusable
from everstep.stores.opening import open_store
from everstep.stores.postgres import PostgresStore, connections
from everstep.stores.postgres.addresses import address_of
from everstep.stores.postgres.opening import script
from everstep.stores.postgres.store import OPEN_ATTEMPTS
from everstep.stores.protocol import Post, Posted, StartRun
from everstep.stores.sql.nul import escaped, unescaped
from tests.postgres.proxy import CuttingProxy
from tests.postgres.server import Server
from tests.stores.kit import PostgresHarness, append_to, new_run, python
from tests.waiting import wait_until


def test_a_store_is_made_once_however_many_open_it(url: str) -> None:
    stores: list[PostgresStore] = []
    problems: list[BaseException] = []

    def opened() -> None:
        try:
            stores.append(PostgresStore(url))
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    threads = [threading.Thread(target=opened) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    assert sum(store.is_new for store in stores) == 1
    assert len({store.entropy for store in stores}) == 1
    assert len(stores[0].entropy) == 32
    for store in stores:
        store.close()


def test_two_schemas_are_two_stores(server: Server, schema: str) -> None:
    other = server.fresh_schema()
    first, second = PostgresStore(server.url(schema)), PostgresStore(server.url(other))
    first.commit([StartRun(new_run("a"))])
    assert first.run("a") is not None
    assert second.run("a") is None
    assert first.entropy != second.entropy
    first.register_worker("w", 1, "h", 1)
    assert not second.is_in_use()
    first.close()
    second.close()
    server.drop(other)


def test_a_store_that_must_be_there_is_not_made(url: str, server: Server, schema: str) -> None:
    with pytest.raises(StoreUnusable, match="There is no store in the schema"):
        open_store(url, create=False)
    assert server.ask("SELECT 1 FROM pg_namespace WHERE nspname = %s", schema) == []


def test_a_schema_of_something_else_is_left_alone(url: str, server: Server, schema: str) -> None:
    server.ask(f"CREATE SCHEMA {schema}")
    server.ask(f"CREATE TABLE {schema}.orders (id int)")
    with pytest.raises(StoreUnusable, match="tables of something else"):
        PostgresStore(url)


def test_a_store_of_a_newer_release_is_left_alone(url: str, server: Server, schema: str) -> None:
    PostgresStore(url).close()
    server.ask(f"UPDATE {schema}.meta SET value = '99' WHERE name = 'schema_version'")
    with pytest.raises(StoreUnusable, match="version 99 of the schema, made by a newer release"):
        PostgresStore(url)


def test_a_role_without_the_right_is_told_what_to_do_and_works_with_what_another_has_made(
    server: Server, schema: str
) -> None:
    server.ask(f"CREATE ROLE {schema}_poor LOGIN")
    poor = server.as_role(f"{schema}_poor").url(schema)
    try:
        with pytest.raises(StoreReadOnly, match="everstep migrate --print"):
            PostgresStore(poor)
        server.ask(script(schema))
        server.ask(f"GRANT USAGE ON SCHEMA {schema} TO {schema}_poor")
        server.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {schema}_poor")
        server.ask(f"GRANT USAGE, SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}_poor")
        store = PostgresStore(poor)
        assert not store.is_new
        store.commit([StartRun(new_run("a"))])
        store.register_worker("w", 1, "h", 1)
        assert store.run("a") is not None
        store.close()
    finally:
        server.drop(schema)
        server.ask(f"DROP ROLE {schema}_poor")


@pytest.mark.parametrize("wrong", ["?schema=Upper", "?schema=pg_mine", "?schema=a;b", "?pooler=maybe"])
def test_a_url_that_says_nonsense_is_refused(wrong: str) -> None:
    with pytest.raises(Misuse):
        address_of(f"postgresql://localhost/x{wrong}")


def test_what_is_ours_in_a_url_is_taken_out_and_passwords_are_not_shown() -> None:
    address = address_of("postgresql://ann:secret@db:5433/shop?sslmode=require&schema=runs&pooler=on&password=other")
    assert address.server == "postgresql://ann:secret@db:5433/shop?sslmode=require&password=other"
    assert (address.schema, address.pooler) == ("runs", True)
    assert address.shown == "postgresql://ann@db:5433/shop?sslmode=require&schema=runs"
    assert address_of("postgresql://ann:se@cr/et@db/shop").shown == "postgresql://ann@db/shop"


@pytest.mark.parametrize(
    "password",
    ["Hunter2%zz", "Hunter2%", "Hunter2 x", "Hunter2?zz", "Hunter2/zz", "Hunter2#zz", "Hunter2@zz", "Hunter2"],
)
@pytest.mark.parametrize("form", ["postgresql://ann:{}@127.0.0.1:1/x", "postgresql://ann@127.0.0.1:1/x?password={}"])
def test_a_password_that_cannot_be_read_is_not_shown_either(form: str, password: str) -> None:
    with pytest.raises((Misuse, StoreError)) as told:
        PostgresStore(form.format(password))
    error: BaseException | None = told.value
    while error is not None:
        assert "Hunter2" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StoreError, match=r"postgresql://nobody@127\.0\.0\.1:1/x cannot be reached") as found:
        PostgresStore("postgresql://nobody:hush@127.0.0.1:1/x")
    assert exit_status_of(found.value) == EXIT_FAILED, "asking again may help, so a supervisor goes on asking"


@pytest.mark.parametrize("moment", ["request", "reply"])
@pytest.mark.parametrize("text", [b"pg_namespace", b"BEGIN", b"CREATE TABLE", b"COMMIT"])
def test_a_connection_that_is_lost_while_a_store_is_opened_is_made_again(
    server: Server, schema: str, moment: Any, text: bytes
) -> None:
    proxy = CuttingProxy(server.socket_path())
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?schema={schema}"
    try:
        proxy.cut_once(moment, text)
        PostgresStore(url).close()
        assert proxy.cuts == 1
        PostgresStore(url).close()
    finally:
        proxy.close()


@pytest.mark.parametrize("kind", ["cancel", "terminate"])
def test_one_statement_that_is_cut_off_does_not_keep_a_store_from_being_opened(
    server: Server, schema: str, kind: str
) -> None:
    url = server.url(schema)
    PostgresStore(url).close()
    opened: list[PostgresStore] = []
    with psycopg.connect(server.uri) as lock:
        lock.execute(f"LOCK TABLE {schema}.meta IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=lambda: opened.append(PostgresStore(url)))
        thread.start()
        shoot = (
            f"SELECT pg_{kind}_backend(pid) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND application_name LIKE 'everstep %%'"
        )
        wait_until(lambda: server.ask(shoot))
        lock.rollback()
    thread.join()
    assert len(opened) == 1
    opened[0].close()


def test_a_store_that_cannot_be_opened_in_several_attempts_says_so_and_promises_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def cancelled(*_: object, **__: object) -> bool:
        attempts.append(1)
        raise psycopg.errors.QueryCanceled("canceling statement")

    monkeypatch.setattr("everstep.stores.postgres.store.migrate", cancelled)
    with pytest.raises(StoreError, match=f"It was tried {OPEN_ATTEMPTS} times") as found:
        PostgresStore(url)
    assert "It is tried again" not in str(found.value)
    assert len(attempts) == OPEN_ATTEMPTS


@pytest.mark.parametrize("text", ["", "a", "\0", "\x1a", "a\0b\x1a1", "\x1a0", "\0\0\x1a\x1a", "é\0"])
def test_any_text_comes_back_as_itself(postgres: PostgresHarness, text: str) -> None:
    assert unescaped(escaped(text)) == text
    row = postgres.start(f"id{text}", preview=text, tags={"t": text}, parent=text)
    assert (row.id, row.preview, row.tags, row.parent) == (f"id{text}", text, {"t": text}, text)
    assert [child.id for child in postgres.store.children(text)] == [row.id]


def test_a_text_that_no_database_takes_fails_alone(postgres: PostgresHarness) -> None:
    from everstep.stores.protocol import Accepted, Failed

    verdicts: list[Any] = postgres.do(StartRun(new_run("a", preview="\ud800")), StartRun(new_run("b")))
    assert isinstance(verdicts[0], Failed)
    assert verdicts[1] == Accepted()


def test_connect_gives_a_connection_of_ones_own(postgres: PostgresHarness) -> None:
    connection = postgres.store.connect()
    assert isinstance(connection, psycopg.Connection)
    assert connection.execute("SHOW synchronous_commit").fetchall() == [("on",)]
    connection.close()
    assert postgres.row(postgres.start("a").id).id == "a"


def test_what_a_role_has_set_for_other_purposes_does_not_count(server: Server, schema: str) -> None:
    server.ask(f"CREATE ROLE {schema}_odd LOGIN SUPERUSER")
    odd = {
        "default_transaction_isolation": "serializable",
        "default_transaction_read_only": "on",
        "statement_timeout": "1ms",
        "client_encoding": "LATIN1",
        "synchronous_commit": "off",
        "search_path": "nothing",
        "DateStyle": "SQL, DMY",
        "IntervalStyle": "sql_standard",
        "TimeZone": "Asia/Kathmandu",
        "bytea_output": "escape",
        "extra_float_digits": "-15",
        "standard_conforming_strings": "off",
        "backslash_quote": "off",
        "transform_null_equals": "on",
        "default_transaction_deferrable": "on",
        "row_security": "off",
        "idle_session_timeout": "1ms",
    }
    if server.ask("SELECT 1 FROM pg_settings WHERE name = 'transaction_timeout'"):
        odd["transaction_timeout"] = "1ms"  # since PostgreSQL 17
    for name, value in odd.items():
        server.ask(f"ALTER ROLE {schema}_odd SET {name} = '{value}'")
    store = PostgresStore(server.as_role(f"{schema}_odd").url(schema))
    try:
        store.commit([StartRun(new_run("ü€", status="running"))])
        assert store.run("ü€") is not None
        store.commit([append_to(store.run("ü€"))])
        assert isinstance(store.commit([Post("ü€", "signal", value=b"\\\0'")])[0], Posted)
        assert [one.value for one in store.inbox("ü€")] == [b"\\\0'"]
        store.register_worker("w", 1, "h", store.now())
        assert store.renew("w", store.now())
        connection = store.connect()
        settings = dict(connection.execute("SELECT name, setting FROM pg_settings").fetchall())
        connection.close()
        assert settings["transaction_isolation"] == "read committed"
        assert settings["synchronous_commit"] == "on"
        assert settings.get("transaction_timeout", "0") == "0"
        assert settings["TimeZone"] == "Asia/Kathmandu", "that is for atomic steps, which write tables of their own"
    finally:
        store.close()
        server.drop(schema)
        server.ask(f"DROP ROLE {schema}_odd")


def test_a_timeout_that_an_older_server_does_not_know_is_not_named_to_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the same address has come to lead to an older server."""
    address = address_of(url)
    monkeypatch.setattr(connections, "SINCE_17", "no_such_timeout")
    monkeypatch.setattr(connections, "VERSION_17", 10**9)
    monkeypatch.setattr(connections, "_since_17", {address.server})
    connections.connect(address, "everstep test", durability="power").close()
    assert connections._since_17 == set()


def test_without_psycopg_it_is_said_what_to_install() -> None:
    code = """
import sys
sys.modules["psycopg"] = None
import everstep
try:
    with everstep.open("postgresql://127.0.0.1:1/x"):
        pass
except everstep.errors.Misuse as error:
    print(error)
"""
    assert "pip install 'everstep[postgres]'" in python(code)
