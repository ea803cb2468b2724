"""Every store keeps answers and entries of streams with the append that they belong to, and gives them as they were."""

import pytest

from everstep.stores.protocol import Accepted, Claim, NotPosted, Post, Posted, Refused, RepairRun, RestartRun, RunRow
from everstep.stores.rows.answers_and_streams import ENTRY_COLUMNS, AnswerRow, Beside, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from tests.stores.kit import Harness, append_to, claimed, new_run
from tests.stores.test_conformance import AWKWARD


def entry(run: str, position: int, name: str = "tokens", **columns: object) -> EntryRow:
    row = EntryRow(run, 1, name, position, 2, "ask#2", 3, 1, 0, 77, AWKWARD, b"\x00" * 16)
    return row._replace(**columns)  # type: ignore[arg-type]


def appended(harness: Harness, run: str, *entries: EntryRow, answers: list[AnswerRow] | None = None) -> None:
    assert harness.one(append_to(harness.row(run), beside=Beside(answers or [], list(entries)))) == Accepted()


def test_entries_are_written_with_their_append_and_come_back_as_they_were(harness: Harness) -> None:
    row = harness.start("a", status="running")
    entries = [entry("a", 1), entry("a", 2, step="", value=b"", first=0, secret=1), entry("a", 1, "other")]
    assert harness.one(append_to(row, 2, beside=Beside([], entries))) == Accepted()
    assert harness.store.stream("a", 1, "tokens") == entries[:2]
    assert harness.store.stream("a", 1, "other") == entries[2:]
    assert harness.store.streams("a", 1) == [("other", 1), ("tokens", 2)]
    assert len(harness.store.events("a", 1)) == 3


def test_an_append_without_events_may_write_entries(harness: Harness) -> None:
    harness.start("a", status="running")
    assert harness.one(append_to(harness.row("a"), 0, beside=Beside([], [entry("a", 1)]))) == Accepted()
    assert harness.row("a").head_seq == 1
    assert harness.store.stream("a", 1, "tokens") == [entry("a", 1)]


def test_entries_are_given_behind_a_position_in_order_and_so_many(harness: Harness) -> None:
    harness.start("a", status="running")
    entries = [entry("a", position, value=b"%d" % position) for position in range(1, 21)]
    appended(harness, "a", *reversed(entries[10:]))
    appended(harness, "a", *entries[:10])
    assert harness.store.stream("a", 1, "tokens") == entries
    assert harness.store.stream("a", 1, "tokens", 7, 5) == entries[7:12]
    assert harness.store.stream("a", 1, "tokens", 20) == []
    assert harness.store.stream_head("a", 1, "tokens") == entries[-1]
    assert harness.store.stream_head("a", 1, "other") is None
    assert harness.store.stream_head("a", 2, "tokens") is None


def test_a_refused_append_writes_no_entry_and_no_answer(harness: Harness) -> None:
    harness.start("a", status="running")
    beside = Beside([AnswerRow("a", 1, 1, 2)], [entry("a", 1)])
    assert harness.one(append_to(harness.row("a"), beside=beside, epoch=7)) == Refused("fenced")
    assert harness.one(append_to(harness.row("a"), 0, beside=beside, expected_seq=9)) == Refused("head")
    assert harness.store.stream("a", 1, "tokens") == []
    assert harness.store.answer("a", 1) is None


