"""Old threads and expired items beside open transactions: what a deletion has judged may change meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from everstep.stores.protocol import Accepted, Operation, Refused, Verdict
from everstep.stores.rows.saved import (
    ChangeItems,
    ChangeThread,
    FreeThread,
    SavedItem,
    SavedPart,
    SavedState,
    TakeThread,
)
from tests.stores.kit import PostgresHarness
from tests.waiting import wait_until

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'everstep %%'"


@pytest.fixture
def other(postgres: PostgresHarness) -> Iterator[psycopg.Connection[Any]]:
    """A session of another program, whose transaction the test ends."""
    with psycopg.connect(postgres.server.uri) as made:
        made.execute(f"SET search_path TO {postgres.schema}")
        made.commit()
        yield made


@contextmanager
def waiting(postgres: PostgresHarness, operation: Operation) -> Iterator[list[Verdict]]:
    """Commit an operation, which waits for a lock until the block is left. Then its verdict is in the list."""
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend(postgres.store.commit([operation])))
    thread.start()
    wait_until(lambda: postgres.server.ask(WAITING)[0][0])
    assert not verdicts
    yield verdicts
    thread.join()


def old(number: int, at: int = 5) -> dict[str, Any]:
    state = SavedState("", str(number), "", "", b"body", b"digest", at)
    return {"states": [state], "parts": [SavedPart("", "c", "s", number, b"value", b"digest")]}


FORGET = ChangeThread("t", 100, everything=True, unchanged_since=50)


@pytest.mark.parametrize("was_taken", [True, False], ids=["known", "never taken"])
def test_a_thread_that_is_taken_at_that_moment_is_not_forgotten(
    postgres: PostgresHarness, other: psycopg.Connection[Any], was_taken: bool
) -> None:
    postgres.one(ChangeThread("t", 5, **old(1)))
    postgres.enter("w")
    if was_taken:
        postgres.one(TakeThread("t", "w", 5))
        postgres.one(FreeThread("t", "w", 1))
    other.execute(
        "INSERT INTO saved_threads VALUES ('t', NULL, 1, 60, 60) "
        "ON CONFLICT (thread) DO UPDATE SET epoch = saved_threads.epoch + 1, since = 60"
    )
    with waiting(postgres, FORGET) as verdicts:
        other.commit()
    assert verdicts == [Refused("changed")]
    assert [one.id for one in postgres.store.saved.states("t")] == ["1"]
    assert postgres.store.saved.series("t") == [("", "c", "s")]


def test_what_a_person_saves_at_that_moment_stays_with_its_parts(
    postgres: PostgresHarness, other: psycopg.Connection[Any]
) -> None:
    """A person's change takes no thread, so the deletion cannot wait for it: it deletes what was there before."""
    postgres.one(ChangeThread("t", 5, **old(1)))
    other.execute("INSERT INTO saved_states VALUES ('t', '', '2', '', '', 'body', 'digest', 60)")
    other.execute("INSERT INTO saved_parts VALUES ('t', '', 'c', 's', 2, 'value', 'digest')")
    assert postgres.one(FORGET) == Accepted()
    other.commit()
    assert [one.id for one in postgres.store.saved.states("t")] == ["2"]
    assert [one.number for one in postgres.store.saved.parts("t", "", "c", "s", 9)] == [2]


def test_an_item_that_is_put_at_that_moment_is_not_swept(
    postgres: PostgresHarness, other: psycopg.Connection[Any]
) -> None:
    postgres.one(ChangeItems([SavedItem("n.", "k", b"old", 5, 5, 20, 1.0)]))
    other.execute("UPDATE saved_items SET value = 'new', expires_at = NULL")
    with waiting(postgres, ChangeItems(expired=[("n.", "k", 30)])):
        other.commit()
    found = postgres.store.saved.item("n.", "k", 100)
    assert found is not None
    assert bytes(found.value) == b"new"
