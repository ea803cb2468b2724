"""Whole columns, written at once: what comes in comes out, and the statement is the same whatever is in them."""

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.stores.postgres.direct import Direct, done_together, rows_of
from tests.postgres.server import Server

BIGINT = st.integers(-(2**63), 2**63 - 1) | st.booleans()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ALIKE = st.sampled_from(["aa", "bb", "\0", "\x1a", None])
STATEMENT = Direct("table", "SELECT * FROM unnest($1::bigint[], $2::text[], $3::bytea[], $4::text[])", "NTBT")


@pytest.fixture
def connection(server: Server) -> Any:
    with psycopg.connect(server.uri, autocommit=True) as made:
        yield made


def back(connection: Any, statement: Direct, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return what the server makes of columns."""
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    (result,) = done_together(connection, [(statement, columns)])
    return rows_of(result, "ntbt")


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.none() | BIGINT, st.none() | TEXT, st.none() | st.binary(), ALIKE)))
def test_what_comes_in_comes_out(connection: Any, rows: list[tuple[Any, ...]]) -> None:
    assert back(connection, STATEMENT, rows) == rows


def test_a_statement_is_prepared_once_whatever_is_in_its_columns(connection: Any) -> None:
    one, none = (1, "a", b"a", "b"), (None, None, None, None)
    for rows in ([one], [none], [none, one], [one, one], []):
        assert back(connection, STATEMENT, rows) == rows
    prepared = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT * FROM unnest%'"
    assert connection.execute(prepared).fetchall() == [(1,)]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_that_does_not_fit_is_not_sent(connection: Any, value: int) -> None:
    for column in ([value], [value, None]):
        with pytest.raises(Exception, match=r"int|range|large|format"):
            done_together(connection, [(Direct("numbers", "SELECT $1::bigint[]", "N"), [column])])
    assert connection.execute("SELECT 1").fetchall() == [(1,)]
