"""What the stores that are a SQLite database do with the connections that atomic steps write through."""

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import MemoryStore
from tests.stores.kit import HARNESSES, Harness, new_run


@pytest.fixture(params=["memory", "sqlite"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each of them."""
    made = HARNESSES[request.param](tmp_path)
    yield made
    made.close()


def items(harness: Harness) -> list[str]:
    connection = harness.store.connect()
    try:
        return [item for (item,) in connection.execute("SELECT item FROM sales")]
    finally:
        connection.close()


def test_what_one_connection_commits_another_one_sees(harness: Harness) -> None:
    first = harness.store.connect()
    first.execute("CREATE TABLE sales (item)")
    first.execute("BEGIN IMMEDIATE")
    first.execute("INSERT INTO sales VALUES ('lamp')")
    first.execute("COMMIT")
    first.close()
    assert items(harness) == ["lamp"]


def test_what_is_not_committed_when_it_is_closed_never_was(harness: Harness) -> None:
    first = harness.store.connect()
    first.execute("CREATE TABLE sales (item)")
    first.execute("BEGIN IMMEDIATE")
    first.execute("INSERT INTO sales VALUES ('lamp')")
    first.close()
    assert items(harness) == []


def test_a_second_writer_is_refused_at_once_and_does_not_wait(harness: Harness) -> None:
    first, second = harness.store.connect(), harness.store.connect()
    first.execute("BEGIN IMMEDIATE")
    with pytest.raises(apsw.BusyError):
        second.execute("BEGIN IMMEDIATE")
    first.execute("ROLLBACK")
    second.execute("BEGIN IMMEDIATE")
    first.close()
    second.close()


def test_the_store_goes_on_beside_its_connections(harness: Harness) -> None:
    connection = harness.store.connect()
    connection.execute("CREATE TABLE sales (item)")
    harness.one(StartRun(new_run("a")))
    assert harness.row("a").id == "a"
    connection.close()


def test_each_store_in_memory_has_a_database_of_its_own() -> None:
    one, other = MemoryStore(), MemoryStore()
    connection = one.connect()
    connection.execute("CREATE TABLE sales (item)")
    connection.close()
    assert one.connect().execute("SELECT count(*) FROM sales").fetchall() == [(0,)]
    with pytest.raises(apsw.SQLError):
        other.connect().execute("SELECT count(*) FROM sales")


def test_every_table_of_a_store_is_protected(tmp_path: Path) -> None:
    """A table that a release adds has to be named in the guard, or atomic steps could write to it."""
    from everstep.stores.sqlite import SqliteStore
    from everstep.stores.sqlite.guard import MARKERS, STORE_TABLES

    store = SqliteStore(tmp_path / "runs.db")
    connection = store.connect()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    connection.close()
    store.close()
    assert tables <= STORE_TABLES | {MARKERS}
