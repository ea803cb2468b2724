"""Batches of moves, one or two events for each of many runs, as a store does them while other threads have work."""

import pytest

from everstep.stores.protocol import Accepted, Append, Post, Refused, StartRun
from tests.stores.kit import Harness, append_to, new_run

pytestmark = pytest.mark.parametrize("meanwhile", [False, True])

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


def test_all_are_done_however_many(harness: Harness, meanwhile: bool) -> None:
    for count in COUNTS:
        appends = moves_of(harness, count, f"of{count}-")
        assert harness.store.commit(appends, meanwhile=meanwhile) == [Accepted()] * count
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
    harness: Harness, meanwhile: bool, wrong: dict[str, object], why: str
) -> None:
    for place in (0, 10, 11):
        appends = moves_of(harness, 12, f"at{place}-")
        for name, value in wrong.items():
            setattr(appends[place], name, value)
        verdicts = harness.store.commit(appends, meanwhile=meanwhile)
        assert verdicts == [Refused(why) if n == place else Accepted() for n in range(12)]  # type: ignore[arg-type]
        written = [len(harness.store.events(append.run, 1)) for append in appends]
        assert written == [1 if n == place else 1 + len(append.events) for n, append in enumerate(appends)]
        assert harness.row(appends[place].run).head_seq == 1


def test_a_run_that_waits_is_not_moved_as_one_that_runs(harness: Harness, meanwhile: bool) -> None:
    appends = moves_of(harness, 4)
    harness.one(append_to(harness.row("r001"), 1, "waiting", wake_at=99))
    appends[1] = append_to(harness.row("r001"), 1, "running", stays=True)
    assert harness.store.commit(appends, meanwhile=meanwhile) == [Accepted()] * 4
    assert harness.row("r001").status == "running"


def test_an_end_over_a_pending_cancel_is_refused_alone(harness: Harness, meanwhile: bool) -> None:
    appends = moves_of(harness, 7)
    harness.do(Post("r003", "cancel"))
    verdicts = harness.store.commit(appends, meanwhile=meanwhile)
    assert verdicts == [Refused("inbox") if n == 3 else Accepted() for n in range(7)]


def test_followers_of_those_that_end_are_told(harness: Harness, meanwhile: bool) -> None:
    for _ in range(3):  # also when it has been so before
        parent = f"p{harness.now}"
        harness.start(parent, status="waiting")
        harness.do(StartRun(new_run(f"c{harness.now}", status="running", follower=parent, follower_call=7)))
        end = append_to(harness.row(f"c{harness.now}"), 1, "completed", outcome=b"1")
        others = [append_to(harness.start(f"o{harness.now}{n}", status="running"), 1, "completed") for n in range(3)]
        assert harness.store.commit([*others, end], meanwhile=meanwhile) == [Accepted()] * 4
        assert [(one.kind, one.name) for one in harness.store.inbox(parent)] == [("child", end.run)]
        harness.now += 1


def test_two_moves_of_one_run_follow_each_other(harness: Harness, meanwhile: bool) -> None:
    row = harness.start("a", status="running")
    first = append_to(row, 2)
    row.head_seq, row.head_digest = 3, first.events[-1].digest
    appends = [first, append_to(row, 1), append_to(row, 1)]
    assert harness.store.commit(appends, meanwhile=meanwhile) == [Accepted(), Accepted(), Refused("head")]
