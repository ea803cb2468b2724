"""Every store keeps checkpoints with their events, the newest few of them, and moves damaged ones to the archive."""

import pytest

from everstep.stores.protocol import Accepted, Append, ArchiveRow, Claim, Refused, RestartRun, RunRow
from tests.stores.kit import Harness, append_to, checkpoint_for, claimed, new_run
from tests.stores.test_conformance import AWKWARD


def appended(harness: Harness, run: str, count: int = 1, **fields: object) -> Append:
    """Append an event with a checkpoint."""
    append = append_to(harness.row(run), count, **fields)
    append.checkpoints = [checkpoint_for(append)]
    assert harness.one(append) == Accepted()
    return append


def archived(row: RunRow, seq: int, what: str = "checkpoints") -> ArchiveRow:
    return ArchiveRow(row.id, row.generation, what, seq, AWKWARD, "a reason", 77)


def test_a_checkpoint_is_written_with_its_event_and_comes_back_as_it_was(harness: Harness) -> None:
    row = harness.start("a", status="running")
    append = append_to(row, 3)
    columns = {"previous": b"\x00\xff", "engine": AWKWARD, "state": b"", "digest": b"\x01" * 16, "complete": 1}
    append.checkpoints = [checkpoint_for(append, 1, **columns)]
    assert harness.store.checkpoint("a", 1) is None
    assert harness.one(append) == Accepted()
    assert harness.store.checkpoint("a", 1) == ("a", 1, 3, *columns.values())
    assert harness.store.events("a", 1)[1:] == append.events


def test_a_refused_append_leaves_no_checkpoint_and_drops_none(harness: Harness) -> None:
    row = harness.start("a", status="running")
    kept = appended(harness, "a").checkpoints
    stale = append_to(row, 1, checkpoints_kept=1)
    stale.checkpoints = [checkpoint_for(stale, seq=50)]
    assert harness.one(stale) == Refused("head")
    fenced = append_to(harness.row("a"), 1, epoch=9, archive=[archived(row, kept[0].seq)])
    fenced.checkpoints = [checkpoint_for(fenced)]
    assert harness.one(fenced) == Refused("fenced")
    assert harness.checkpoints("a") == kept
    assert harness.store.archived("a") == []


@pytest.mark.parametrize("count", [3, 5])
def test_the_newest_few_are_kept_and_the_older_ones_go_with_the_append_that_makes_them_old(
    harness: Harness, count: int
) -> None:
    harness.start("a", status="running")
    harness.start("b", status="running")
    others = appended(harness, "b").checkpoints
    seqs: list[int] = []
    for _ in range(8):
        append = append_to(harness.row("a"), 2, checkpoints_kept=count)
        append.checkpoints = [checkpoint_for(append)]
        assert harness.one(append) == Accepted()
        seqs.append(append.events[-1].seq)
        assert [row.seq for row in harness.checkpoints("a")] == seqs[::-1][:count]
    assert harness.checkpoints("b") == others, "each run for itself"


def test_several_checkpoints_of_one_append_count_one_by_one(harness: Harness) -> None:
    row = harness.start("a", status="running")
    append = append_to(row, 5)
    append.checkpoints = [checkpoint_for(append, place) for place in range(5)]
    harness.one(append)
    assert [one.seq for one in harness.checkpoints("a")] == [6, 5, 4]


def test_appends_of_many_runs_in_one_batch_keep_their_checkpoints(harness: Harness) -> None:
    rows = [harness.start(f"r{number}", status="running") for number in range(9)]
    appends = [append_to(row, 2) for row in rows]
    for append in appends[::2]:
        append.checkpoints = [checkpoint_for(append)]
    assert harness.do(*appends) == [Accepted()] * 9
    for append in appends:
        assert harness.checkpoints(append.run) == list(append.checkpoints)


def test_the_newest_before_a_number_is_found(harness: Harness) -> None:
    row = harness.start("a", status="running")
    append = append_to(row, 6)
    append.checkpoints = [checkpoint_for(append, place) for place in (0, 2, 4)]
    harness.one(append)
    found = [harness.store.checkpoint("a", 1, before) for before in range(1, 9)]
    assert [one.seq if one else 0 for one in found] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert harness.store.checkpoint("a", 2) is None
    assert harness.store.checkpoint("b", 1) is None


def test_a_place_that_is_taken_is_left_alone(harness: Harness) -> None:
    row = harness.start("a", status="running")
    append = append_to(row, 3)
    stray = checkpoint_for(append, seq=5, state=b"stray")
    append.checkpoints = [stray]
    harness.one(append)
    again = append_to(harness.row("a"), 1)
    again.checkpoints = [checkpoint_for(again, state=b"right")]
    assert harness.one(again) == Accepted()
    assert harness.checkpoints("a") == [stray]


def test_a_damaged_checkpoint_is_moved_to_the_archive_with_the_append_that_says_so(harness: Harness) -> None:
    row = harness.start("a", status="running")
    first, second = appended(harness, "a").checkpoints[0], appended(harness, "a").checkpoints[0]
    rows = [archived(row, second.seq), archived(row, first.seq, "events"), archived(row, 99)]
    assert harness.one(append_to(harness.row("a"), 1, archive=rows)) == Accepted()
    assert harness.checkpoints("a") == [first], "what is said of another table leaves this one alone"
    assert harness.store.archived("a") == rows
    assert harness.store.archived("b") == []
    assert harness.one(append_to(harness.row("a"), 1, archive=rows[:1])) == Accepted()
    assert harness.store.archived("a") == [*rows, rows[0]], "nothing in it is overwritten"


def test_a_new_generation_has_checkpoints_of_its_own(harness: Harness) -> None:
    harness.start("a", status="running")
    old = appended(harness, "a").checkpoints
    harness.end("a")
    harness.enter("me")
    row = claimed(harness.one(Claim("a", "me", 5, ("completed",))))
    assert harness.one(RestartRun(row.epoch, new_run("a", generation=2, status="running"))) == Accepted()
    assert harness.checkpoints("a", 2) == []
    for _ in range(4):
        appended(harness, "a")
    assert len(harness.checkpoints("a", 2)) == 3
    assert harness.checkpoints("a", 1) == old


@pytest.mark.parametrize(("first", "last", "expected"), [(1, 3, [1, 2, 3]), (4, 9, [4, 5]), (3, 3, [3]), (6, 9, [])])
def test_a_part_of_a_history_is_read(harness: Harness, first: int, last: int, expected: list[int]) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, 4, body=AWKWARD))
    whole = harness.store.events("a", 1)
    part = harness.store.events("a", 1, first, last)
    assert part == [event for event in whole if event.seq in expected]
    assert harness.store.events("a", 1, first) == [event for event in whole if event.seq >= first]
