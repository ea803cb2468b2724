"""What every store does with starts, appends, restarts, children and holds."""

from typing import Any

import msgspec
import pytest

from everstep.errors import Misuse
from everstep.stores.protocol import (
    Accepted,
    Claim,
    Existing,
    Failed,
    HoldRow,
    NotPosted,
    Post,
    Refused,
    RestartRun,
    RunFilter,
    StartRun,
)
from tests.stores.kit import Harness, append_to, claimed, events_after, new_run, with_history

AWKWARD = b"\x00\xff\xfe'\"\\ \xc3\x28 \x00"
"""Bytes that are neither UTF-8 nor a C string."""


# -- starting -------------------------------------------------------------------------------------------------------


def test_a_run_may_begin_with_a_history_of_which_all_or_nothing_is_there(harness: Harness) -> None:
    new = with_history(new_run("a", payloads=[("d", b"x")]), 300)
    assert harness.one(StartRun(new)) == Accepted()
    assert harness.store.events("a", 1) == [new.event, *new.more]
    assert (harness.row("a").head_seq, harness.store.payload("a", "d")) == (301, b"x")
    assert harness.one(append_to(harness.row("a"))) == Accepted()
    assert isinstance(harness.one(StartRun(with_history(new_run("a"), 2))), Existing)
    wrong = with_history(new_run("b"), 3)
    wrong.more = wrong.more[1:]
    assert isinstance(harness.one(StartRun(wrong)), Failed)
    assert harness.store.run("b") is None
    assert harness.store.events("b", 1) == []


def test_a_started_run_is_there_as_it_was_given(harness: Harness) -> None:
    new = new_run(
        "a",
        version="2",
        semantics=7,
        status="running",
        epoch=3,
        owner="me",
        wake_at=5,
        queue="fast",
        priority=-2,
        tags={"team": "ünï\x00", "'; DROP": "\n"},
        parent="p",
        arguments="ab",
        preview="(1)",
        outcome=AWKWARD,
        current_step="s",
        published=AWKWARD,
        budget=AWKWARD,
        deaths=2,
        created_at=1,
        updated_at=2,
        ended_at=3,
        payloads=[("d", AWKWARD)],
    )
    assert harness.one(StartRun(new)) == Accepted()
    assert harness.row("a") == new.row
    assert harness.store.events("a", 1) == [new.event]
    assert harness.store.payload("a", "d") == AWKWARD


def test_what_a_caller_changes_afterwards_does_not_reach_the_store(harness: Harness) -> None:
    new = new_run("a", tags={"x": "1"})
    harness.one(StartRun(new))
    new.row.tags["x"] = "2"
    harness.row("a").tags["x"] = "3"
    assert harness.row("a").tags == {"x": "1"}


def test_a_second_run_with_one_id_gets_the_row_that_is_there_and_changes_nothing(harness: Harness) -> None:
    there = harness.start("a", arguments="1")
    verdict = harness.one(StartRun(new_run("a", arguments="2", follower="b", payloads=[("d", b"x")])))
    assert verdict == Existing(there)
    assert harness.row("a") == there
    assert harness.store.payload("a", "d") is None


def test_of_two_starts_with_one_id_in_a_batch_the_first_wins(harness: Harness) -> None:
    first, second = harness.do(StartRun(new_run("a", arguments="1")), StartRun(new_run("a", arguments="2")))
    assert first == Accepted()
    assert isinstance(second, Existing)
    assert second.row.arguments == "1"


def test_an_empty_batch_does_nothing(harness: Harness) -> None:
    assert harness.do() == []


# -- appending ------------------------------------------------------------------------------------------------------


def test_an_append_writes_events_and_row(harness: Harness) -> None:
    row = harness.start("a", status="running", epoch=4, owner="me")
    append = append_to(row, 3, at=99, current_step="charge", published=AWKWARD, body=AWKWARD)
    assert harness.one(append) == Accepted()
    after = harness.row("a")
    assert (after.head_seq, after.head_digest) == (4, append.events[-1].digest)
    assert (after.status, after.updated_at, after.current_step, after.published) == ("running", 99, "charge", AWKWARD)
    assert (after.owner, after.epoch, after.ended_at, after.outcome) == ("me", 4, None, None)
    assert harness.store.events("a", 1)[1:] == append.events


