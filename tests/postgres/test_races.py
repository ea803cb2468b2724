"""Several writers at the same moment: what one transaction sees of another is decided by locks, never by luck."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from everstep.stores.postgres import PostgresStore
from everstep.stores.postgres.transaction import Transaction
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Existing,
    NotPosted,
    Operation,
    Post,
    Posted,
    Refused,
    StartRun,
    Verdict,
)
from everstep.stores.rows.keys import KeyChanges, KeyClaim, KeyEnd, KeyWait
from tests.stores.kit import PostgresHarness, append_to, new_run

ROUNDS = 40


@pytest.fixture
def two(postgres: PostgresHarness) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """Two more store objects, each with connections of its own."""
    made = postgres.another(), postgres.another()
    yield made
    for store in made:
        store.close()


def at_once(stores: Sequence[PostgresStore], batches: Sequence[Sequence[Operation]]) -> list[list[Verdict]]:
    """Commit a batch on each store at the same moment, and return their verdicts."""
    barrier = threading.Barrier(len(stores))
    verdicts: list[Any] = [None] * len(stores)

    def commit(place: int) -> None:
        barrier.wait()
        verdicts[place] = stores[place].commit(batches[place])

    threads = [threading.Thread(target=commit, args=(place,)) for place in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in verdicts, "a commit has failed or waits for ever"
    return verdicts


def forget_at_first(patch: pytest.MonkeyPatch) -> None:
    """Let each transaction find nobody whom it concerns, until it has its first locks."""
    ask = Transaction._concerned
    asked: set[int] = set()

    def concerned(self: Transaction, ends: list[str], keys: list[str]) -> set[str]:
        if id(ends) in asked:
            asked.discard(id(ends))
            return ask(self, ends, keys)
        asked.add(id(ends))
        return set()

    patch.setattr(Transaction, "_concerned", concerned)


def test_a_cancel_and_an_end_at_once_never_lose_the_cancel(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    seen = set()
    for number in range(ROUNDS):
        row = postgres.start(f"r{number}", status="running")
        ((end,), (post,)) = at_once(two, [[append_to(row, status="completed")], [Post(row.id, "cancel")]])
        seen.add(type(end))
        if isinstance(post, Posted):
            assert end == Refused("inbox")
        else:
            assert (end, post) == (Accepted(), NotPosted("completed"))
    assert seen, "rounds were made"


def test_of_two_who_claim_a_run_at_once_one_gets_it_and_the_epochs_differ(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    for worker in ("w0", "w1"):
        postgres.enter(worker)
    for number in range(ROUNDS):
        postgres.start(f"r{number}")
        verdicts = at_once(two, [[Claim(f"r{number}", worker, 1, ["queued"])] for worker in ("w0", "w1")])
        assert sum(isinstance(verdict, Claimed) for (verdict,) in verdicts) == 1
        assert postgres.row(f"r{number}").epoch == 1


def test_of_two_who_start_a_run_at_once_one_does(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    for number in range(ROUNDS):
        batch = [StartRun(new_run(f"r{number}-{part}", tags={"t": "1"})) for part in range(3)]
        verdicts = at_once(two, [batch, batch[::-1]])
        for part in range(3):
            kinds = {type(verdicts[0][part]), type(verdicts[1][2 - part])}
            assert kinds == {Accepted, Existing}
            assert len(postgres.store.events(f"r{number}-{part}", 1)) == 1


def test_of_two_who_claim_a_new_key_at_once_one_gets_it_and_the_other_can_wait(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    for number in range(ROUNDS):
        claim = KeyClaim(f"k{number}", 1, 2, "pay", "d", "once")
        rows = [postgres.start(f"r{number}-{part}", status="running") for part in range(2)]
        verdicts = at_once(two, [[append_to(row, keys=KeyChanges([claim]))] for row in rows])
        assert sorted([first for (first,) in verdicts], key=str) == sorted([Accepted(), Refused("key", (1,))], key=str)
        effect = postgres.store.effect(claim.key)
        winner = 0 if verdicts[0] == [Accepted()] else 1
        assert effect is not None
        assert effect.run == f"r{number}-{winner}"
        # The other one begins to wait while the winner gives the key its outcome: it is told, whoever is first.
        ended = append_to(postgres.row(effect.run), keys=KeyChanges(ends=[KeyEnd(claim, b"1", "h")]))
        loser = f"r{number}-{1 - winner}"
        waits = append_to(postgres.row(loser), keys=KeyChanges(waits=[KeyWait(claim.key, 1)]))
        assert at_once(two, [[ended], [waits]]) == [[Accepted()], [Accepted()]]
        assert [(one.kind, one.name) for one in postgres.store.inbox(loser)] == [("key", claim.key)]
        assert postgres.store.waiters(claim.key) == []


def test_whoever_follows_a_run_that_ends_at_that_moment_is_told_once(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    for number in range(ROUNDS):
        child, parent = f"c{number}", f"p{number}"
        row = postgres.start(child, status="running", arguments="x")
        follows = append_to(
            postgres.start(parent, status="running"),
            starts=[new_run(child, arguments="x", follower=parent, follower_call=3)],
        )
        assert at_once(two, [[append_to(row, status="completed")], [follows]]) == [[Accepted()], [Accepted()]]
        assert [(one.kind, one.name, one.id) for one in postgres.store.inbox(parent)] == [("child", child, "3")]


def test_batches_about_the_same_runs_in_another_order_wait_for_each_other_and_never_in_a_circle(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    runs = [f"r{number}" for number in range(12)]
    for run in runs:
        postgres.start(run, status="running")
    for number in range(ROUNDS):
        posts = [Post(run, "signal", str(number)) for run in runs]
        verdicts = at_once(two, [posts, posts[::-1]])
        assert all(isinstance(one, Posted) for batch in verdicts for one in batch)
    for run in runs:
        numbers = [one.number for one in postgres.store.inbox(run)]
        assert len(numbers) == 2 * ROUNDS
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("foreseen", [True, False])
def test_parents_and_children_that_tell_each_other_at_once_all_get_through(
    postgres: PostgresHarness,
    two: tuple[PostgresStore, PostgresStore],
    monkeypatch: pytest.MonkeyPatch,
    foreseen: bool,
) -> None:
    """Also if they began to follow after it was asked who follows: one of two who wait in a circle gives way."""
    if not foreseen:
        forget_at_first(monkeypatch)
    for number in range(ROUNDS if foreseen else 8):
        a, b = f"a{number}", f"b{number}"
        for run, other in ((a, b), (b, a)):
            postgres.start(run, status="running", follower=other, follower_call=1)
        ends = [append_to(postgres.row(run), status="completed") for run in (a, b)]
        assert at_once(two, [[ends[0]], [ends[1]]]) == [[Accepted()], [Accepted()]]
        told = [one.kind for run in (a, b) for one in postgres.store.signals(run)]
        assert told == ["child", "child"]


def test_of_two_who_append_to_one_head_at_once_one_is_accepted(
    postgres: PostgresHarness, two: tuple[PostgresStore, PostgresStore]
) -> None:
    makers: list[Callable[[Append], list[Operation]]] = [
        lambda append: [append],
        lambda append: [append, append_to(postgres.row("other"))],
    ]
    for number in range(ROUNDS):
        row = postgres.start(f"r{number}", status="running")
        if number == 0:
            postgres.start("other", status="running")
        appends = [append_to(row, body=body) for body in (b"1", b"2")]
        verdicts = at_once(two, [makers[number % 2](appends[0]), [appends[1]]])
        assert sorted([verdicts[0][0], verdicts[1][0]], key=str) == [Accepted(), Refused("head")]
        assert len(postgres.store.events(row.id, 1)) == 2
