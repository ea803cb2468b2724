"""Nothing that others put into schemas of the search path is ever called with our role's rights."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import everstep
from everstep.effects import postgres_markers
from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.addresses import address_of
from everstep.stores.postgres.connections import Connection, begin, connect
from everstep.stores.postgres.queries import statements
from everstep.stores.protocol import RunFilter
from tests.postgres.planting import LITERAL, QUALIFIED_OPERATOR, SYNTAX, Planter, operators_in, texts
from tests.postgres.server import Server, server
from tests.waiting import wait_until

PREPARABLE = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH", "(")
SCHEMA = "everstep"
NOT_SAID = {"restart_run": {9: "bigint"}}
"""The types of parameters that a statement leaves to whoever sends it."""


@dataclass(frozen=True)
class Ground:
    """A database in which everything is planted."""

    server: Server
    name: str
    worker: str
    """Who has a store in it, and may call what is planted."""
    clerk: str
    """Who may not: for them, a statement in which a planted name is found is refused."""

    def uri(self, role: str = "") -> str:
        uri = self.server.as_role(role).uri if role else self.server.uri
        return urlsplit(uri)._replace(path=f"/{self.name}").geturl()

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.uri(), autocommit=True) as connection:
            cursor = connection.execute(sql)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def url(self, role: str, **options: str) -> str:
        return Server(self.uri(role)).url(SCHEMA, **options)

    def called(self) -> list[str]:
        """Return the planted functions that were called by sessions that have ended.

        Old servers count with a delay, in order: when a call that came later has been counted, so have all of theirs.
        """
        self.server.wait_for_sessions_to_end("everstep")
        counted = "SELECT funcname FROM pg_stat_user_functions WHERE schemaname = 'public' AND calls > 0"
        self.ask("SELECT public.last_call()")
        names = wait_until(lambda: found if ("last_call",) in (found := self.ask(counted)) else [])
        self.ask("SELECT pg_stat_reset()")
        wait_until(lambda: not self.ask(counted))
        return sorted({name for (name,) in names} - {"last_call"})


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    made = server()
    name = made.fresh_schema()
    mallory, worker, clerk = (f"{name}_{role}" for role in ("mallory", "worker", "clerk"))
    made.ask(f"CREATE DATABASE {name}")
    planted = Ground(made, name, worker, clerk)
    for role in (mallory, worker, clerk):
        made.ask(f"CREATE ROLE {role} LOGIN")
        made.ask(f"ALTER ROLE {role} SET search_path = public, pg_catalog")
    made.ask(f"GRANT CREATE ON DATABASE {name} TO {worker}")
    made.ask(f"ALTER DATABASE {name} SET track_functions = 'all'")
    planted.ask(f"GRANT USAGE, CREATE ON SCHEMA public TO {mallory}")
    made.ask(f"ALTER ROLE {mallory} RESET search_path")
    PostgresStore(planted.url(worker)).close()
    planted.ask(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {clerk}")
    for what in ("TABLES", "SEQUENCES"):
        planted.ask(f"GRANT ALL ON ALL {what} IN SCHEMA {SCHEMA} TO {clerk}")
    with psycopg.connect(planted.uri(mallory), autocommit=True) as connection:
        Planter(connection).plant()
    planted.ask("CREATE FUNCTION public.last_call() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 1; END'")
    planted.ask("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
    planted.ask(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO {worker}")
    yield planted
    made.ask(f"DROP DATABASE {name} WITH (FORCE)")
    for role in (mallory, worker, clerk):
        made.ask(f"DROP ROLE {role}")


# -- each statement ----------------------------------------------------------------------------------------------------
def in_session(ground: Ground) -> Connection:
    return connect(address_of(ground.url(ground.clerk)), "everstep test", durability="power")


def behind_a_pooler(ground: Ground) -> Connection:
    connection = connect(address_of(ground.url(ground.clerk, pooler="on")), "everstep test", durability="power")
    begin(connection)
    return connection


def in_a_callers_transaction(ground: Ground) -> "psycopg.Connection[Any]":
    connection = psycopg.connect(ground.uri(ground.clerk), application_name="everstep test")
    connection.execute(statements(SCHEMA)["take_names"])  # type: ignore[call-overload]
    return connection


def in_a_session_of_the_role(ground: Ground) -> "psycopg.Connection[Any]":
    return psycopg.connect(ground.uri(ground.clerk), application_name="everstep test")


def refuse_planted(connection: "psycopg.Connection[Any]", name: str, text: str) -> None:
    """Let the server find all names of a statement; a planted one may not be used. Nothing is done."""
    with connection.transaction(force_rollback=True):
        count = max([0, *(int(number) for number in re.findall(r"\$(\d+)", text))])
        told = NOT_SAID.get(name, {})
        types = ", ".join(told.get(number, "unknown") for number in range(1, count + 1))
        connection.execute(f"PREPARE {name}{f'({types})' if count else ''} AS {text}")  # type: ignore[call-overload]
        nulls = f"({', '.join(['NULL'] * count)})" if count else ""
        connection.execute(f"EXPLAIN EXECUTE {name}{nulls}")  # type: ignore[call-overload]
        asked = "SELECT pg_catalog.array_to_string(parameter_types, ' ') FROM pg_catalog.pg_prepared_statements"
        found = connection.execute(f"{asked} WHERE pg_catalog.lower(name) OPERATOR(pg_catalog.=) '{name}'").fetchone()  # type: ignore[call-overload]
        assert found is not None
        assert "public." not in str(found[0]), f"{name}: {found[0]}"
        connection.execute(f"DEALLOCATE {name}")  # type: ignore[call-overload]


@pytest.mark.parametrize("way", [in_session, behind_a_pooler, in_a_callers_transaction])
def test_no_statement_of_the_store_names_what_is_planted(
    ground: Ground, way: Callable[[Ground], "psycopg.Connection[Any]"]
) -> None:
    found = {name: text for name, text in statements(SCHEMA).items() if text.startswith(PREPARABLE)}
    assert len(found) > 200
    with way(ground) as connection:
        for name, text in found.items():
            refuse_planted(connection, name, text)


def test_no_statement_beside_a_users_own_names_what_is_planted(ground: Ground) -> None:
    found = {name: text for name, text in postgres_markers.statements(SCHEMA).items() if text.startswith(PREPARABLE)}
    found |= {name: statements(SCHEMA)[name] for name in ("settings_missing", "say_for_transaction", "take_names")}
    assert len(found) > 8
    with in_a_session_of_the_role(ground) as connection:
        for name, text in found.items():
            refuse_planted(connection, name, text)


# -- for real ----------------------------------------------------------------------------------------------------------
async def use_everything(ground: Ground, url: str) -> None:
    """Let an app do what apps do: runs with steps of all kinds, a queue, a limit, a key, a child, an outbox, lists."""

    @everstep.step(effect="repeat", limit="few")
    async def add(one: int, two: int) -> int:
        return one + two

    @everstep.step(effect="once", key="sum:{one}")
    async def pay(one: int) -> int:
        return one

    @everstep.transaction(everstep.STORE)
    def mark(connection: psycopg.Connection[Any]) -> int:
        return 1

    @everstep.workflow
    async def child(number: int) -> int:
        return await add(number, 1)

    @everstep.workflow
    async def flow(number: int) -> int:
        paid = await pay(number)
        marked = await asyncio.to_thread(mark)
        return paid + marked + await child(number) + await everstep.receive("more", int)

    async with everstep.open(url) as app:
        await app.limit("few", concurrency=2)
        await app.queue("line", concurrency=1)
        handle = await app.start(flow, 1, id="r", queue="line")
        with psycopg.connect(ground.uri(ground.worker), application_name="everstep outbox") as connection:
            connection.execute("SELECT")
            await app.signal("r", "more", 3, transaction=connection)
            await app.start(child, 5, id="s", transaction=connection)
            connection.commit()
        assert await handle.result() == 7
        assert await app.run(child, 5, id="s") == 6
        app.store.runs(RunFilter(text="r", tags={"a": "b"}))
        app.store.counts()
        app.store.dump("r")


@pytest.mark.parametrize("pooler", ["off", "on"])
def test_nothing_that_is_planted_is_called(ground: Ground, pooler: str) -> None:
    ground.ask(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    asyncio.run(use_everything(ground, ground.url(ground.worker, pooler=pooler)))
    assert ground.called() == []


def test_what_is_planted_is_called_by_others_and_that_is_seen(ground: Ground) -> None:
    """Without this, the test above could not fail."""
    with psycopg.connect(ground.uri(ground.worker), application_name="everstep other", autocommit=True) as connection:
        connection.execute("SELECT hashtextextended('x', 0), 'a' || 'b'::pg_catalog.text")
    assert "hashtextextended" in ground.called()


# -- the texts ---------------------------------------------------------------------------------------------------------
UNNEST_OF_SEVERAL = re.compile(r"\bunnest\((?=\s*\$\d+::[\w.]+\[\]\s*,)")
"""Syntax: it is always the server's own, and only without a schema."""
OF_STATEMENT = re.compile(r"(\w+) (?:\([\w, ]+\) )?AS (?:MATERIALIZED )?\(")
"""Names that a statement gives to parts of itself."""


