"""What every store does about damage: looking at the ends of a history, its generations, and what no row knows."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.model.status import STATUSES
from everstep.stores.protocol import (
    Accepted,
    Claim,
    HoldRow,
    MarkRestored,
    NotPosted,
    Post,
    Refused,
    RepairRun,
    RestartRun,
    RunRow,
)
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import (
    Harness,
    PostgresHarness,
    SqliteHarness,
    append_to,
    checkpoint_for,
    claimed,
    events_after,
    new_run,
)
from tests.stores.test_sqlite_faults import break_commit


def test_a_few_events_are_read_by_their_numbers(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, 9))
    whole = harness.store.events("a", 1)
    assert harness.store.events("a", 1, only=[1, 9, 10]) == [whole[0], whole[8], whole[9]]
    assert harness.store.events("a", 1, only=[10, 1]) == [whole[0], whole[9]]
    assert harness.store.events("a", 1, only=[11]) == []
    assert harness.store.events("a", 2, only=[1]) == []
    assert harness.store.events("b", 1, only=[1]) == []


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


def raw(harness: Harness, statement: str) -> None:
    """Change a row as damage does."""
    if isinstance(harness, SqliteHarness):
        harness.sqlite._writer.connection.execute(statement)
    elif isinstance(harness, PostgresHarness):
        with harness.caller() as connection:
            connection.execute(statement.replace("runs", f"{harness.schema}.runs"))
    else:
        pytest.skip("no row of it is ever damaged")


def test_runs_whose_status_is_none_are_found_and_get_no_post(harness: Harness) -> None:
    for status in STATUSES:
        harness.start(status, status=status)
    assert harness.store.runs_without_status(10) == []
    wrong = ["", "Held", "a", "cancelled ", "complete", "faile", "heldd", "queue", "runninG", "waitinh", "zzz"]
    for number, status in enumerate(wrong):
        harness.start(f"r{number}")
        raw(harness, f"UPDATE runs SET status = '{status}' WHERE id = 'r{number}'")
    assert sorted(harness.store.runs_without_status(100)) == sorted(f"r{number}" for number in range(len(wrong)))
    assert len(harness.store.runs_without_status(3)) == 3
    assert harness.one(Post("r9", "signal", "go")) == NotPosted("waitinh")  # type: ignore[arg-type]
    assert harness.store.signals("r9") == []
    row = claimed(harness.one(Claim("r9", "me", 1, ["waitinh"])))  # type: ignore[list-item]
    assert row.epoch == 1


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


# -- repairs --------------------------------------------------------------------------------------------------------
def repair_of(row: RunRow, keep: int, **fields: Any) -> RepairRun:
    """Return a repair that cuts a run's history after an event and appends one that tells of it."""
    kept = events_after(1, new_run(row.id).event.digest, keep - 1)
    digest = kept[-1].digest if kept else new_run(row.id).event.digest
    (event,) = events_after(keep, digest, 1, b'{"repaired":true}')
    new = msgspec.structs.replace(row, status="queued", head_seq=event.seq, head_digest=event.digest)
    expected: dict[str, Any] = {"epoch": row.epoch, "worker": "me", "at": 500, "row": new, "keep": keep, "event": event}
    return RepairRun(**(expected | {"why": "a bad disk"} | fields))


def damaged_run(harness: Harness) -> RunRow:
    """Start a run with seven events, two payloads and three deliveries, of which two are consumed."""
    row = harness.start("a", status="running", epoch=3, payloads=[("good", b"1"), ("bad", b"2")])
    for name in "xyz":
        harness.one(Post("a", "signal", name))
    harness.one(append_to(row, 6, consumed=[1, 2]))
    return harness.row("a")


def test_a_repair_archives_what_it_takes_away_and_fences_whoever_drove_the_run(harness: Harness) -> None:
    row = damaged_run(harness)
    events = harness.store.events("a", 1)
    repair = repair_of(row, 4, payloads=["bad", "none"], pending=[2, 3, 99])
    assert harness.one(repair) == Accepted()
    after = harness.row("a")
    assert after == msgspec.structs.replace(repair.row, epoch=4, owner=None)
    assert harness.store.events("a", 1) == [*events[:4], repair.event]
    assert [harness.store.payload("a", digest) for digest in ("good", "bad")] == [b"1", None]
    assert [delivery.state for delivery in harness.store.signals("a")] == ["consumed", "pending", "pending"]
    archived = harness.store.archived("a")
    assert [(one.what, one.seq, one.generation) for one in archived] == [
        ("run", 7, 1), ("event", 5, 1), ("event", 6, 1), ("event", 7, 1), ("payload", 0, 1),
    ]  # fmt: skip
    assert {(one.run, one.why, one.at) for one in archived} == {("a", "a bad disk", 500)}
    assert archived[0].columns()["head_digest"] == row.head_digest
    assert [tuple(one.columns().values()) for one in archived[1:4]] == [("a", 1, *event) for event in events[4:]]
    assert archived[4].columns() == {"run": "a", "digest": "bad", "value": b"2"}
    assert harness.one(append_to(row)) == Refused("fenced")
    assert harness.store.archived("b") == []


