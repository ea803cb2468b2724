"""How every store claims families of ended runs for their deletion, and what keeps them."""

from typing import Any

from everstep.model.forked import TAG
from everstep.stores.protocol import Accepted, Claim, Claimed, HoldRow, Needs, NotClaimed, Refused, StartRun, Verdict
from everstep.stores.rows.keys import KeyChanges, KeyClaim, KeyEnd
from everstep.stores.rows.saved import ChangeThread
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart
from tests.stores.kit import Harness, append_to, new_run
from tests.stores.test_conformance_saved import state

FENCED, TAKEN = Refused("fenced"), Refused("taken")
ENDED = ("completed", "failed", "cancelled")


def ended(harness: Harness, id: str, status: str = "completed", **fields: Any) -> None:
    """Start a run and let it end, at 10."""
    harness.start(id, status="running", **fields)
    harness.end(id, status)


def claim(harness: Harness, *runs: str, before: int = 11, epoch: int = 0) -> Verdict:
    return harness.one(ClaimFamily({run: harness.row(run).epoch + epoch for run in runs}, "me", 9, before))


def test_a_claimed_family_is_owned_and_known_and_claimed_by_nobody_else(harness: Harness) -> None:
    ended(harness, "parent")
    ended(harness, "child", parent="parent")
    harness.enter("me")
    assert claim(harness, "parent", "child") == Accepted()
    assert sorted(harness.store.deletions()) == [("child", 1), ("parent", 1)]
    assert [harness.store.is_being_deleted(run) for run in ("parent", "child", "none")] == [True, True, False]
    row = harness.row("child")
    assert (row.epoch, row.owner, row.status) == (1, "me", "completed")
    harness.kill("me")
    harness.store.bury_dead(1)
    assert isinstance(harness.one(Claim("child", "other", 9, ENDED)), NotClaimed)
    verdict = harness.one(Claim("child", "other", 9, ENDED, deleting=True))
    assert isinstance(verdict, Claimed)
    assert harness.one(DeletePart("child", verdict.row.epoch, 9)) == Deleted(3, True)
    assert harness.store.deletions() == [("parent", 1)]


def test_a_run_that_is_not_as_it_was_judged_is_not_claimed_nor_is_its_family(harness: Harness) -> None:
    ended(harness, "a")
    ended(harness, "b")
    assert claim(harness, "a", "b", epoch=-1) == FENCED
    assert claim(harness, "a", "b", epoch=1) == FENCED
    assert claim(harness, "a", before=10) == FENCED
    assert harness.one(ClaimFamily({"a": 0, "none": 0}, "me", 9, 11)) == FENCED
    harness.one(append_to(harness.row("b"), status="queued", at=10))
    assert claim(harness, "a", "b") == FENCED
    harness.end("b", at=20)
    assert claim(harness, "a", "b") == FENCED
    assert harness.store.deletions() == []
    assert harness.row("a").epoch == 0
    assert claim(harness, "a", "b", before=21) == Accepted()


def test_a_run_with_a_hold_a_key_under_way_or_a_living_owner_is_not_claimed(harness: Harness) -> None:
    for run in "hko":
        harness.start(run, status="running")
    harness.one(append_to(harness.row("h"), status="held", hold=HoldRow(id="x", run="h", reason="asked")))
    under_way = KeyClaim("k", 3, 2, "charge", "x", "once")
    harness.one(append_to(harness.row("k"), keys=KeyChanges(claims=[under_way])))
    for run in "hko":
        harness.end(run)
    harness.enter("somebody")
    harness.one(Claim("o", "somebody", 9, ENDED))
    assert [claim(harness, run) for run in "hko"] == [FENCED] * 3
    harness.kill("somebody")
    harness.store.bury_dead(1)
    assert claim(harness, "o") == Accepted()


def test_a_step_of_a_thread_is_not_claimed_while_the_thread_has_states(harness: Harness) -> None:
    ended(harness, "s", workflow="step:pay", tags={"thread": "t"})
    ended(harness, "w", workflow="order", tags={"thread": "t"})
    harness.one(ChangeThread("t", 10, states=[state("1")]))
    assert [claim(harness, run) for run in "sw"] == [FENCED, Accepted()]


def test_a_parent_or_a_child_outside_keeps_a_family(harness: Harness) -> None:
    ended(harness, "parent")
    ended(harness, "child", parent="parent")
    assert [claim(harness, "parent"), claim(harness, "child")] == [TAKEN, TAKEN]
    assert harness.store.is_needed(["child"])
    assert not harness.store.is_needed(["parent", "child"])


def test_who_was_told_of_an_end_keeps_that_run_while_it_may_go_on(harness: Harness) -> None:
    harness.start("user", status="running")
    harness.start("shared", status="running", follower="user", follower_call=1)
    harness.end("shared")
    assert claim(harness, "shared") == TAKEN, "it has not ended"
    harness.end("user", "failed")
    assert claim(harness, "shared") == TAKEN, "it may be retried"
    assert not harness.store.is_needed(["shared", "user"])
    for status, verdict in (("cancelled", False), ("failed", True), ("completed", False)):
        harness.one(append_to(harness.row("user"), status="queued"))
        harness.end("user", status)
        assert harness.store.is_needed(["shared"]) == verdict
    assert claim(harness, "shared") == Accepted()


def test_a_fork_that_may_go_on_keeps_its_source_and_what_that_was_told_of(harness: Harness) -> None:
    harness.start("source", status="running")
    harness.start("shared", status="running", follower="source", follower_call=1)
    harness.end("shared")
    harness.end("source")
    ended(harness, "sourceB")
    harness.start("fork", status="running", tags={TAG: "source@3 of generation 2"})
    assert [claim(harness, run) for run in ("shared", "source", "sourceB")] == [TAKEN, TAKEN, Accepted()]
    harness.end("fork")
    assert [claim(harness, run) for run in ("shared", "source")] == [Accepted(), Accepted()]


def test_a_start_that_needs_a_run_or_a_key_is_refused_without_it(harness: Harness) -> None:
    def start(id: str, run: str, *keys: str) -> Verdict:
        return harness.one(StartRun(new_run(id), Needs([run], keys)))

    ended(harness, "a")
    row = harness.start("b", status="running")
    done = KeyClaim("k", 3, 2, "charge", "x", "once")
    harness.one(append_to(row, keys=KeyChanges(claims=[done])))
    harness.one(append_to(harness.row("b"), keys=KeyChanges(ends=[KeyEnd(done, b"1", "h")])))
    assert [start("f", "none"), start("f", "a", "l")] == [Refused("missing"), Refused("key")]
    assert harness.store.run("f") is None
    assert start("f", "a", "k") == Accepted()
    assert claim(harness, "a") == Accepted()
    assert start("g", "a") == Refused("missing")
    assert harness.do(StartRun(new_run("g"), Needs(["a"])), StartRun(new_run("h"))) == [Refused("missing"), Accepted()]
