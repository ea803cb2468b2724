"""What every store does with deliveries."""

import pytest

from everstep.stores.protocol import Accepted, Delivery, NotPosted, Post, Posted, RestartRun
from everstep.stores.rows.runs import DeliveryKind
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


def test_what_a_failed_run_left_undelivered_is_pending_again_when_it_goes_on(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.start("other", status="running")
    posts: list[tuple[DeliveryKind, str]] = [
        *(("signal", "1"), ("signal", ""), ("request", "2")),
        *(("hold", ""), ("key", "3"), ("signal", "4")),
    ]
    harness.do(*[Post("a", kind, kind, id) for kind, id in posts], Post("other", "signal", "x"))
    harness.end("a", consumed=[6], status="failed")
    harness.end("other")
    assert harness.store.inbox("a") == []
    assert harness.one(append_to(harness.row("a"), status="queued", redeliver=True)) == Accepted()
    assert numbers(harness.store.inbox("a")) == [1, 2, 3], "a hold and a key are of no use to a run that failed since"
    states = ["pending"] * 3 + ["undelivered"] * 2 + ["consumed"]
    assert [delivery.state for delivery in harness.store.signals("a")] == states
    assert [delivery.state for delivery in harness.store.signals("other")] == ["undelivered"]
    assert harness.one(Post("a", "signal", "signal", "1")) == Posted(1, duplicate=True)


def test_an_undelivered_id_is_refused_by_an_ended_run_and_a_consumed_one_is_known(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.do(Post("a", "signal", "s", "taken"), Post("a", "signal", "s", "late"))
    harness.end("a", consumed=[1], status="failed")
    assert harness.one(Post("a", "signal", "s", "taken")) == Posted(1, duplicate=True)
    assert harness.one(Post("a", "signal", "s", "late")) == NotPosted("failed")
    assert harness.one(Post("a", "signal", "s", "new")) == NotPosted("failed")


def test_an_undelivered_id_that_is_sent_again_to_a_run_that_goes_on_is_in_its_inbox(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.one(Post("a", "signal", "s", "1", b"first", 5))
    harness.end("a", status="failed")
    harness.one(append_to(harness.row("a"), status="queued"))  # for example to be rolled back
    assert harness.store.inbox("a") == []
    again = Post("a", "signal", "s", "1", b"again", 7)
    assert harness.one(again) == Posted(1)
    (there,) = harness.store.inbox("a")
    assert (there.value, there.at) == (b"again", 7)
    assert harness.one(again) == Posted(1, duplicate=True)


def test_a_restart_gives_the_ids_of_signals_and_cancels_back_and_keeps_those_of_requests(harness: Harness) -> None:
    harness.start("a", status="running")
    kinds: list[DeliveryKind] = ["signal", "cancel", "request"]
    harness.do(*[Post("a", kind, "n", "taken") for kind in kinds], *[Post("a", kind, "n", "late") for kind in kinds])
    harness.end("a", consumed=[1, 2, 3, 5])
    harness.one(RestartRun(0, new_run("a", generation=2)))
    assert [harness.one(Post("a", kind, "n", "taken")) for kind in kinds] == [
        Posted(7),
        Posted(8),
        Posted(3, duplicate=True),
    ]
    assert [harness.one(Post("a", kind, "n", "late")) for kind in kinds] == [
        Posted(9),
        Posted(10),
        Posted(6, duplicate=True),
    ]
    assert numbers(harness.store.inbox("a")) == [7, 8, 9, 10]


def test_what_a_generation_left_behind_is_not_delivered_when_a_later_one_is_retried(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.do(Post("a", "signal", "old"), Post("a", "request", "old", "1"))
    harness.end("a", status="failed")
    harness.one(RestartRun(0, new_run("a", generation=2, status="running")))
    harness.one(Post("a", "signal", "new"))
    harness.end("a", status="failed")
    harness.one(append_to(harness.row("a"), status="queued", redeliver=True))
    assert numbers(harness.store.inbox("a")) == [3]
    assert [delivery.state for delivery in harness.store.signals("a")] == ["left", "left", "pending"]


def test_what_an_append_posts_twice_to_an_ended_run_is_kept_once(harness: Harness) -> None:
    harness.start("b", status="running")
    harness.end("b")
    row = harness.start("a", status="running")
    post = Post("b", "signal", "x", "1")
    assert harness.one(append_to(row, posts=[post, post])) == Accepted()
    assert [(d.name, d.state) for d in harness.store.signals("b")] == [("x", "undelivered")]


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