@pytest.mark.parametrize("status", ["queued", "running", "waiting", "held"])
def test_an_append_sets_status_and_timer_whatever_they_were(harness: Harness, status: str) -> None:
    row = harness.start("a", status="queued", owner="me")
    assert harness.one(append_to(row, status=status, wake_at=77)) == Accepted()
    assert (harness.row("a").status, harness.row("a").wake_at) == (status, 77)
    assert harness.one(append_to(harness.row("a"))) == Accepted()
    assert (harness.row("a").status, harness.row("a").wake_at) == ("running", None)


def test_published_values_stay_until_new_ones_come(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, published=b"1"))
    harness.one(append_to(harness.row("a")))
    assert harness.row("a").published == b"1"
    harness.one(append_to(harness.row("a"), published=b"2"))
    assert harness.row("a").published == b"2"


def test_a_history_of_many_events_with_awkward_bytes_comes_back_as_it_was(harness: Harness) -> None:
    row = harness.start("a", status="running")
    bodies = [b"", AWKWARD, "{ü}".encode(), bytes(range(256)), b"x" * 10_000, b"\x00" * 9]
    for body in bodies:
        harness.one(append_to(harness.row("a"), 2, body=body))
    events = harness.store.events("a", 1)
    assert [event.body for event in events] == [b"{}", *[body for body in bodies for _ in range(2)]]
    assert [event.seq for event in events] == list(range(1, 14))
    assert events[-1].digest == harness.row("a").head_digest
    assert row.head_digest == events[0].digest


def test_a_history_that_is_not_there_is_empty(harness: Harness) -> None:
    harness.start("a")
    assert harness.store.events("a", 2) == []
    assert harness.store.events("b", 1) == []
    assert harness.store.payload("a", "d") is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"epoch": 8}, "fenced"),
        ({"epoch": 6}, "fenced"),
        ({"generation": 2}, "fenced"),
        ({"epoch": 6, "expected_seq": 9, "events": events_after(9, b"", 1)}, "fenced"),
        ({"expected_seq": 9, "events": events_after(9, b"", 1)}, "head"),
        ({"expected_digest": b"other"}, "head"),
        ({"run": "b"}, "missing"),
    ],
)
@pytest.mark.parametrize("status", ["running", "waiting", "completed"])
@pytest.mark.parametrize("posts", [[], [Post("a", "signal")]])
def test_an_append_that_does_not_fit_is_refused_and_changes_nothing(
    harness: Harness, wrong: dict[str, Any], why: str, status: str, posts: list[Post]
) -> None:
    row = harness.start("a", status="running", epoch=7, owner="me")
    append = append_to(row, status=status, payloads=[("d", b"x")], posts=posts, **wrong)
    assert harness.one(append) == Refused(why)  # type: ignore[arg-type]
    assert harness.row("a") == row
    assert len(harness.store.events("a", 1)) == 1
    assert harness.store.payload("a", "d") is None
    assert harness.store.signals("a") == []


def test_one_refused_unit_does_not_stop_the_others_in_its_batch(harness: Harness) -> None:
    rows = [harness.start(f"r{number}", status="running", epoch=1) for number in range(9)]
    appends = [append_to(row, 2, payloads=[("d", b"x")]) for row in rows]
    appends[4].epoch = 0
    appends[7].expected_digest = b"other"
    verdicts = harness.do(*appends)
    assert verdicts == [Refused("fenced") if n == 4 else Refused("head") if n == 7 else Accepted() for n in range(9)]
    assert [harness.row(row.id).head_seq for row in rows] == [1 if n in (4, 7) else 3 for n in range(9)]
    assert [len(harness.store.events(row.id, 1)) for row in rows] == [1 if n in (4, 7) else 3 for n in range(9)]


def test_a_large_batch_of_everything_is_done(harness: Harness) -> None:
    rows = [harness.start(f"r{number:04}", status="running" if number % 3 else "queued") for number in range(300)]
    kinds = ["running", "waiting", "completed", "running"]
    appends = [append_to(row, 1 + n % 5, status=kinds[n % 4], release=n % 7 == 0) for n, row in enumerate(rows)]
    starts = [StartRun(new_run(f"s{number}", payloads=[("d", b"x")])) for number in range(70)]
    assert harness.do(*appends, *starts) == [Accepted()] * 370
    for n, row in enumerate(rows):
        assert len(harness.store.events(row.id, 1)) == 2 + n % 5
        assert harness.row(row.id).status == kinds[n % 4]
    assert harness.store.payload("s69", "d") == b"x"


