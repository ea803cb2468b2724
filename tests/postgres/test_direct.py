"""A statement sent without psycopg's machinery: it says the same, and leaves the connection as usable."""

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everstep.stores.postgres.direct import Direct
from tests.postgres.server import Server

TEXT = "INSERT INTO kept SELECT $1, unnest($2::text[]), $3"


@pytest.fixture
def connection(server: Server) -> Iterator[Any]:
    with psycopg.connect(server.uri, autocommit=True) as made:
        made.execute("CREATE TEMP TABLE kept (number bigint, name text UNIQUE, value bytea)")
        yield made


def test_it_writes_what_it_is_given_and_counts_the_rows(connection: Any) -> None:
    statement = Direct("insert", TEXT, "nTb")
    assert statement.changed(connection, [1, ["a", "b\0c"], b"\0"]) == 2
    assert statement.changed(connection, [None, [None], None]) == 1
    assert statement.changed(connection, [2, [], b""]) == 0
    found = connection.execute("SELECT * FROM kept ORDER BY number, name").fetchall()
    assert found == [(1, "a", b"\0"), (1, "b\x1a0c", b"\0"), (None, None, None)]


def test_an_error_of_the_server_is_the_same_error_and_the_connection_goes_on(connection: Any) -> None:
    statement = Direct("insert", TEXT, "nTb")
    statement.changed(connection, [1, ["a"], b""])
    with pytest.raises(psycopg.errors.UniqueViolation):
        statement.changed(connection, [1, ["a"], b""])
    assert statement.changed(connection, [1, ["b"], b""]) == 1
    with pytest.raises(psycopg.errors.SyntaxError):
        Direct("wrong", "INSERT INTO", "").changed(connection, [])
    assert connection.execute("SELECT count(*) FROM kept").fetchone() == (2,)


def test_a_value_that_cannot_be_sent_is_not(connection: Any) -> None:
    statement = Direct("insert", TEXT, "nTb")
    for values in ([2**63, ["a"], b""], [1, ["\ud800"], b""]):
        with pytest.raises(Exception, match=r"int|argument|surrogates"):
            statement.changed(connection, values)
    assert statement.changed(connection, [1, ["a"], b""]) == 1


def test_a_lost_connection_is_told_as_that(connection: Any, server: Server) -> None:
    statement = Direct("insert", TEXT, "nTb")
    statement.changed(connection, [1, ["a"], b""])
    server.ask("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
    while server.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", connection.info.backend_pid):
        time.sleep(0.01)
    with pytest.raises((psycopg.errors.ConnectionException, psycopg.errors.AdminShutdown)):
        statement.changed(connection, [1, ["b"], b""])


def test_another_connection_has_it_prepared_as_well(connection: Any, server: Server) -> None:
    statement = Direct("insert", TEXT, "nTb")
    statement.changed(connection, [1, ["a"], b""])
    with psycopg.connect(server.uri, autocommit=True) as other:
        other.execute("CREATE TEMP TABLE kept (number bigint, name text, value bytea)")
        assert statement.changed(other, [1, ["a"], b""]) == 1
