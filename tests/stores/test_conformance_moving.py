"""What every store does about whole runs: finding them, deleting ended ones part by part, moving them elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.stores.protocol import (
    Accepted,
    Claim,
    HoldRow,
    Post,
    Posted,
    Refused,
    RestartRun,
    RunFilter,
    StartRun,
)
from everstep.stores.rows.keys import EffectFilter, KeyChanges, KeyClaim
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.rows.transfer import Arrival, Deleted, DeletePart, ImportRuns, RunDump
from tests.stores.kit import HARNESSES, Harness, SqliteHarness, append_to, checkpoint_for, claimed, new_run
from tests.stores.test_sqlite_faults import break_commit


def found(harness: Harness, **filter: object) -> list[str]:
    return [row.id for row in harness.store.runs(RunFilter(**filter))]  # type: ignore[arg-type]


def dumped(harness: Harness, run: str) -> RunDump:
    dump = harness.store.dump(run)
    assert dump is not None
    return dump


def rich_run(harness: Harness, run: str, status: str = "completed") -> None:
    """Start a run that has something in every table, and let it come to a status."""
    row = harness.start(run, status="running", payloads=[("p1", b"one"), ("p2", b"two")], follower="other")
    append = append_to(row, 5, payloads=[("p3", b"three")])
    append.checkpoints = [checkpoint_for(append)]
    append.keys = KeyChanges(claims=[KeyClaim(f"key-{run}", 3, 2, "fetch", "a", "once")])
    harness.one(append)
    harness.one(Post(run, "signal", "go", "id-1", b"1", 5))
    harness.one(Post(run, "signal", "go", "id-2", b"2", 6))
    numbers = [delivery.number for delivery in harness.store.inbox(run)]
    hold = HoldRow(id=f"h-{run}", run=run, reason="asked", created_at=7)
    told = NotificationRow(id=f"n-{run}", hold=f"h-{run}", run=run, target="shop", next_at=1, created_at=7)
    harness.one(append_to(harness.row(run), consumed=numbers[:1], status="held", hold=hold, notifications=[told]))
    if status != "held":
        resolved = HoldRow(id=f"h-{run}", run=run, reason="asked", resolved_at=8, resolution="retry")
        harness.one(append_to(harness.row(run), status=status, hold=resolved))


def delete(harness: Harness, run: str, limit: int = 1_000) -> list[object]:
    """Delete a run that has ended, and return the verdicts."""
    row = claimed(harness.one(Claim(run, "me", 1, ["completed", "failed", "cancelled"])))
    verdicts: list[object] = []
    while True:
        verdict = harness.one(DeletePart(run, row.epoch, 9, limit))
        verdicts.append(verdict)
        if not isinstance(verdict, Deleted) or verdict.done:
            return verdicts


# -- finding ------------------------------------------------------------------------------------------------------
def test_runs_are_found_by_all_their_tags(harness: Harness) -> None:
    for number in range(6):
        tags = {"team": "blue" if number % 2 else "red", "size": str(number // 3)}
        harness.start(f"r{number}", created_at=number, tags=tags, status="running" if number < 4 else "queued")
    harness.start("bare", created_at=9)
    assert found(harness, tags={"team": "blue"}) == ["r5", "r3", "r1"]
    assert found(harness, tags={"team": "blue", "size": "1"}) == ["r5", "r3"]
    assert found(harness, tags={"team": "blue"}, status=["running"]) == ["r3", "r1"]
    assert found(harness, tags={"team": "blue"}, status=["running", "queued"], limit=2, offset=1) == ["r3", "r1"]
    assert found(harness, tags={"team": "green"}) == []
    assert found(harness, tags={"team": "red' OR 1"}) == []


def test_runs_are_found_by_a_text_in_id_workflow_arguments_or_tags(harness: Harness) -> None:
    harness.start("Order-17", created_at=1, preview='["Ann"]')
    harness.start("b", created_at=2, workflow="reorder", tags={"Team": "Blue"})
    harness.start("c", created_at=3, preview='["100%_"]')
    assert found(harness, text="ORDER") == ["c", "b", "Order-17"]  # `order` is the workflow of the others
    assert found(harness, text="ann") == ["Order-17"]
    assert found(harness, text="team=blue") == ["b"]
    assert found(harness, text="0%_") == ["c"]
    assert found(harness, text="%") == ["c"]
    assert found(harness, text="nowhere") == []


def test_a_list_is_paged_while_runs_arrive(harness: Harness) -> None:
    for number in range(7):
        harness.start(f"r{number}", created_at=number // 2, tags={"a": "b"})
    for filter in ({}, {"tags": {"a": "b"}}, {"status": ["queued"]}, {"text": "r"}):
        seen: list[str] = []
        before = None
        while page := harness.store.runs(RunFilter(before=before, limit=2, **filter)):  # type: ignore[arg-type]
            seen += [row.id for row in page]
            before = (page[-1].created_at, page[-1].id)
            harness.start(f"new-{len(seen)}-{len(filter)}-{next(iter(filter), '')}", created_at=100, tags={"a": "b"})
        assert seen[-7:] == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
        assert len(set(seen)) == len(seen)


# -- deleting -----------------------------------------------------------------------------------------------------
def test_an_ended_run_is_deleted_with_all_but_its_keys(harness: Harness) -> None:
    harness.start("other", status="running")
    rich_run(harness, "a")
    rich_run(harness, "b")
    untouched = dumped(harness, "b")
    moved = dumped(harness, "a")
    delete(harness, "a")
    moved.arrivals = [Arrival("a", 1, 4, 1)]
    moved.effects = []
    harness.one(ImportRuns([moved]))
    (verdict,) = delete(harness, "a")
    assert verdict == Deleted(8 + 3 + 1 + 2 + 1, True)
    store = harness.store
    assert store.run("a") is None
    assert store.generations("a") == []
    assert store.payload("a", "p1") is None
    assert store.checkpoint("a", 1) is None
    assert store.signals("a") == []
    assert store.holds(run="a", open_only=False) == []
    assert store.notifications(run="a", undelivered_only=False) == []
    assert [row.key for row in store.effects(EffectFilter(run="a"))] == ["key-a"]
    assert store.arrival("a") is None
    assert dumped(harness, "b") == untouched
    assert found(harness, text="a") == []
    assert harness.one(StartRun(new_run("a"))) == Accepted()  # the id is free again


def test_a_long_history_is_deleted_part_by_part(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, 100))
    harness.end("a")
    verdicts = delete(harness, "a", limit=30)
    assert [verdict.done for verdict in verdicts if isinstance(verdict, Deleted)] == [False, False, False, True]
    assert all(isinstance(verdict, Deleted) and verdict.rows <= 31 for verdict in verdicts)
    assert harness.store.deletions() == []
    assert harness.store.run("a") is None


def test_a_deletion_that_was_cut_off_is_known(harness: Harness) -> None:
    harness.one(append_to(harness.start("a", status="running"), 50))
    harness.end("a")
    row = claimed(harness.one(Claim("a", "me", 1, ["completed"])))
    assert harness.one(DeletePart("a", row.epoch, 9, 20)) == Deleted(20, False)
    assert harness.store.deletions() == [("a", 1)]
    assert harness.row("a").status == "completed"


def test_what_has_not_ended_or_is_held_or_was_claimed_is_not_deleted(harness: Harness) -> None:
    harness.start("other")
    row = harness.start("a", status="running")
    assert harness.one(DeletePart("a", row.epoch, 9)) == Refused("fenced")
    rich_run(harness, "b", "held")
    assert harness.one(DeletePart("b", harness.row("b").epoch, 9)) == Refused("fenced")
    harness.one(append_to(harness.row("b"), status="completed"))  # its hold is open still
    assert harness.one(DeletePart("b", harness.row("b").epoch, 9)) == Refused("fenced")
    harness.end("a")
    epoch = harness.row("a").epoch
    claimed(harness.one(Claim("a", "me", 1, ["completed"])))
    assert harness.one(DeletePart("a", epoch, 9)) == Refused("fenced")
    assert harness.one(DeletePart("nobody", 0, 9)) == Refused("missing")


def test_the_number_of_a_deleted_delivery_never_comes_back(harness: Harness) -> None:
    harness.start("b", status="running")
    harness.start("a", status="running")
    assert isinstance(last := harness.one(Post("a", "signal", "go", at=1)), Posted)
    harness.end("a")
    delete(harness, "a")
    assert isinstance(next_one := harness.one(Post("b", "signal", "go", at=1)), Posted)
    assert next_one.number > last.number


# -- moving -------------------------------------------------------------------------------------------------------
@pytest.fixture(params=HARNESSES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    folder = tmp_path / "target"
    folder.mkdir()
    harness = HARNESSES[request.param](folder)
    yield harness
    harness.close()


def test_a_run_arrives_as_it_was_with_nobody_who_drives_it(harness: Harness, target: Harness) -> None:
    harness.start("other", status="running")
    rich_run(harness, "a", "running")
    harness.enter("me")
    claimed(harness.one(Claim("a", "me", 1, ["running"])))
    sent = dumped(harness, "a")
    sent.arrivals = [Arrival("a", 1, 4, 1)]
    assert target.one(ImportRuns([sent])) == Accepted()
    assert (target.store.arrival("a"), target.store.arrival("b")) == (Arrival("a", 1, 4, 1), None)
    arrived = dumped(target, "a")
    row = arrived.row
    assert (row.status, row.owner, row.epoch) == ("queued", None, sent.row.epoch + 1)
    assert (row.head_seq, row.head_digest) == (sent.row.head_seq, sent.row.head_digest)
    arrived.row = sent.row
    assert arrived == sent
    assert [len(part) for part in (sent.events, sent.payloads, sent.checkpoints, sent.deliveries, sent.holds)] == [
        8,
        3,
        1,
        2,
        1,
    ]
    assert sent.effects
    assert sent.followers == [("other", 0)]
    assert target.due() == ["a"]
    assert harness.end("a") == Accepted()  # the store that it came from is as it was


def test_nothing_is_imported_over_what_is_there(harness: Harness, target: Harness) -> None:
    harness.start("other")
    rich_run(harness, "a")
    rich_run(harness, "b")
    a, b = dumped(harness, "a"), dumped(harness, "b")
    before = target.start("b", status="running")
    assert target.one(ImportRuns([a, b])) == Refused("taken")
    assert target.store.run("a") is None
    assert target.row("b") == before


def test_a_key_that_is_under_way_is_not_taken_from_somebody_here(harness: Harness, target: Harness) -> None:
    harness.start("other")
    target.start("other")
    rich_run(harness, "a", "running")
    rich_run(target, "a", "running")
    sent = dumped(harness, "a")
    sent.row.id = "z"
    sent.holds = []
    for state in ("under-way", "undoing"):
        sent.effects[0].state = state  # type: ignore[assignment]
        assert target.one(ImportRuns([sent])) == Refused("key")
    assert target.store.run("z") is None


def test_a_delivery_gets_another_number_only_if_its_own_is_taken(harness: Harness, target: Harness) -> None:
    for one in (harness, target):
        one.start("x", status="running")
    harness.start("a", status="running")
    target.one(Post("x", "signal", "go", at=1))
    harness.one(Post("a", "signal", "go", "one", at=1))
    harness.one(Post("a", "signal", "go", "two", at=1))
    target.one(ImportRuns([dumped(harness, "a")]))
    numbers = [one.number for one in target.store.signals("a")]
    assert len({*numbers, 1}) == 3
    assert [one.id for one in target.store.inbox("a")] == ["one", "two"]
    assert isinstance(later := target.one(Post("x", "signal", "go", at=1)), Posted)
    assert later.number > max(numbers)
    assert target.one(Post("a", "signal", "go", "two", at=1)).duplicate  # type: ignore[union-attr]


@pytest.mark.parametrize("after", [False, True])
def test_an_import_whose_commit_failed_is_done_once(
    sqlite: SqliteHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    source = HARNESSES["memory"](tmp_path)
    source.start("other")
    rich_run(source, "a")
    break_commit(sqlite, monkeypatch, after=after)
    assert sqlite.one(ImportRuns([dumped(source, "a")])) == Accepted()
    assert sqlite.row("a").status == "completed"
    assert len(sqlite.store.events("a", 1)) == 8


def test_a_run_is_tied_to_whom_it_follows_and_never_to_itself(harness: Harness) -> None:
    for run in ("a", "b"):
        harness.start(run, status="running", arguments="x")
    follows = [new_run(run, arguments="x", follower="b", follower_call=1) for run in ("a", "b")]
    harness.one(append_to(harness.row("b"), 1, starts=follows))
    assert dumped(harness, "b").followers == [("b", 1)]
    assert harness.store.ties("b") == ["a"]
    assert harness.store.ties("a") == ["b"]


def test_the_index_of_tags_is_what_the_rows_say(tmp_path: Path) -> None:
    harness = SqliteHarness(tmp_path)

    def indexed() -> list[tuple[str, str, str]]:
        connection = harness.store.connect()
        rows = connection.execute("SELECT name, value, run FROM tagged ORDER BY 1, 2, 3").fetchall()
        connection.close()
        return list(rows)

    harness.start("a", status="running", created_at=1, tags={"team": "blue", "size": "1"})
    harness.do(*[StartRun(new_run(run, created_at=1, tags={"team": "red"})) for run in ("b", "c")])
    harness.one(append_to(harness.row("a"), starts=[new_run("d", tags={"team": "green"})]))
    begun = [
        ("size", "1", "a"),
        ("team", "blue", "a"),
        ("team", "green", "d"),
        ("team", "red", "b"),
        ("team", "red", "c"),
    ]
    assert indexed() == begun
    harness.end("a")
    row = claimed(harness.one(Claim("a", "me", 1, ["completed"])))
    harness.one(RestartRun(row.epoch, new_run("a", generation=2, created_at=1, tags={"team": "black"})))
    assert indexed() == [("team", "black", "a"), *begun[2:]]
    harness.end("a")
    delete(harness, "a")
    assert indexed() == begun[2:]
    (tmp_path / "other").mkdir()
    other = SqliteHarness(tmp_path / "other")
    assert other.one(ImportRuns([dumped(harness, "d")])) == Accepted()
    assert found(other, tags={"team": "green"}) == ["d"]
    harness.close()
    other.close()


def test_runs_that_ask_for_an_approval_are_found_until_they_have_ended(harness: Harness) -> None:
    for run in ("a", "b", "c", "d"):
        harness.start(run, status="running")
    for run in ("c", "a", "d"):
        harness.one(append_to(harness.row(run), 2, kind="approval_asked", status="waiting"))
    harness.one(append_to(harness.row("d"), status="completed"))
    assert harness.store.asking() == ["a", "c"]
