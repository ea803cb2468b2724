"""What waits behind a full queue costs a worker next to nothing."""

import re

import pytest

from everstep.stores.rows.queues import ChangeQueue, QueueRoom
from everstep.stores.sqlite.queries import statements
from tests.stores.kit import SqliteHarness

WALKED = {
    "names_waiting": {"runs_queued"},
    "names_begun": {"runs_begun"},
    "front": {"runs_queued"},
    "begun": {"runs_begun"},
    "begun_by": {"runs_begun"},
    "begun_with_key": {"runs_begun"},
    "waiting": {"runs_queued"},
    "come_due": {"runs_queued"},
    "count_waiting": {"runs_queued"},
}
SCAN = re.compile(r"SCAN (runs|workers|queues|slots)\b(?: USING (?:COVERING )?INDEX (\w+))?")
MANY = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
    INSERT INTO runs SELECT 'r' || i, 'order', '', 1, '{status}', 1, 1, x'00', 1, NULL,
        NULL, '{queue}', 0, '{{"key":"ann"}}', NULL, '', '', 0, i, i, NULL, '', NULL, NULL, NULL FROM n
"""


@pytest.mark.parametrize("name", WALKED)
def test_the_statements_about_runs_in_queues_use_their_partial_indexes(sqlite: SqliteHarness, name: str) -> None:
    sql = statements("queues.sql")[name]
    count = max(int(number) for number in [*re.findall(r"\?(\d+)", sql), 0])
    connection = sqlite.sqlite._reader._connection
    lines = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, (None,) * count)]
    assert any(index in line for line in lines for index in WALKED[name]), lines
    walked = {(table, index) for line in lines for table, index in SCAN.findall(line)}
    assert walked <= {("runs", index) for index in WALKED[name]}, lines


def steps(sqlite: SqliteHarness) -> int:
    """Return how many instructions of SQLite's machine one look of an idle worker takes."""
    taken = 0

    def count() -> bool:
        nonlocal taken
        taken += 1
        return False

    reader = sqlite.sqlite._reader._connection
    reader.set_progress_handler(count, 1)
    rooms = sqlite.store.queue_room(at=1_000, worker="me")
    for room in rooms:
        if room.room:
            sqlite.store.queued(room.name, at=1_000, workflows=["order"], limit=min(room.room, 100))
    sqlite.due()
    sqlite.store.next_wake(worker="me", everyone=True)
    reader.set_progress_handler(None)
    return taken


def test_ten_thousand_runs_behind_a_full_queue_cost_an_idle_worker_next_to_nothing(sqlite: SqliteHarness) -> None:
    sqlite.one(ChangeQueue("queue", "mail", {"concurrency": 1}, 1))
    sqlite.start("busy", queue="mail", status="running", owner="you")
    sqlite.start("first", queue="mail", created_at=0)
    before = steps(sqlite)
    sqlite.sqlite._writer.connection.execute(MANY.format(status="queued", queue="mail"))
    assert sqlite.store.queue_room(at=1_000, worker="me") == [QueueRoom("mail", 0)]
    assert steps(sqlite) < before + 50


def test_a_paused_queue_is_not_walked_either(sqlite: SqliteHarness) -> None:
    sqlite.one(ChangeQueue("queue", "mail", {"paused": True}, 1))
    sqlite.start("first", queue="mail", created_at=0)
    before = steps(sqlite)
    sqlite.sqlite._writer.connection.execute(MANY.format(status="queued", queue="mail"))
    assert steps(sqlite) < before + 50


def test_runs_whose_key_is_full_are_passed_over_in_the_index_alone(sqlite: SqliteHarness) -> None:
    sqlite.one(ChangeQueue("queue", "mail", {"per_key": 1}, 1))
    sqlite.start("busy", queue="mail", status="running", owner="you", tags={"key": "ann"})
    sqlite.sqlite._writer.connection.execute(MANY.format(status="queued", queue="mail"))
    sqlite.start("other", queue="mail", created_at=20_000)
    sql = statements("queues.sql")["waiting"]
    connection = sqlite.sqlite._reader._connection
    assert sqlite.store.queued("mail", at=1_000, workflows=["order"], limit=5) == ["other"]
    assert steps(sqlite) < 10_000 * 60, connection.execute("EXPLAIN QUERY PLAN " + sql, (None,) * 4).fetchall()


@pytest.mark.parametrize("status", ["completed", "failed", "held"])
def test_ended_and_held_runs_of_a_queue_cost_nothing(sqlite: SqliteHarness, status: str) -> None:
    sqlite.one(ChangeQueue("queue", "mail", {"concurrency": 5}, 1))
    sqlite.start("first", queue="mail", created_at=0)
    before = steps(sqlite)
    sqlite.sqlite._writer.connection.execute(MANY.format(status=status, queue="mail"))
    assert steps(sqlite) < before + 50


def test_runs_without_a_queue_are_in_none_of_its_indexes(sqlite: SqliteHarness) -> None:
    connection = sqlite.sqlite._writer.connection
    sqlite.start("first", queue="mail", created_at=0)
    before = steps(sqlite)
    connection.execute(MANY.format(status="waiting", queue="default"))
    assert steps(sqlite) < before + 50