def test_two_appends_to_one_run_in_one_batch_follow_each_other(harness: Harness) -> None:
    row = harness.start("a", status="running")
    first = append_to(row, 2)
    row.head_seq, row.head_digest = 3, first.events[-1].digest
    assert harness.do(first, append_to(row, 1), append_to(row, 1)) == [Accepted(), Accepted(), Refused("head")]
    assert harness.row("a").head_seq == 4


def test_a_unit_that_fails_by_itself_has_its_own_verdict(harness: Harness) -> None:
    rows = [harness.start(f"r{number}", status="running") for number in range(6)]
    appends = [append_to(row) for row in rows]
    appends[2].events = events_after(17, b"", 1)
    verdicts = harness.do(*appends)
    assert isinstance(verdicts[2], Failed)
    assert isinstance(verdicts[2].error, Misuse)
    assert verdicts[:2] + verdicts[3:] == [Accepted()] * 5
    assert harness.row("r2") == rows[2]


def test_a_plain_unit_whose_events_do_not_follow_its_head_is_not_written(harness: Harness) -> None:
    row = harness.start("a", status="running")
    unit = append_to(row, 2, stays=True, plain=True)
    for events in (events_after(17, b"", 2), unit.events[1:], [unit.events[0], unit.events[0]]):
        unit.events = events
        (verdict,) = harness.do(unit)
        assert isinstance(verdict, Failed)
        assert isinstance(verdict.error, Misuse)
    assert harness.row("a") == row


def test_a_payload_is_stored_once_per_run(harness: Harness) -> None:
    row = harness.start("a", status="running", payloads=[("d", b"1")])
    assert harness.one(append_to(row, payloads=[("d", b"1"), ("e", AWKWARD), ("e", AWKWARD)])) == Accepted()
    assert harness.store.payload("a", "d") == b"1"
    assert harness.store.payload("a", "e") == AWKWARD
    assert harness.store.payload("b", "d") is None


def test_an_append_can_give_the_lease_back(harness: Harness) -> None:
    row = harness.start("a", status="running", owner="me")
    harness.one(append_to(row, status="waiting", release=True))
    assert harness.row("a").owner is None


def test_an_append_without_events_changes_the_row_only(harness: Harness) -> None:
    row = harness.start("a", status="running", owner="me", deaths=1)
    assert harness.one(append_to(row, 0, status="queued", release=True)) == Accepted()
    after = harness.row("a")
    assert (after.status, after.owner, after.head_seq, after.deaths) == ("queued", None, 1, 1)


# -- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_an_end_sets_outcome_and_time_and_gives_the_lease_back(harness: Harness, status: str) -> None:
    harness.start("a", status="running", owner="me", epoch=2)
    assert harness.end("a", status, outcome=AWKWARD, at=50) == Accepted()
    row = harness.row("a")
    assert (row.status, row.outcome, row.ended_at, row.owner, row.epoch) == (status, AWKWARD, 50, None, 2)


