"""Batches of starts, and of moves: one or two events for each of many runs."""

import pytest

from everstep.stores.protocol import Accepted, Append, Existing, Post, Refused, RunFilter, StartRun
from tests.stores.kit import Harness, append_to, new_run, with_history

COUNTS = (2, 3, 5, 100, 128, 129, 300)


def moves_of(harness: Harness, count: int, name: str = "r") -> list[Append]:
    """Start runs, and return an append to each: one event or two, plain or a change of its status."""
    new = [new_run(f"{name}{number:03}", status="running", epoch=1, owner="me") for number in range(count)]
    harness.do(*[StartRun(one) for one in new])
    rows = [one.row for one in new]
    appends = [append_to(row, 1 + n % 2, "running", stays=True) for n, row in enumerate(rows)]
    for append in appends:
        append.plain = True
    for number in range(0, count, 3):
        appends[number] = append_to(rows[number], 2, "completed", outcome=b"1")
    return appends


def test_all_are_done_however_many(harness: Harness) -> None:
    for count in COUNTS:
        appends = moves_of(harness, count, f"of{count}-")
        assert harness.store.commit(appends) == [Accepted()] * count
        for number, append in enumerate(appends):
            row = harness.row(append.run)
            assert (row.head_seq, row.head_digest) == (append.events[-1].seq, append.events[-1].digest)
            assert list(harness.store.events(append.run, 1))[1:] == list(append.events)
            assert (row.status, row.owner) == (("completed", None) if number % 3 == 0 else ("running", "me"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"epoch": 2}, "fenced"), ({"generation": 2}, "fenced"), ({"expected_digest": b"other"}, "head")],
)
def test_one_that_does_not_fit_is_refused_and_the_others_are_done(
    harness: Harness, wrong: dict[str, object], why: str
) -> None:
    for place in (0, 10, 11):
        appends = moves_of(harness, 12, f"at{place}-")
        for name, value in wrong.items():
            setattr(appends[place], name, value)
        verdicts = harness.store.commit(appends)
        assert verdicts == [Refused(why) if n == place else Accepted() for n in range(12)]  # type: ignore[arg-type]
        written = [len(harness.store.events(append.run, 1)) for append in appends]
        assert written == [1 if n == place else 1 + len(append.events) for n, append in enumerate(appends)]
        assert harness.row(appends[place].run).head_seq == 1


def test_a_run_that_waits_is_not_moved_as_one_that_runs(harness: Harness) -> None:
    appends = moves_of(harness, 4)
    harness.one(append_to(harness.row("r001"), 1, "waiting", wake_at=99))
    appends[1] = append_to(harness.row("r001"), 1, "running", stays=True)
    assert harness.store.commit(appends) == [Accepted()] * 4
    assert harness.row("r001").status == "running"


def test_an_end_over_a_pending_cancel_is_refused_alone(harness: Harness) -> None:
    appends = moves_of(harness, 7)
    harness.do(Post("r003", "cancel"))
    verdicts = harness.store.commit(appends)
    assert verdicts == [Refused("inbox") if n == 3 else Accepted() for n in range(7)]


def test_followers_of_those_that_end_are_told(harness: Harness) -> None:
    for _ in range(3):  # also when it has been so before
        parent = f"p{harness.now}"
        harness.start(parent, status="waiting")
        harness.do(StartRun(new_run(f"c{harness.now}", status="running", follower=parent, follower_call=7)))
        end = append_to(harness.row(f"c{harness.now}"), 1, "completed", outcome=b"1")
        others = [append_to(harness.start(f"o{harness.now}{n}", status="running"), 1, "completed") for n in range(3)]
        assert harness.store.commit([*others, end]) == [Accepted()] * 4
        assert [(one.kind, one.name) for one in harness.store.inbox(parent)] == [("child", end.run)]
        harness.now += 1


def test_two_moves_of_one_run_follow_each_other(harness: Harness) -> None:
    row = harness.start("a", status="running")
    first = append_to(row, 2)
    row.head_seq, row.head_digest = 3, first.events[-1].digest
    appends = [first, append_to(row, 1), append_to(row, 1)]
    assert harness.store.commit(appends) == [Accepted(), Accepted(), Refused("head")]


# -- starts ------------------------------------------------------------------------------------------------------------
def test_all_runs_are_started_however_many(harness: Harness) -> None:
    for count in (1, *COUNTS):
        new = [new_run(f"of{count}-{n:03}", status="running", epoch=1, owner="me") for n in range(count)]
        assert harness.store.commit([StartRun(one) for one in new]) == [Accepted()] * count
        for one in new:
            assert harness.row(one.row.id) == one.row
            assert list(harness.store.events(one.row.id, 1)) == [one.event]


def test_those_that_exist_are_left_alone_and_the_others_are_started(harness: Harness) -> None:
    for first in range(3):  # also when it has been so before
        there = [harness.start(f"{first}-{n}", workflow="other") for n in (1, 4)]
        new = [new_run(f"{first}-{n}") for n in range(6)]
        verdicts = harness.store.commit([StartRun(one) for one in new])
        existing = {1: Existing(there[0]), 4: Existing(there[1])}
        assert verdicts == [existing.get(n, Accepted()) for n in range(6)]
        assert [harness.row(one.row.id).workflow for one in new] == [
            "other" if n in existing else "order" for n in range(6)
        ]
        assert [len(harness.store.events(one.row.id, 1)) for one in new] == [1] * 6


def test_of_two_starts_of_one_run_the_first_counts(harness: Harness) -> None:
    new = [new_run("a", version="1"), new_run("b"), new_run("a", version="2")]
    verdicts = harness.store.commit([StartRun(one) for one in new])
    assert verdicts == [Accepted(), Accepted(), Existing(new[0].row)]
    assert harness.row("a").version == "1"


def test_what_some_runs_are_started_with_is_there(harness: Harness) -> None:
    harness.start("parent", status="waiting")
    new = [
        new_run("plain"),
        new_run("tagged", tags={"customer": "7"}),
        new_run("large", payloads=[("digest", b"value")]),
        new_run("child", follower="parent", follower_call=3),
        with_history(new_run("long"), 2),
    ]
    for one in new:  # each by itself: one of them decides how a batch is done
        assert harness.store.commit([StartRun(one)]) == [Accepted()]
    assert [row.id for row in harness.store.runs(RunFilter(tags={"customer": "7"}))] == ["tagged"]
    assert harness.store.payload("large", "digest") == b"value"
    assert len(harness.store.events("long", 1)) == 3
    harness.one(append_to(harness.row("child"), 1, "completed", outcome=b"1"))
    assert [one.name for one in harness.store.inbox("parent")] == ["child"]


def test_starts_and_moves_come_in_one_batch(harness: Harness) -> None:
    appends = moves_of(harness, 6)
    starts = [StartRun(new_run(f"new{n}")) for n in range(3)]
    batch = [starts[0], *appends[:3], starts[1], *appends[3:], starts[2]]
    assert harness.store.commit(batch) == [Accepted()] * 9
    assert [harness.row(f"new{n}").head_seq for n in range(3)] == [1, 1, 1]
    assert [harness.row(a.run).head_seq for a in appends] == [1 + len(a.events) for a in appends]
