"""Which runs `app.gc` takes, in every store."""

import asyncio
from unittest.mock import patch

from everstep.engine.app.app import App
from everstep.engine.process.retention import Collected
from everstep.stores.protocol import Accepted, HoldRow
from everstep.stores.rows.keys import ForgetKeys, Forgotten, KeyChanges, KeyClaim, KeyEnd, SettleKey
from tests.stores.kit import Harness, append_to

NOW, LATER = 10_000_000_000, 20_000_000_000


def collected(harness: Harness, seconds: float = 1.0, keep: int = 0) -> Collected:
    """Delete what ended so many seconds ago, by a clock that is ahead of what the runs were given."""
    harness.now = NOW

    async def collect() -> Collected:
        app = App(harness.store, workflows=())
        await app.open()
        try:
            return await app.gc(older_than=seconds, keep=keep)
        finally:
            with patch.object(harness.store, "close"):  # the test goes on with it
                await app.close()

    return asyncio.run(collect())


def test_a_family_stays_while_a_child_has_not_ended(harness: Harness) -> None:
    harness.start("parent", status="running")
    harness.start("child", status="waiting", parent="parent")
    harness.start("grandchild", status="running", parent="child")
    harness.end("parent")
    harness.end("grandchild")
    done = collected(harness)
    assert (done.runs, done.left) == ([], 3)
    harness.end("child")
    assert (collected(harness)).runs == ["parent", "child", "grandchild"]
    assert harness.store.counts() == {}


def test_an_ended_run_with_an_open_hold_stays(harness: Harness) -> None:
    row = harness.start("a", status="running")
    harness.one(append_to(row, status="held", hold=HoldRow(id="h", run="a", reason="asked")))
    harness.end("a")
    assert (collected(harness)).runs == []
    assert harness.row("a").status == "completed"


def test_a_run_with_a_key_in_doubt_stays_until_somebody_decides(harness: Harness) -> None:
    row = harness.start("a", status="running")
    claim = KeyClaim("k", 3, 2, "charge", "x", "once")
    harness.one(append_to(row, keys=KeyChanges(claims=[claim])))
    harness.end("a", "cancelled")
    done = collected(harness)
    assert (done.runs, done.left) == ([], 1)
    assert harness.one(SettleKey("k", 5, b"1", "h", "ann")) == Accepted()
    assert collected(harness).runs == ["a"]
    key = harness.store.effect("k")
    assert (key and key.state, key and key.outcome) == ("done", b"1")


def test_old_keys_are_counted_as_they_would_be_forgotten(harness: Harness) -> None:
    row = harness.start("a", status="running")
    claims = [KeyClaim(name, call, call, "charge", "x", "once") for call, name in enumerate("klm", 1)]
    harness.one(append_to(row, at=10, keys=KeyChanges(claims=claims)))
    for claim, at in zip(claims[:2], (20, 30), strict=True):
        harness.one(append_to(harness.row("a"), at=at, keys=KeyChanges(ends=[KeyEnd(claim, b"1", "h")])))
    assert [harness.store.old_keys(before) for before in (20, 21, 31)] == [0, 1, 2]
    for before in (20, 21, 31):
        counted = harness.store.old_keys(before)
        assert harness.one(ForgetKeys(before)) == Forgotten(counted)
    assert harness.store.effect("m") is not None


def test_a_run_that_ended_lately_stays(harness: Harness) -> None:
    harness.start("old", status="running")
    harness.end("old")
    harness.start("new", status="running")
    harness.end("new", at=LATER)
    assert (collected(harness, 0.0)).runs == ["old"]
    assert harness.row("new").status == "completed"


def test_the_newest_of_each_workflow_are_kept(harness: Harness) -> None:
    for number in range(6):
        name = f"r{number}"
        harness.start(name, status="running", created_at=number, workflow="order" if number % 2 else "other")
        harness.end(name)
    done = collected(harness, keep=2)
    assert sorted(done.runs) == ["r0", "r1"]
    assert done.left == 4