def test_a_worker_that_lost_its_run_writes_to_none_of_its_streams(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.enter("other")
    claimed(harness.one(Claim("a", "other", 5, ("running",))))
    assert harness.one(append_to(row, 0, beside=Beside([], [entry("a", 1)]))) == Refused("fenced")
    assert harness.store.streams("a", 1) == []


def test_what_is_there_stays(harness: Harness) -> None:
    """An append that was done, and nobody knew, is done again; and the first answer counts."""
    harness.start("a", status="running")
    appended(harness, "a", entry("a", 1), answers=[AnswerRow("a", 4, 1, 2)])
    appended(harness, "a", entry("a", 1, value=b"other"), entry("a", 2), answers=[AnswerRow("a", 4, 1, 3)])
    assert harness.store.stream("a", 1, "tokens") == [entry("a", 1), entry("a", 2)]
    assert harness.store.answer("a", 4) == AnswerRow("a", 4, 1, 2)


def test_an_answer_is_found_by_its_run_and_number(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.start("b", status="running")
    appended(harness, "a", answers=[AnswerRow("a", 1, 1, 2), AnswerRow("a", 3, 1, 2)])
    assert harness.store.answer("a", 3) == AnswerRow("a", 3, 1, 2)
    assert harness.store.answer("a", 2) is None
    assert harness.store.answer("b", 3) is None


def test_many_runs_write_beside_their_events_in_one_batch(harness: Harness) -> None:
    runs = [f"r{number}" for number in range(9)]
    for run in runs:
        harness.start(run, status="running")
    units = [append_to(harness.row(run), beside=Beside([AnswerRow(run, 1, 1, 2)], [entry(run, 1)])) for run in runs]
    assert harness.do(*units) == [Accepted()] * 9
    assert [harness.store.stream(run, 1, "tokens") for run in runs] == [[entry(run, 1)] for run in runs]
    assert [harness.store.answer(run, 1) for run in runs] == [AnswerRow(run, 1, 1, 2) for run in runs]


def test_an_ended_run_and_a_restarted_one_keep_what_they_wrote(harness: Harness) -> None:
    harness.start("a", status="running")
    appended(harness, "a", entry("a", 1), answers=[AnswerRow("a", 1, 1, 2)])
    assert harness.end("a", beside=Beside([], [entry("a", 2)])) == Accepted()
    assert harness.one(RestartRun(harness.row("a").epoch, new_run("a", generation=2))) == Accepted()
    assert harness.store.stream("a", 1, "tokens") == [entry("a", 1), entry("a", 2)]
    assert harness.store.streams("a", 2) == []
    assert harness.store.answer("a", 1) == AnswerRow("a", 1, 1, 2)


@pytest.mark.parametrize("keep", [2, 3])
def test_a_repair_archives_the_entries_that_belong_to_lost_events_and_forgets_their_answers(
    harness: Harness, keep: int
) -> None:
    harness.start("a", status="running")
    entries = [entry("a", number, seq=number + 1) for number in (1, 2, 3)]
    appended(harness, "a", entries[0], answers=[AnswerRow("a", 1, 1, 2)])
    appended(harness, "a", entries[1], answers=[AnswerRow("a", 2, 1, 3)])
    appended(harness, "a", entries[2], answers=[AnswerRow("a", 3, 1, 4)])
    row = harness.row("a")
    last = harness.store.events("a", 1)[keep - 1]
    good = RunRow(id="a", workflow="order", status="queued", head_seq=last.seq, head_digest=last.digest)
    assert harness.one(RepairRun(row.epoch, "me", 50, good, keep)) == Accepted()
    assert harness.store.stream("a", 1, "tokens") == entries[: keep - 1]
    assert [harness.store.answer("a", number) is not None for number in (1, 2, 3)] == [
        number < keep for number in (1, 2, 3)
    ]
    archived = [one for one in harness.store.archived("a") if one.what == "entry"]
    assert [one.seq for one in archived] == list(range(keep + 1, 5))
    assert all(isinstance(one, ArchiveRow) and len(ENTRY_COLUMNS) == 12 for one in archived)


def test_a_request_is_delivered_once_for_its_id_and_apart_from_signals(harness: Harness) -> None:
    harness.start("a", status="running")
    assert harness.one(Post("a", "request", "n", "i", b"1", 5)) == Posted(1)
    assert harness.one(Post("a", "signal", "n", "i", b"1", 5)) == Posted(2)
    assert harness.one(Post("a", "request", "n", "i", b"2", 6)) == Posted(1, duplicate=True)
    assert harness.end("a") == Accepted()
    assert harness.one(Post("a", "request", "n", "i", b"1", 5)) == NotPosted("completed"), "nothing will answer it"
    assert [one.state for one in harness.store.signals("a")] == ["undelivered", "undelivered"]
