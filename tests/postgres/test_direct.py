"""A statement sent without psycopg's machinery: it says the same, and leaves the connection as usable."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from everstep.stores.postgres.direct import Direct, done_together
from tests.postgres.server import Server
from tests.waiting import wait_until

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
    wait_until(lambda: not (server.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", connection.info.backend_pid)))
    with pytest.raises((psycopg.errors.ConnectionException, psycopg.errors.AdminShutdown)):
        statement.changed(connection, [1, ["b"], b""])


def test_another_connection_has_it_prepared_as_well(connection: Any, server: Server) -> None:
    statement = Direct("insert", TEXT, "nTb")
    statement.changed(connection, [1, ["a"], b""])
    with psycopg.connect(server.uri, autocommit=True) as other:
        other.execute("CREATE TEMP TABLE kept (number bigint, name text, value bytea)")
        assert statement.changed(other, [1, ["a"], b""]) == 1


def test_what_is_done_together_is_one_transaction(connection: Any) -> None:
    insert, count = Direct("insert", TEXT, "nTb"), Direct("count", "SELECT count(*) FROM kept", "")
    asked: list[Any] = [(insert, [1, ["a", "b"], b""]), (count, [])]
    inserted, counted = done_together(connection, asked)
    assert (inserted.command_tuples, counted.get_value(0, 0)) == (2, (2).to_bytes(8, "big"))
    with pytest.raises(psycopg.errors.UniqueViolation):
        done_together(connection, [(insert, [2, ["c"], b""]), (insert, [2, ["c"], b""]), (count, [])])
    assert connection.execute("SELECT count(*) FROM kept").fetchone() == (2,)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert done_together(connection, [(count, [])])[0].ntuples == 1


def test_what_was_prepared_in_a_transaction_that_failed_is_prepared(connection: Any) -> None:
    insert, wrong = Direct("insert", TEXT, "nTb"), Direct("wrong", "SELECT 1 / $1", "n")
    with pytest.raises(psycopg.errors.DivisionByZero):
        done_together(connection, [(wrong, [0]), (insert, [1, ["a"], b""])])
    assert done_together(connection, [(wrong, [1]), (insert, [1, ["a"], b""])])[1].command_tuples == 1


def test_without_prepared_statements_it_is_the_same(connection: Any) -> None:
    connection.prepare_threshold = None
    insert = Direct("insert", TEXT, "nTb")
    assert insert.changed(connection, [1, ["a"], b""]) == 1
    assert done_together(connection, [(insert, [1, ["b"], b""]), (insert, [1, ["c"], b""])])[1].command_tuples == 1
    assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)


def test_a_connection_that_is_lost_in_the_middle_is_told_as_that(connection: Any, server: Server) -> None:
    sleep, insert = Direct("sleep", "SELECT pg_sleep($1 / 1000.0)", "n"), Direct("insert", TEXT, "nTb")
    done_together(connection, [(insert, [1, ["a"], b""]), (sleep, [0])])
    pid = connection.info.backend_pid
    ending = threading.Timer(0.3, lambda: server.ask("SELECT pg_terminate_backend(%s)", pid))
    ending.start()
    with pytest.raises((psycopg.errors.ConnectionException, psycopg.errors.AdminShutdown)):
        done_together(connection, [(insert, [1, ["b"], b""]), (sleep, [20_000]), (insert, [1, ["c"], b""])])
    ending.join()


def test_much_is_sent_and_answered_at_once(connection: Any) -> None:
    """More than any buffer between here and the server takes: both sides write and read in turn."""
    echo = Direct("echo", "SELECT unnest($1::bytea[])", "B")
    results = done_together(connection, [(echo, [[bytes([number]) * 1_000_000] * 8]) for number in range(6)])
    for number, result in enumerate(results):
        assert result.get_value(7, 0) == bytes([number]) * 1_000_000