def test_a_repair_archives_the_checkpoints_of_what_it_takes_away(harness: Harness) -> None:
    row = harness.start("a", status="running")
    append = append_to(row, 6)
    append.checkpoints = [checkpoint_for(append, place) for place in (1, 2, 4)]
    append.checkpoints_kept = 3
    assert harness.one(append) == Accepted()
    kept = append.checkpoints[:2]
    assert harness.one(repair_of(harness.row("a"), 4)) == Accepted()
    assert sorted(harness.checkpoints("a")) == kept
    archived = [one for one in harness.store.archived("a") if one.what == "checkpoint"]
    assert [one.columns() for one in archived] == [append.checkpoints[2]._asdict()]
    assert archived[0][:4] == ("a", 1, "checkpoint", 6)


def test_a_repair_of_a_run_that_is_not_as_expected_changes_nothing(harness: Harness) -> None:
    row = damaged_run(harness)
    before = (harness.row("a"), harness.store.events("a", 1))
    harness.enter("you", 10_000)
    assert harness.one(repair_of(row, 4, epoch=2)) == Refused("fenced")
    harness.one(Claim("a", "you", 1, ["running"]))
    taken = harness.row("a")
    assert harness.one(repair_of(taken, 4)) == Refused("fenced"), "somebody alive drives it"
    assert harness.one(repair_of(taken, 4, worker="you", at=2)) == Accepted()
    assert harness.one(repair_of(new_run("b").row, 1)) == Refused("missing")
    assert len(harness.store.archived("a")) == 4
    assert before[1][:4] == harness.store.events("a", 1)[:4]


def test_a_repair_resolves_the_hold_and_may_leave_the_history_as_it_is(harness: Harness) -> None:
    row = damaged_run(harness)
    hold = HoldRow(id="h", run="a", reason="damaged", created_at=1)
    told = NotificationRow(id="n", hold="h", run="a", target="t")
    harness.one(append_to(row, 0, status="held", hold=hold, notifications=[told]))
    row = harness.row("a")
    resolved = msgspec.structs.replace(hold, resolved_at=5, resolution="repair", by="ann", note="n")
    same = msgspec.structs.replace(row, workflow="order")
    assert harness.one(RepairRun(row.epoch, "me", 9, same, 7, hold=resolved)) == Accepted()
    assert harness.store.holds(run="a") == []
    assert [one.state for one in harness.store.notifications(undelivered_only=False)] == ["dropped"]
    assert [one.what for one in harness.store.archived("a")] == ["run"]
    assert len(harness.store.events("a", 1)) == 7


def test_a_held_run_is_restarted_only_with_the_resolution_of_its_hold(harness: Harness) -> None:
    row = harness.start("a", status="running")
    hold = HoldRow(id="h", run="a", reason="damaged", created_at=1)
    told = NotificationRow(id="n", hold="h", run="a", target="t")
    harness.one(append_to(row, 0, status="held", hold=hold, notifications=[told]))
    row = claimed(harness.one(Claim("a", "me", 1, ["held"])))
    assert harness.one(RestartRun(row.epoch, new_run("a", generation=2))) == Refused("fenced")
    resolved = msgspec.structs.replace(hold, resolved_at=5, resolution="restart")
    assert harness.one(RestartRun(row.epoch, new_run("a", generation=2), resolved)) == Accepted()
    assert harness.store.holds(run="a") == []
    assert [one.state for one in harness.store.notifications(undelivered_only=False)] == ["dropped"]
    assert harness.row("a").generation == 2


def test_a_restore_is_counted_while_nobody_is_at_work(harness: Harness) -> None:
    assert harness.store.restores() == 0
    assert not harness.store.is_in_use()
    assert harness.one(MarkRestored(0)) == Accepted()
    assert harness.one(MarkRestored(0)) == Refused("fenced"), "it was done"
    assert harness.one(MarkRestored(1)) == Accepted()
    harness.enter("you")
    assert harness.store.is_in_use()
    assert harness.one(MarkRestored(2)) == Refused("fenced"), "somebody is at work"
    assert harness.store.restores() == 2
    harness.kill("you")
    harness.store.bury_dead(1)
    assert harness.one(MarkRestored(2)) == Accepted()


def test_each_restore_begins_another_life_which_no_other_store_has(harness: Harness) -> None:
    first = harness.store.life()
    assert first == f"{harness.store.entropy[:16]}.0"
    lives = {first}
    for number in range(3):
        harness.one(MarkRestored(number + 1))
        assert harness.store.life() in lives, "it was refused"
        harness.one(MarkRestored(number))
        assert harness.store.life().endswith(f".{number + 1}")
        lives.add(harness.store.life())
    assert len({life.partition(".")[0] for life in lives}) == 4


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_commit_of_a_repair_is_read_back(
    sqlite: SqliteHarness, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    row = damaged_run(sqlite)
    break_commit(sqlite, monkeypatch, after=after)
    assert sqlite.one(repair_of(row, 4)) == Accepted()
    assert [one.what for one in sqlite.store.archived("a")].count("run") == 1
    break_commit(sqlite, monkeypatch, after=after)
    assert sqlite.one(MarkRestored(0)) == Accepted()
    assert sqlite.store.restores() == 1
