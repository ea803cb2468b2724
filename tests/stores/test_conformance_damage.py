"""What every store does about damage: looking at the ends of a history, its generations, and what no row knows."""

from pathlib import Path

from everstep.stores.protocol import Claim, RestartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import Harness, SqliteHarness, append_to, claimed, new_run


def test_a_few_events_are_read_by_their_numbers(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, 9))
    whole = harness.store.events("a", 1)
    assert harness.store.events("a", 1, [1, 9, 10]) == [whole[0], whole[8], whole[9]]
    assert harness.store.events("a", 1, [10, 1]) == [whole[0], whole[9]]
    assert harness.store.events("a", 1, [11]) == []
    assert harness.store.events("a", 2, [1]) == []
    assert harness.store.events("b", 1, [1]) == []


def test_the_generations_of_a_run_are_those_with_events(harness: Harness) -> None:
    assert harness.store.generations("a") == []
    harness.start("a", status="running")
    harness.start("b")
    harness.end("a")
    row = claimed(harness.one(Claim("a", "me", 1, ["completed"])))
    harness.one(RestartRun(row.epoch, new_run("a", generation=2)))
    assert harness.store.generations("a") == [1, 2]
    assert harness.store.generations("b") == [1]


def test_a_history_has_its_row(harness: Harness) -> None:
    harness.start("a")
    harness.start("b")
    assert harness.store.strays() == []


def test_histories_without_their_rows_are_found(sqlite: SqliteHarness, tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        sqlite.start(run)
    other = SqliteStore(sqlite.path)
    other._writer.connection.execute("DELETE FROM runs WHERE id = 'a'")
    other._writer.connection.execute("UPDATE events SET generation = 7 WHERE run = 'b'")
    other._writer.connection.execute("UPDATE events SET generation = -1 WHERE run = 'c'")
    other.close()
    assert sqlite.store.strays() == [("a", 1), ("b", 7), ("c", -1)]


def test_a_row_with_damaged_texts_is_read_and_says_so(sqlite: SqliteHarness) -> None:
    columns = ("workflow", "version", "owner", "queue", "tags", "parent", "arguments", "current_step", "preview")
    connection = sqlite.sqlite._writer.connection
    for number, column in enumerate(columns):
        sqlite.start(f"r{number}", status="queued", priority=number)
        connection.execute(f"UPDATE runs SET {column} = CAST(x'ff7b' AS TEXT) WHERE id = ?", (f"r{number}",))
    for number in range(len(columns)):
        row = sqlite.row(f"r{number}")
        assert row.damage
        assert row.priority == number
        taken = claimed(sqlite.one(Claim(row.id, "me", 1, ["queued"])))
        assert taken.epoch == 1
        assert bool(taken.damage) == (columns[number] != "owner"), "a claim writes a new owner"
