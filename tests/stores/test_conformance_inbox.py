"""What every store does with deliveries."""

import pytest

from everstep.stores.protocol import Accepted, Delivery, NotPosted, Post, Posted, RestartRun
from tests.stores.kit import Harness, append_to, new_run, numbers


def test_a_delivery_arrives_as_it_was_sent(harness: Harness) -> None:
    harness.start("a")
    value = b"\x00\xff'"
    assert harness.one(Post("a", "signal", "approve\x00ü", "", value, 55)) == Posted(1)
    assert harness.store.inbox("a") == [Delivery(1, "a", "signal", "approve\x00ü", "", value, 55)]


def test_deliveries_are_numbered_in_the_order_of_arrival(harness: Harness) -> None:
    harness.start("a")
    harness.start("b")
    verdicts = harness.do(Post("a", "signal", "1"), Post("b", "signal", "2"), Post("a", "cancel"), Post("a", "hold"))
    assert verdicts == [Posted(1), Posted(2), Posted(3), Posted(4)]
    assert numbers(harness.store.inbox("a")) == [1, 3, 4]
    assert [delivery.kind for delivery in harness.store.inbox("a")] == ["signal", "cancel", "hold"]


def test_a_second_delivery_of_one_kind_and_id_is_a_duplicate(harness: Harness) -> None:
    harness.start("a")
    harness.start("b")
    first = Post("a", "signal", "approve", "x1", b"1")
    again = Post("a", "signal", "other", "x1", b"2")
    assert harness.do(first, again) == [Posted(1), Posted(1, duplicate=True)]
    assert harness.one(again) == Posted(1, duplicate=True)
    assert [delivery.value for delivery in harness.store.inbox("a")] == [b"1"]
    assert harness.one(Post("a", "cancel", "", "x1")) == Posted(2)
    assert harness.one(Post("b", "signal", "", "x1")) == Posted(3)


def test_deliveries_without_an_id_are_never_duplicates(harness: Harness) -> None:
    harness.start("a")
    assert harness.do(*[Post("a", "signal", "x")] * 3) == [Posted(1), Posted(2), Posted(3)]


def test_a_duplicate_is_known_as_one_even_after_the_end(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.one(Post("a", "signal", "x", "id"))
    harness.end("a", consumed=[1])
    assert harness.one(Post("a", "signal", "x", "id")) == Posted(1, duplicate=True)


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_nothing_is_posted_to_a_run_that_has_ended(harness: Harness, status: str) -> None:
    harness.start("a", status="running")
    harness.end("a", status)
    assert harness.one(Post("a", "cancel")) == NotPosted(status)  # type: ignore[arg-type]
    assert harness.one(Post("b", "cancel")) == NotPosted(None)
    assert harness.store.signals("a") == []


def test_a_consumed_delivery_is_kept_but_not_in_the_inbox(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.do(Post("a", "signal", "1"), Post("a", "signal", "2"))
    assert harness.one(append_to(row, consumed=[2])) == Accepted()
    assert numbers(harness.store.inbox("a")) == [1]
    assert [delivery.state for delivery in harness.store.signals("a")] == ["pending", "consumed"]


def test_a_run_consumes_only_its_own_deliveries(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.start("b")
    harness.one(Post("b", "signal"))
    assert harness.one(append_to(row, consumed=[1, 99])) == Accepted()
    assert numbers(harness.store.inbox("b")) == [1]


def test_consuming_within_a_batch_of_many(harness: Harness) -> None:
    rows = [harness.start(f"r{n}", status="running") for n in range(8)]
    harness.do(*[Post(row.id, "signal") for row in rows])
    appends = [append_to(row, consumed=[n + 1] if n % 2 else []) for n, row in enumerate(rows)]
    assert harness.do(*appends) == [Accepted()] * 8
    assert [len(harness.store.inbox(row.id)) for row in rows] == [1, 0] * 4


def test_what_is_pending_at_the_end_becomes_undelivered(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.do(Post("a", "signal", "1"), Post("a", "hold"), Post("a", "signal", "3"))
    assert harness.end("a", consumed=[1]) == Accepted()
    assert [delivery.state for delivery in harness.store.signals("a")] == ["consumed", "undelivered", "undelivered"]
    assert harness.store.inbox("a") == []


def test_what_is_undelivered_does_not_reach_a_new_generation(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.one(Post("a", "signal", "1"))
    harness.end("a")
    harness.one(RestartRun(0, new_run("a", generation=2)))
    assert harness.store.inbox("a") == []
    assert harness.one(Post("a", "signal", "2")) == Posted(2)
    assert numbers(harness.store.inbox("a")) == [2]


def test_an_append_posts_to_other_runs_in_its_transaction(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.start("b")
    posts = [Post("b", "signal", "x", "1"), Post("b", "cancel"), Post("b", "signal", "y", "1"), Post("none", "cancel")]
    assert harness.one(append_to(row, posts=posts)) == Accepted()
    assert [(d.kind, d.name) for d in harness.store.inbox("b")] == [("signal", "x"), ("cancel", "")]


def test_what_an_append_posts_to_an_ended_run_stays_visible(harness: Harness) -> None:
    harness.start("b", status="running")
    harness.end("b")
    row = harness.start("a", status="running")
    harness.one(append_to(row, posts=[Post("b", "signal", "x")]))
    assert [(d.name, d.state) for d in harness.store.signals("b")] == [("x", "undelivered")]


def test_the_runs_of_a_worker_with_something_in_their_inbox(harness: Harness) -> None:
    for id, owner, status in [
        ("a", "me", "running"),
        ("b", "me", "waiting"),
        ("c", "you", "running"),
        ("d", "me", "held"),
    ]:
        harness.start(id, owner=owner, status=status)
    assert harness.store.pending("me") == []
    harness.do(Post("d", "signal"), Post("c", "signal"), Post("a", "signal"), Post("d", "signal"))
    assert harness.store.pending("me") == ["d", "a"]
    assert harness.store.pending("you") == ["c"]
    harness.one(append_to(harness.row("a"), consumed=[3]))
    assert harness.store.pending("me") == ["d"]