def test_a_run_does_not_end_over_a_pending_cancel(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.do(Post("a", "signal"), Post("a", "cancel"))
    assert harness.end("a") == Refused("inbox")
    assert harness.row("a").status == "running"
    (_, cancel) = harness.store.inbox("a")
    assert harness.end("a", consumed=[cancel.number]) == Accepted()
    assert [delivery.state for delivery in harness.store.signals("a")] == ["undelivered", "consumed"]


def test_a_cancel_in_the_same_batch_as_the_end_is_not_lost_either(harness: Harness) -> None:
    row = harness.start("a", status="running")
    other = harness.start("b", status="running")
    cancel, end, second = harness.do(Post("a", "cancel"), append_to(row, status="completed"), append_to(other))
    assert (end, second) == (Refused("inbox"), Accepted())
    end, cancel = harness.do(append_to(harness.row("b"), status="completed"), Post("b", "cancel"))
    assert (end, cancel) == (Accepted(), NotPosted("completed"))


def test_a_run_that_goes_on_after_its_end_has_no_outcome_any_more(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.end("a", "failed", outcome=b"1")
    row = claimed(harness.one(Claim("a", "me", 1, ["failed"])))
    assert harness.one(append_to(row)) == Accepted()
    after = harness.row("a")
    assert (after.status, after.outcome, after.ended_at, after.owner) == ("running", None, None, "me")


# -- children -------------------------------------------------------------------------------------------------------


def child_news(harness: Harness, run: str) -> list[tuple[str, str, object]]:
    return [(d.name, d.id, msgspec.json.decode(d.value)) for d in harness.store.inbox(run) if d.kind == "child"]


def test_a_parent_is_told_of_its_child_s_end_once(harness: Harness) -> None:
    parent = harness.start("p", status="running")
    child = new_run("c", parent="p", follower="p", follower_call=4)
    assert harness.one(append_to(parent, starts=[child])) == Accepted()
    assert harness.row("c") == child.row
    assert harness.store.children("p") == [child.row]
    assert child_news(harness, "p") == []
    harness.end("c", outcome=b'[1,"x"]', at=60)
    assert child_news(harness, "p") == [("c", "4", {"status": "completed", "outcome": [1, "x"]})]
    assert harness.store.inbox("p")[0].at == 60
    row = claimed(harness.one(Claim("c", "me", 1, ["completed"])))
    harness.one(append_to(row))
    harness.end("c", "failed")
    assert len(child_news(harness, "p")) == 1


def test_many_children_that_end_in_one_batch_are_told_in_its_order(harness: Harness) -> None:
    parent = harness.start("p", status="running")
    children = [new_run(f"c{n}", follower="p", follower_call=n, status="running") for n in range(20)]
    harness.one(append_to(parent, starts=children))
    ends = [append_to(harness.row(f"c{n}"), status="failed") for n in reversed(range(20))]
    assert harness.do(*ends) == [Accepted()] * 20
    news = {"status": "failed", "outcome": None}
    assert child_news(harness, "p") == [(f"c{n}", str(n), news) for n in reversed(range(20))]


def test_a_child_that_exists_with_the_same_arguments_is_followed(harness: Harness) -> None:
    harness.start("c", arguments="x", status="running")
    parent = harness.start("p", status="running")
    starts = [new_run("c", arguments="x", follower="p", follower_call=2)]
    harness.one(append_to(parent, starts=starts))
    assert harness.row("c").status == "running"
    harness.end("c")
    assert child_news(harness, "p") == [("c", "2", {"status": "completed", "outcome": None})]


def test_a_child_that_has_ended_already_is_told_at_once(harness: Harness) -> None:
    harness.start("c", arguments="x", status="running")
    harness.end("c", "failed", outcome=b"7")
    parent = harness.start("p", status="running")
    harness.one(append_to(parent, starts=[new_run("c", arguments="x", follower="p", follower_call=2)], at=31))
    assert child_news(harness, "p") == [("c", "2", {"status": "failed", "outcome": 7})]
    assert harness.store.inbox("p")[0].at == 31


@pytest.mark.parametrize("other", [{"arguments": "y"}, {"workflow": "other"}])
def test_a_child_whose_id_belongs_to_another_run_is_refused(harness: Harness, other: dict[str, str]) -> None:
    there = harness.start("c", arguments="x")
    parent = harness.start("p", status="running")
    starts = [new_run("c", **({"arguments": "x"} | other), follower="p", follower_call=2)]
    assert harness.one(append_to(parent, starts=starts)) == Accepted()
    assert child_news(harness, "p") == [("c", "2", {"status": "refused", "outcome": None})]
    assert harness.row("c") == there


def test_two_starts_of_one_child_in_one_append(harness: Harness) -> None:
    parent = harness.start("p", status="running")
    starts = [new_run("c", follower="p", follower_call=n, arguments=str(n // 2)) for n in range(3)]
    harness.one(append_to(parent, starts=starts))
    assert child_news(harness, "p") == [("c", "2", {"status": "refused", "outcome": None})]
    harness.one(append_to(harness.row("c"), status="completed"))
    assert [(name, call) for name, call, _ in child_news(harness, "p")] == [("c", "2"), ("c", "0"), ("c", "1")]


def test_news_for_a_parent_that_has_ended_stay_visible(harness: Harness) -> None:
    parent = harness.start("p", status="running")
    harness.one(append_to(parent, starts=[new_run("c", follower="p", follower_call=1)]))
    harness.end("p")
    harness.end("c")
    assert [(d.kind, d.name, d.state) for d in harness.store.signals("p")] == [("child", "c", "undelivered")]


def test_a_follower_that_is_not_there_is_not_told(harness: Harness) -> None:
    harness.one(StartRun(new_run("c", follower="nobody", follower_call=1)))
    assert harness.end("c") == Accepted()
    assert harness.store.signals("nobody") == []


# -- restarts -------------------------------------------------------------------------------------------------------


def test_a_restart_begins_a_new_generation_and_keeps_the_old_history(harness: Harness) -> None:
    harness.start("a", status="running")
    harness.end("a", "failed", outcome=b"1")
    row = claimed(harness.one(Claim("a", "me", 1, ["failed"])))
    new = new_run("a", generation=2, status="running", owner="me", arguments="new", payloads=[("d", b"x")])
    assert harness.one(RestartRun(row.epoch, new)) == Accepted()
    after = harness.row("a")
    assert (after.generation, after.head_seq, after.status, after.arguments) == (2, 1, "running", "new")
    assert (after.epoch, after.owner, after.outcome, after.ended_at) == (row.epoch, "me", None, None)
    assert len(harness.store.events("a", 1)) == 2
    assert harness.store.events("a", 2) == [new.event]
    assert harness.store.payload("a", "d") == b"x"
    assert harness.one(append_to(row)) == Refused("fenced")
    assert harness.one(append_to(after)) == Accepted()


def test_a_restart_is_refused_unless_the_run_has_ended_and_is_ours(harness: Harness) -> None:
    harness.start("a", status="running")
    assert harness.one(RestartRun(0, new_run("a", generation=2))) == Refused("fenced")
    harness.end("a")
    assert harness.one(RestartRun(1, new_run("a", generation=2))) == Refused("fenced")
    assert harness.one(RestartRun(0, new_run("a", generation=3))) == Refused("fenced")
    assert harness.one(RestartRun(0, new_run("b", generation=2))) == Refused("missing")
    assert harness.row("a").generation == 1


def test_news_for_an_old_generation_do_not_reach_the_new_one(harness: Harness) -> None:
    parent = harness.start("p", status="running")
    harness.one(append_to(parent, starts=[new_run("c", follower="p", follower_call=1)]))
    harness.end("p", "failed")
    harness.one(RestartRun(0, new_run("p", generation=2)))
    harness.end("c")
    assert harness.store.signals("p") == []
    harness.one(append_to(harness.row("p"), starts=[new_run("c", follower="p", follower_call=1)]))
    assert child_news(harness, "p") == [("c", "1", {"status": "completed", "outcome": None})]


def test_a_renewal_ends_one_generation_and_begins_the_next_and_leaves_the_inbox_alone(harness: Harness) -> None:
    row = harness.start("a", status="running", follower="p", follower_call=1)
    harness.one(append_to(row, starts=[new_run("c", follower="a", follower_call=1)]))
    harness.one(Post("a", "signal", "word", value=b"1", at=1))
    harness.one(Post("a", "cancel", value=b"{}", at=1))
    row, pending = harness.row("a"), harness.store.inbox("a")
    new = new_run("a", generation=2, status="running", arguments="new", payloads=[("d", b"x")])
    stale = append_to(row, renewal=new_run("a", generation=2))
    stale.expected_digest = b"another"
    assert harness.one(stale) == Refused("head")
    assert harness.row("a").generation == 1
    unit = append_to(row, renewal=new)
    assert harness.one(unit) == Accepted()
    after = harness.row("a")
    assert (after.generation, after.head_seq, after.head_digest) == (2, 1, new.event.digest)
    assert (after.status, after.epoch, after.ended_at, after.arguments) == ("running", row.epoch, None, "new")
    assert harness.store.events("a", 1)[-1] == unit.events[-1]
    assert harness.store.events("a", 2) == [new.event]
    assert harness.store.payload("a", "d") == b"x"
    assert harness.store.inbox("a") == pending
    harness.end("c")
    assert harness.store.inbox("a") == pending, "what the old generation followed is no news for the new one"
    assert harness.one(append_to(row)) == Refused("fenced")
    assert harness.one(append_to(after)) == Accepted()


# -- holds ----------------------------------------------------------------------------------------------------------


def test_a_hold_is_open_until_it_is_resolved(harness: Harness) -> None:
    row = harness.start("a", status="running")
    hold = HoldRow(
        id="h1",
        run="a",
        reason="drift",
        step="s",
        summary="it differs",
        report=AWKWARD,
        resolutions=["accept", "fail"],
        created_at=5,
    )
    assert harness.one(append_to(row, status="held", hold=hold, release=True)) == Accepted()
    hold.workflow = "order"
    assert harness.store.holds() == harness.store.holds(run="a") == [hold]
    assert harness.store.holds(run="b") == []
    decision = HoldRow(id="h1", run="a", reason="", resolved_at=9, resolution="accept", by="ann", note="fine")
    assert harness.one(append_to(harness.row("a"), status="queued", hold=decision)) == Accepted()
    assert harness.store.holds() == harness.store.holds(run="a") == []
    (resolved,) = harness.store.holds(run="a", open_only=False)
    assert resolved == harness.store.holds(open_only=False)[0]
    assert (resolved.resolved_at, resolved.resolution, resolved.by, resolved.note) == (9, "accept", "ann", "fine")
    assert (resolved.summary, resolved.report) == ("it differs", AWKWARD)


def test_a_hold_is_resolved_once(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, hold=HoldRow(id="h", run="a", reason="asked")))
    for by in ("ann", "bob"):
        hold = HoldRow(id="h", run="a", reason="", resolved_at=1, by=by)
        harness.one(append_to(harness.row("a"), hold=hold))
    assert harness.store.holds(open_only=False)[0].by == "ann"


def test_a_second_hold_with_one_id_fails_its_unit_only(harness: Harness) -> None:
    rows = [harness.start(f"r{n}", status="running") for n in range(3)]
    hold = HoldRow(id="h", run="r0", reason="asked")
    verdicts = harness.do(append_to(rows[0], hold=hold), append_to(rows[1], hold=hold), append_to(rows[2]))
    assert verdicts[0] == verdicts[2] == Accepted()
    assert isinstance(verdicts[1], Failed)
    assert harness.row("r1") == rows[1]


def test_runs_that_diverged_are_listed_by_the_age_of_their_hold(harness: Harness) -> None:
    for at, (id, workflow) in enumerate([("a", "order"), ("b", "other"), ("c", "order"), ("d", "order")]):
        row = harness.start(id, workflow=workflow, status="running")
        reason = "drift" if id == "d" else "diverged"
        hold = HoldRow(id=f"h{id}", run=id, reason=reason, created_at=-at)
        harness.one(append_to(row, status="held", hold=hold))
    assert harness.store.diverged(["order"], 10) == ["c", "a"]
    assert harness.store.diverged(["order"], 1) == ["c"]
    assert harness.store.diverged(["other", "order"], 10) == ["c", "b", "a"]
    harness.one(append_to(harness.row("c"), hold=HoldRow(id="hc", run="c", reason="", resolved_at=1)))
    assert harness.store.diverged(["order"], 10) == ["a"]


# -- lists ----------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_in_pages(harness: Harness) -> None:
    for number in range(7):
        harness.start(f"r{number}", created_at=number // 2)
    listed = [row.id for row in harness.store.runs(RunFilter())]
    assert listed == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert [row.id for row in harness.store.runs(RunFilter(limit=3, offset=2))] == listed[2:5]
    assert harness.store.runs(RunFilter(offset=7)) == []


def test_runs_are_filtered_by_everything_at_once(harness: Harness) -> None:
    harness.start("a", status="running", tags={"x": "1", "y": "2"}, parent="p", created_at=1)
    harness.start("b", status="waiting", tags={"x": "1"}, parent="p", created_at=2)
    harness.start("c", status="held", workflow="other", tags={"x": "2", "$.x": "1"}, created_at=3)

    def found(**wanted: object) -> list[str]:
        return [row.id for row in harness.store.runs(RunFilter(**wanted))]  # type: ignore[arg-type]

    assert found(status=["running", "held", "running"]) == ["c", "a"]
    assert found(status=["running", "held"], limit=1, offset=1) == ["a"]
    assert found(workflow="order") == ["b", "a"]
    assert found(parent="p", status=["waiting"]) == ["b"]
    assert found(tags={"x": "1"}) == ["b", "a"]
    assert found(tags={"x": "1", "y": "2"}) == ["a"]
    assert found(tags={"$.x": "1"}) == ["c"]
    assert found(tags={"x' OR 1 --": "1"}) == []
    assert found(status=["completed"]) == []


def test_runs_are_counted_by_status(harness: Harness) -> None:
    assert harness.store.counts() == {}
    for number, status in enumerate(["queued", "queued", "held"]):
        harness.start(f"r{number}", status=status)
    assert harness.store.counts() == {"queued": 2, "held": 1}


def test_a_run_that_is_not_there_is_none(harness: Harness) -> None:
    assert harness.store.run("a") is None
    assert harness.store.children("a") == []


def test_the_start_of_a_run_that_is_there_gives_its_row_as_it_was_before_what_follows(
    harness: Harness,
) -> None:
    before = harness.start("a", status="running")
    assert harness.do(StartRun(new_run("a")), append_to(before, 2)) == [Existing(before), Accepted()]
    assert harness.row("a").head_seq == 3
