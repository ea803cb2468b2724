"""Whole columns, written at once: what comes in comes out, and the type is the same whatever is in them."""

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.stores.postgres.adapters import adapt
from everstep.stores.postgres.arrays import Blobs, Numbers, Texts, arrays
from tests.postgres.server import Server

KINDS = {"n": "bigint", "t": "text", "b": "bytea"}
BIGINT = st.integers(-(2**63), 2**63 - 1) | st.booleans()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def connection(server: Server) -> Any:
    with psycopg.connect(server.uri, autocommit=True, cursor_factory=psycopg.RawCursor) as made:
        adapt(made)
        yield made


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.none() | BIGINT, st.none() | TEXT, st.none() | st.binary())))
def test_what_comes_in_comes_out(connection: Any, rows: list[tuple[Any, ...]]) -> None:
    asked = "SELECT * FROM unnest($1::bigint[], $2::text[], $3::bytea[])"
    found = connection.execute(asked, arrays("ntb", rows), binary=True).fetchall()
    assert found == rows


@pytest.mark.parametrize(("made", "values"), [(Numbers, [1]), (Texts, ["a"]), (Blobs, [b"a"])])
def test_a_statement_is_prepared_once_whatever_is_in_its_columns(
    connection: Any, made: type[list[Any]], values: list[Any]
) -> None:
    kind = {Numbers: "bigint", Texts: "text", Blobs: "bytea"}[made]
    for column in (made(values), made([None]), made([None, *values]), made()):
        found = connection.execute(f"SELECT $1::{kind}[]", [column], prepare=True, binary=True).fetchall()
        assert found == [(list(column),)]
    prepared = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT $1%'"
    assert connection.execute(prepared).fetchall() == [(1,)]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_that_does_not_fit_is_not_sent(connection: Any, value: int) -> None:
    for column in (Numbers([value]), Numbers([value, None])):
        with pytest.raises(Exception, match=r"int|range|large"):
            connection.execute("SELECT $1::bigint[]", [column])
    assert connection.execute("SELECT 1").fetchall() == [(1,)]
