"""What a worker asks again and again is found by an index, whatever else is in the store."""

import re

import pytest

from everstep.stores.sqlite.queries import for_rows, names, query, statements
from tests.stores.kit import SqliteHarness

IDLE = {
    "gone_owners": {"runs_owned"},
    "due_ready_free": {"runs_free"},
    "due_ready_owned": {"runs_owned"},
    "due_timers_free": {"runs_waking"},
    "due_timers_owned": {"runs_owned"},
    "due_deliveries": {"signals_pending"},
    "pending_of_owner": {"signals_pending"},
    "next_wake_free": {"runs_waking"},
    "next_wake_owned": {"runs_owned"},
    "diverged": {"holds_diverged"},
    "holds_open": {"holds_open"},
    "due_notifications": {"notifications_due"},
    "abandoned_notifications": {"notifications_claimed"},
    "next_notification": {"notifications_due"},
    "due_schedules": {"schedules_due"},
    "waiting_schedules": {"schedules_waiting"},
    "next_schedule": {"schedules_due"},
}
"""The statements of an idle worker, and the partial indexes that they may walk: those without ended or waiting runs."""

# Only lists for people, or a whole table that is small.
MAY_SCAN = {
    "holds_all": "a list for people",
    "notifications_all": "a list for people",
    "notifications_undelivered": "a list for people, by the index of what is undelivered",
    "runs": "a list for people, by the index of its order",
    "ties": "few rows of waiters, asked for an export",
    "deletions": "few rows",
    "asking": "a list for people, by the index of such events",
    "counts": "a figure for people, from an index alone",
    "workers": "few rows",
    "places": "few rows of workers",
    "neighbours": "few rows of workers",
    "schedules": "a list for people",
    "mark_restored": "few rows of workers",
    "strays": "a check of the whole store, from an index alone",
    "what_it_is": "the schema",
    "effects": "a list for people, by the index of its order",
    "forget_effects": "the oldest, by the index of their order",
}

TABLES = "runs|signals|events|payloads|checkpoints|archive|holds|followers|workers|effects|waiters|notifications|told"
TABLES += "|tagged|everstep_markers|schedules"
SCAN = re.compile(rf"SCAN ({TABLES})\b(?: USING (?:COVERING )?INDEX (\w+))?")


def plan(sqlite: SqliteHarness, name: str) -> list[str]:
    sql = for_rows(name)[4]
    count = sql.count("?") if "?1" not in sql else max(int(number) for number in re.findall(r"\?(\d+)", sql))
    connection = sqlite.sqlite._reader._connection
    return [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, (None,) * count)]


@pytest.mark.parametrize("name", IDLE)
def test_an_idle_worker_never_walks_ended_or_waiting_runs(sqlite: SqliteHarness, name: str) -> None:
    lines = plan(sqlite, name)
    walked = {index for line in lines for _, index in SCAN.findall(line)}
    assert walked <= IDLE[name], lines
    assert any(index in line for line in lines for index in IDLE[name]), lines


def test_no_statement_walks_a_table_without_a_reason(sqlite: SqliteHarness) -> None:
    for name in set(names()) - set(IDLE) - set(MAY_SCAN) - {"data_version"}:
        lines = plan(sqlite, name)
        assert not any(SCAN.search(line) for line in lines), (name, lines)


def test_many_finished_and_waiting_runs_cost_an_idle_worker_nothing(sqlite: SqliteHarness) -> None:
    """Counts the pages that are looked at, for time is not reliable."""
    connection = sqlite.sqlite._writer.connection
    many = """
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
        INSERT INTO runs SELECT 'r' || i, 'order', '', 1, iif(i % 2, 'completed', 'waiting'), 1, 1, x'00', 1, NULL,
            iif(i % 2, NULL, 9000000 + i), 'default', 0, '{}', NULL, '', '', 0, i, i, NULL, '', NULL, NULL, NULL FROM n
    """
    sqlite.store.run("x")

    def steps() -> int:
        """Return how many instructions of SQLite's machine an idle turn takes."""
        taken = 0

        def count() -> bool:
            nonlocal taken
            taken += 1
            return False

        reader = sqlite.sqlite._reader._connection
        reader.set_progress_handler(count, 1)
        sqlite.due()
        sqlite.store.next_wake(worker="me", everyone=True)
        sqlite.store.pending("me")
        sqlite.store.diverged(["order"], 100)
        sqlite.store.holds()
        sqlite.store.workers()
        reader.set_progress_handler(None)
        return taken

    before = steps()
    connection.execute(many)
    assert steps() < before + 50
    assert sqlite.store.next_wake(worker="me", everyone=True) == 9000002


def test_every_statement_has_a_reason() -> None:
    from importlib.resources import files

    text = files("everstep.stores.sqlite").joinpath("queries.sql").read_text("utf-8")
    for part in text.split("-- name: ")[1:]:
        assert part.splitlines()[1].startswith("-- "), part.splitlines()[0]


def test_a_statement_for_many_rows_keeps_to_powers_of_two() -> None:
    assert query("append_events").endswith("VALUES {rows:8}")
    assert for_rows("append_events")[2].endswith("VALUES (?,?,?,?,?,?,?,?),(?,?,?,?,?,?,?,?)")


def test_runs_with_a_tag_are_found_by_it_and_in_order(sqlite: SqliteHarness) -> None:
    lines = plan(sqlite, "runs_tagged")
    assert any("SEARCH tagged USING PRIMARY KEY (name=? AND value=?" in line for line in lines), lines
    assert not any("TEMP B-TREE FOR ORDER BY" in line for line in lines), lines


def test_deleting_and_moving_runs_walk_no_table(sqlite: SqliteHarness) -> None:
    connection = sqlite.sqlite._reader._connection
    for name, sql in statements("moving.sql").items():
        count = sql.count("?") if "?1" not in sql else max(int(number) for number in re.findall(r"\?(\d+)", sql))
        lines = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, (None,) * count)]
        if name != "dump_waiters":  # few rows: calls that wait just now
            assert not any(SCAN.search(line) for line in lines), (name, lines)
