"""What every store does with operations in a caller's own transaction."""

from collections.abc import Iterator
from typing import Any

import pytest

from everstep.errors import Misuse
from everstep.stores.protocol import Accepted, Existing, NotPosted, Post, Posted, StartRun
from tests.stores.kit import Harness, new_run
from tests.waiting import wait_until


@pytest.fixture
def connection(harness: Harness) -> Iterator[Any]:
    """A caller's own connection. A store in memory refuses any."""
    caller = harness.caller()
    if caller is None:
        with pytest.raises(Misuse, match="no database"):
            harness.store.write_in(object(), [])
        pytest.skip("no connection leads to a store in memory")
    yield caller
    caller.close()


def post(run: str, id: str = "") -> Post:
    return Post(run, "signal", "n", id, b"1", 3)


def test_what_is_written_there_is_there_when_the_caller_commits(harness: Harness, connection: Any) -> None:
    connection.execute("BEGIN")
    new = new_run("a", tags={"t": "1"}, payloads=[("d", b"v")])
    verdicts = harness.store.write_in(connection, [StartRun(new), post("a")])
    assert verdicts[0] == Accepted()
    assert isinstance(verdicts[1], Posted)
    assert harness.store.run("a") is None
    connection.execute("COMMIT")
    assert harness.row("a") == new.row
    assert len(harness.store.events("a", 1)) == 1
    assert harness.store.payload("a", "d") == b"v"
    assert [one.number for one in harness.store.inbox("a")] == [verdicts[1].number]
    assert harness.due() == ["a"]


def test_what_is_written_there_is_not_there_when_the_caller_rolls_back(harness: Harness, connection: Any) -> None:
    harness.start("b")
    connection.execute("BEGIN")
    harness.store.write_in(connection, [StartRun(new_run("a")), post("b")])
    connection.execute("ROLLBACK")
    assert harness.store.run("a") is None
    assert harness.store.inbox("b") == []


def test_verdicts_are_as_of_that_transaction(harness: Harness, connection: Any) -> None:
    there = harness.start("a")
    harness.start("b", status="running")
    harness.end("b")
    connection.execute("BEGIN")
    write = harness.store.write_in
    assert write(connection, [StartRun(new_run("a", preview="other"))]) == [Existing(there)]
    assert write(connection, [post("b"), post("none")]) == [NotPosted("completed"), NotPosted(None)]
    first, second = write(connection, [post("a", "i"), post("a", "i")])
    assert isinstance(first, Posted)
    assert second == Posted(first.number, duplicate=True)
    connection.execute("COMMIT")
    assert harness.row("a") == there
    assert len(harness.store.inbox("a")) == 1


def test_what_fails_leaves_the_caller_s_transaction_as_it_was(harness: Harness, connection: Any) -> None:
    broken = new_run("b")
    broken.row.head_seq = 9
    connection.execute("BEGIN")
    harness.store.write_in(connection, [StartRun(new_run("before"))])
    with pytest.raises(Misuse):
        harness.store.write_in(connection, [StartRun(new_run("a")), StartRun(broken)])
    harness.store.write_in(connection, [StartRun(new_run("after"))])
    connection.execute("COMMIT")
    assert [harness.store.run(run) is not None for run in ("before", "a", "b", "after")] == [True, False, False, True]


def test_others_notice_what_the_caller_has_committed(harness: Harness, connection: Any) -> None:
    harness.store.changed()
    connection.execute("BEGIN")
    harness.store.write_in(connection, [StartRun(new_run("a"))])
    assert not harness.store.changed()
    connection.execute("COMMIT")
    wait_until(harness.store.changed, "nobody was told")


def test_a_connection_without_an_open_transaction_is_refused(harness: Harness, connection: Any) -> None:
    with pytest.raises(Misuse, match="open transaction"):
        harness.store.write_in(connection, [StartRun(new_run("a"))])
    with pytest.raises(Misuse, match="Connection"):
        harness.store.write_in(object(), [StartRun(new_run("a"))])
    assert harness.store.run("a") is None