def bare_names(text: str) -> set[str]:
    """Return the functions and tables of a statement that have no schema."""
    plain = UNNEST_OF_SEVERAL.sub("(", LITERAL.sub("''", text))
    functions = set(re.findall(r"(?<![\w.\"])([a-z_]\w*)\(", plain)) - SYNTAX
    tables = set(re.findall(r"\b(?:FROM|JOIN|INTO|UPDATE|TABLE) ([a-z_]\w*)\b(?![.(])", plain))
    return functions | (tables - set(OF_STATEMENT.findall(plain)))


def test_functions_and_tables_have_their_schema() -> None:
    found = {name: bare for name, text in texts().items() if (bare := bare_names(text))}
    assert found == {}


def bare_in_markers(text: str) -> set[str]:
    """Return operators, types and collations that have no schema, and words that stand for an operator."""
    plain = QUALIFIED_OPERATOR.sub("", LITERAL.sub("''", text))
    words = re.findall(
        r'(?<!\.)\b(?:text|bytea)\b|COLLATE "|::|\b(?:IN|BETWEEN|LIKE|SIMILAR|DISTINCT FROM|USING) ', plain
    )
    return {*words, *operators_in(re.sub(r"\bSET [^()]*?(?=\bWHERE\b|$)", "", plain))}


def test_beside_a_users_statements_operators_types_and_collations_have_theirs() -> None:
    own = {name: text for name, text in texts().items() if name.startswith("marker ")}
    assert len(own) > 12
    assert {name: bare for name, text in own.items() if (bare := bare_in_markers(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "SELECT hashtextextended($1, 0)",
        "SELECT min(id) FROM everstep.runs",
        "SELECT 1 FROM runs",
        "SELECT * FROM unnest($1::text[])",
        "INSERT INTO runs VALUES ($1)",
    ],
)
def test_a_name_without_a_schema_is_found(text: str) -> None:
    assert bare_names(text)


@pytest.mark.parametrize(
    "text", ["key = $1", "CAST($1 AS text)", 'text COLLATE "C"', "$1::pg_catalog.text", "a IN (1)"]
)
def test_an_operator_or_type_without_a_schema_is_found(text: str) -> None:
    assert bare_in_markers(f"SELECT 1 WHERE {text}")
