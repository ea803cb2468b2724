"""What every store does with workers, leases and the search for work."""

from itertools import pairwise

import pytest

from everstep.errors import Misuse
from everstep.model.status import Status
from everstep.stores.protocol import (
    Accepted,
    Claim,
    Claimed,
    NotClaimed,
    Post,
    Refused,
    Release,
    StartRun,
    WorkerRow,
)
from everstep.stores.rows.workers import GoneRow
from tests.stores.kit import Harness, PostgresHarness, append_to, claimed, new_run, with_history

UNFINISHED: tuple[Status, ...] = ("queued", "running", "waiting")


def claim(run: str, worker: str = "me", at: int = 1_000) -> Claim:
    return Claim(run, worker, at, UNFINISHED)


# -- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_of_a_free_run_raises_its_epoch_and_sets_its_owner(harness: Harness) -> None:
    before = harness.start("a", epoch=3, status="waiting", updated_at=5)
    verdict = harness.one(claim("a"))
    assert isinstance(verdict, Claimed)
    assert verdict.row == harness.row("a")
    assert (verdict.row.epoch, verdict.row.owner, verdict.row.deaths) == (4, "me", 0)
    before.epoch, before.owner = 4, "me"
    assert verdict.row == before


def test_what_a_claim_has_read_is_what_there_is(harness: Harness) -> None:
    """A store may leave it out; the engine reads it then."""
    for run, events in (("new", 0), ("short", 5), ("long", 40)):
        new = new_run(run, status="queued")
        assert harness.one(StartRun(with_history(new, events) if events else new)) == Accepted()
    posted = harness.do(Post("short", "signal", "s", value=b"1", at=5), Post("new", "signal", "s", value=b"2", at=5))
    harness.one(append_to(harness.row("new"), consumed=[posted[1].number]))  # type: ignore[union-attr]
    verdicts = harness.do(*(Claim(run, "me", 1_000, UNFINISHED, queued=True) for run in ("new", "short", "long")))
    for verdict in verdicts:
        row = claimed(verdict)
        assert isinstance(verdict, Claimed)
        if verdict.past is not None:
            assert verdict.past.events == harness.store.events(row.id, 1)
            assert verdict.past.inbox == harness.store.inbox(row.id)
    if isinstance(harness, PostgresHarness):
        read = [verdict.past is not None for verdict in verdicts]  # type: ignore[union-attr]
        assert read == [True, True, False], "what is short is read with the claim"


def test_a_claim_has_not_read_an_inbox_into_which_its_own_batch_delivers(harness: Harness) -> None:
    harness.start("parent", status="waiting")
    child = harness.start("child", status="running", owner="me", epoch=1, follower="parent", follower_call=3)
    end = append_to(child, status="completed", outcome=b"1")
    verdict, ended = harness.do(Claim("parent", "me", 1_000, UNFINISHED, queued=True), end)
    assert (isinstance(verdict, Claimed), ended) == (True, Accepted())
    assert [delivery.kind for delivery in harness.store.inbox("parent")] == ["child"]
    assert verdict.past is None or verdict.past.inbox == harness.store.inbox("parent")  # type: ignore[union-attr]


def test_many_rows_are_read_at_once(harness: Harness) -> None:
    rows = [harness.start(run, priority=number) for number, run in enumerate(("a", "b", "c"))]
    assert sorted(harness.store.rows(["c", "none", "a"]), key=lambda row: row.id) == [rows[0], rows[2]]
    assert harness.store.rows([]) == []


def test_whoever_was_fenced_writes_nothing_more(harness: Harness) -> None:
    harness.start("a", status="running")
    old = claimed(harness.one(claim("a", "old")))
    new = claimed(harness.one(claim("a", "new")))
    assert harness.one(append_to(old)) == Refused("fenced")
    assert harness.one(Release("a", old.epoch, "queued")) == Refused("fenced")
    assert harness.one(append_to(new)) == Accepted()


def test_a_claim_and_the_first_append_can_be_in_one_batch(harness: Harness) -> None:
    row = harness.start("a", status="running", epoch=1)
    row.epoch = 2
    verdict, append = harness.do(claim("a"), append_to(row))
    assert (type(verdict), append) == (Claimed, Accepted())


def test_only_the_wanted_statuses_are_claimed(harness: Harness) -> None:
    row = harness.start("a", status="held")
    assert harness.one(claim("a")) == NotClaimed(row)
    assert harness.one(Claim("a", "me", 0, ())) == NotClaimed(row)
    assert isinstance(harness.one(Claim("a", "me", 0, ("held",))), Claimed)
    assert harness.one(claim("none")) == NotClaimed(None)


def test_a_run_of_a_living_worker_is_not_claimed(harness: Harness) -> None:
    harness.enter("you", lease_until=5_000)
    row = harness.start("a", status="running", owner="you")
    assert harness.one(claim("a", at=4_999)) == NotClaimed(row)
    assert harness.one(claim("a", at=10**18)) == NotClaimed(row), "whatever the clock of the one who claims says"


def test_a_run_is_claimed_when_its_owner_s_lease_has_lapsed(harness: Harness) -> None:
    harness.enter("you", lease_until=5_000)
    harness.start("a", status="running", owner="you")
    assert harness.store.lapse("you", 5_000)
    assert claimed(harness.one(claim("a", at=0))).deaths == 0


def test_a_lease_lapses_only_if_it_was_not_prolonged_since_it_was_read(harness: Harness) -> None:
    harness.enter("you", lease_until=5_000)
    row = harness.start("a", status="running", owner="you")
    assert harness.store.renew("you", 6_000)
    assert not harness.store.lapse("you", 5_000)
    assert not harness.store.lapse("somebody", 6_000)
    assert harness.store.lapse("you", 6_000)
    assert not harness.store.lapse("you", 6_000), "it has lapsed already"
    assert [worker.has_lease for worker in harness.store.workers()] == [False]
    assert harness.store.renew("you", 6_000)
    assert [worker.has_lease for worker in harness.store.workers()] == [True]
    assert harness.one(claim("a")) == NotClaimed(row)


def test_every_renewal_can_be_seen_also_where_the_clock_stands_still(harness: Harness) -> None:
    harness.enter("you", lease_until=5_000)
    seen = [harness.store.workers()[0].lease_until]
    for until in (5_000, 5_000, 4_000, 4_000):
        assert harness.store.renew("you", until)
        seen.append(harness.store.workers()[0].lease_until)
    assert all(before != after for before, after in pairwise(seen))


def test_the_owner_itself_may_claim_again(harness: Harness) -> None:
    harness.enter("me")
    harness.start("a", status="running", owner="me", epoch=1)
    row = claimed(harness.one(claim("a")))
    assert (row.epoch, row.deaths) == (2, 0)


@pytest.mark.parametrize(("status", "deaths"), [("running", 1), ("queued", 1), ("waiting", 0)])
def test_the_death_of_a_driver_counts(harness: Harness, status: str, deaths: int) -> None:
    harness.start("a", status=status, owner="dead")
    assert claimed(harness.one(claim("a"))).deaths == deaths


def test_deaths_in_a_row_add_up_until_the_head_moves(harness: Harness) -> None:
    harness.start("a", status="running")
    for number in range(4):
        row = claimed(harness.one(claim("a", f"dying{number}")))
        assert row.deaths == number
    harness.one(append_to(row, 0))
    row = claimed(harness.one(claim("a", "next")))
    assert row.deaths == 4
    harness.one(append_to(row, 1))
    assert claimed(harness.one(claim("a", "last"))).deaths == 1


def test_beginning_again_what_a_crash_cut_off_is_no_progress(harness: Harness) -> None:
    harness.start("a", status="running")
    row = claimed(harness.one(claim("a", "first")))
    for number in range(1, 4):
        harness.one(append_to(row, 1, progress=False))
        row = claimed(harness.one(claim("a", f"dying{number}")))
        assert row.deaths == number


# -- giving back ----------------------------------------------------------------------------------------------------


def test_a_release_gives_a_run_back_without_history(harness: Harness) -> None:
    row = harness.start("a", status="running", owner="me", epoch=2, wake_at=9)
    assert harness.one(Release("a", 1, "queued")) == Refused("fenced")
    assert harness.one(Release("b", 1, "queued")) == Refused("missing")
    assert harness.row("a") == row
    assert harness.one(Release("a", 2, "waiting")) == Accepted()
    row.owner, row.status = None, "waiting"
    assert harness.row("a") == row


def test_giving_back_an_ended_run_leaves_it_ended(harness: Harness) -> None:
    harness.start("a", status="running", owner="me")
    harness.end("a")
    row = harness.row("a")
    assert harness.one(Release("a", row.epoch, "running")) == Accepted()
    assert harness.row("a") == row


def test_a_release_after_a_stop_counts_as_a_death_of_the_owner(harness: Harness) -> None:
    harness.start("a", status="running")
    for deaths in (1, 2):
        row = claimed(harness.one(claim("a")))
        assert harness.one(Release("a", row.epoch, "queued", died=True)) == Accepted()
        assert (harness.row("a").owner, harness.row("a").deaths) == (None, deaths)
    row = claimed(harness.one(claim("a")))
    assert row.deaths == 2
    assert harness.one(Release("a", row.epoch, "queued")) == Accepted()
    assert harness.row("a").deaths == 2


def test_a_leaving_worker_gives_back_everything(harness: Harness) -> None:
    harness.store.register_worker("me", 1, "host", 10_000)
    for number, status in enumerate(["running", "waiting", "queued", "held"]):
        harness.start(f"r{number}", status=status, owner="me")
    harness.start("other", status="running", owner="you")
    harness.store.leave("me")
    assert [harness.row(f"r{n}").status for n in range(4)] == ["queued", "waiting", "queued", "held"]
    assert {harness.row(f"r{n}").owner for n in range(4)} == {None}
    assert (harness.row("other").owner, harness.row("other").status) == ("you", "running")
    assert harness.store.workers() == []
    harness.store.leave("me")


# -- workers --------------------------------------------------------------------------------------------------------


def test_workers_get_different_places_and_the_smallest_free_ones(harness: Harness) -> None:
    rows = [harness.store.register_worker(f"w{n}", 10 + n, "host", 100) for n in range(3)]
    assert rows == [WorkerRow(f"w{n}", n + 1, 10 + n, "host", 1_000, 100) for n in range(3)]
    harness.store.leave("w1")
    assert harness.store.register_worker("w3", 1, "host", 100).place == 2
    assert [row.id for row in harness.store.workers()] == ["w0", "w3", "w2"]


def test_a_lease_is_prolonged_until_the_worker_is_buried(harness: Harness) -> None:
    harness.enter("you", lease_until=5)
    assert harness.store.renew("you", 50)
    assert harness.store.workers()[0].lease_until == 50
    harness.kill("you")
    assert harness.store.bury_dead(0) == ["you"]
    assert not harness.store.renew("you", 60)
    assert harness.store.workers() == []
    assert harness.store.bury_dead(0) == []


def test_a_worker_whose_lease_has_lapsed_is_not_buried_while_it_lives(harness: Harness) -> None:
    harness.enter("you", lease_until=5)
    harness.store.register_worker("me", 1, "host", 5)
    assert harness.store.bury_dead(1_000_000) == []
    assert len(harness.store.workers()) == 2


def test_the_neighbours_of_a_worker_are_those_with_a_lease_and_the_next_places(harness: Harness) -> None:
    for worker in ("a", "b", "c", "d", "e"):
        harness.enter(worker)
    assert harness.store.lapse("d", 10_000)

    def neighbours(of: str, limit: int) -> list[str]:
        return [row.id for row in harness.store.neighbours(of, limit)]

    assert neighbours("c", 9) == ["e", "a", "b"]
    assert neighbours("a", 2) == ["b", "c"]
    assert neighbours("d", 2) == ["e", "a"]
    assert neighbours("none", 2) == ["a", "b"]
    assert neighbours("c", 0) == []


def test_only_the_dead_are_buried(harness: Harness) -> None:
    for worker in ("a", "b", "c"):
        harness.enter(worker)
    harness.kill("b")
    assert harness.store.bury_dead(0) == ["b"]
    assert [row.id for row in harness.store.workers()] == ["a", "c"]


def test_a_name_is_taken_while_its_worker_lives(harness: Harness) -> None:
    harness.enter("you")
    with pytest.raises(Misuse):
        harness.store.register_worker("you", 1, "host", 10)
    harness.kill("you")
    harness.store.register_worker("you", 1, "host", 10)
    assert [(row.id, row.lease_until) for row in harness.store.workers()] == [("you", 10)]
    assert harness.store.bury_dead(0) == []


# -- finding work ---------------------------------------------------------------------------------------------------


def test_queued_and_running_runs_that_are_free_are_due_for_everyone(harness: Harness) -> None:
    harness.enter("you", lease_until=2_000)
    for id, status, owner in [
        ("a", "queued", None),
        ("b", "running", None),
        ("c", "running", "you"),
        ("d", "running", "dead"),
        ("e", "held", None),
        ("f", "completed", None),
        ("g", "running", "me"),
        ("h", "waiting", None),
    ]:
        harness.start(id, status=status, owner=owner)
    assert harness.due() == harness.due(at=10**18) == ["a", "b", "d"]
    assert harness.store.lapse("you", 2_000)
    assert harness.due() == ["a", "b", "c", "d"]
    assert harness.due(everyone=False) == []


def test_only_runs_of_known_workflows_are_due(harness: Harness) -> None:
    for number, status in enumerate(["queued", "waiting"]):
        harness.start(f"r{number}", workflow="other", status=status, wake_at=1)
        harness.one(Post(f"r{number}", "signal"))
    assert harness.due() == []
    assert harness.store.due(at=9, workflows=["x", "other"], worker="me", everyone=True, limit=9) == ["r0", "r1"]
    assert harness.store.due(at=9, workflows=[], worker="me", everyone=True, limit=9) == []


def test_waiting_runs_are_due_when_their_time_has_come(harness: Harness) -> None:
    harness.enter("you", lease_until=2_000)
    for id, owner in [("free", None), ("mine", "me"), ("yours", "you"), ("orphan", "dead")]:
        harness.start(id, status="waiting", owner=owner, wake_at=500)
    harness.start("never", status="waiting")
    assert harness.due(at=499) == []
    assert harness.due(at=500) == ["free", "mine", "orphan"]
    assert harness.due(at=500, everyone=False) == ["mine"]
    assert harness.due(at=10**18) == ["free", "mine", "orphan"]
    assert harness.store.lapse("you", 2_000)
    assert harness.due(at=500) == ["free", "mine", "orphan", "yours"]


def test_waiting_runs_are_due_when_something_has_arrived(harness: Harness) -> None:
    harness.enter("you", lease_until=2_000)
    for id, owner in [("free", None), ("mine", "me"), ("yours", "you"), ("orphan", "dead")]:
        harness.start(id, status="waiting", owner=owner)
        harness.do(Post(id, "signal"), Post(id, "signal"))
    assert harness.due() == ["free", "mine", "orphan"]
    assert harness.due(everyone=False) == ["mine"]
    harness.one(append_to(harness.row("mine"), status="waiting", consumed=[3, 4]))
    assert harness.due(everyone=False) == []


def test_the_most_urgent_run_comes_first(harness: Harness) -> None:
    harness.start("old", created_at=1)
    harness.start("new", created_at=2)
    harness.start("low", created_at=0, priority=-1)
    harness.start("high", created_at=9, priority=5)
    harness.start("timer", created_at=5, priority=5, status="waiting", wake_at=1)
    harness.start("twice", created_at=3, status="waiting", wake_at=1)
    harness.one(Post("twice", "signal"))
    everything = ["timer", "high", "old", "new", "twice", "low"]
    assert harness.due() == everything
    for limit in range(7):
        assert harness.due(limit=limit) == everything[:limit]


def test_the_longest_overdue_timers_are_considered_first(harness: Harness) -> None:
    for number in range(6):
        harness.start(f"r{number}", status="waiting", wake_at=100 - number, owner="dead" if number % 2 else None)
    assert harness.due(limit=2) == ["r4", "r5"]


def test_the_next_wake_is_the_earliest_timer_that_could_be_due(harness: Harness) -> None:
    harness.enter("you", lease_until=2_000)
    assert harness.store.next_wake(worker="me", everyone=True) is None
    for id, owner, wake_at in [("yours", "you", 1), ("orphan", "dead", 20), ("free", None, 30), ("mine", "me", 40)]:
        harness.start(id, status="waiting", owner=owner, wake_at=wake_at)
    harness.start("running", status="running", wake_at=0)
    assert harness.store.next_wake(worker="me", everyone=False) == 40
    assert harness.store.next_wake(worker="me", everyone=True) == 20
    assert harness.store.next_wake(worker="nobody", everyone=False) is None
    harness.one(append_to(harness.row("orphan"), status="waiting"))
    assert harness.store.next_wake(worker="me", everyone=True) == 30
    harness.now = 10**18
    assert harness.store.next_wake(worker="me", everyone=True) == 30
    assert harness.store.lapse("you", 2_000)
    assert harness.store.next_wake(worker="me", everyone=True) == 1


def test_own_writes_are_not_changes_by_others(harness: Harness) -> None:
    harness.store.changed()
    harness.start("a")
    harness.store.register_worker("me", 1, "host", 1)
    assert not harness.store.changed()


def test_the_clock_is_a_parameter(harness: Harness) -> None:
    harness.now = 123
    assert harness.store.now() == 123


def test_the_store_s_clock_is_not_behind_what_a_worker_said(harness: Harness) -> None:
    harness.enter("me")
    assert harness.store.now() == harness.now
    assert harness.store.renew("me", 99_000, 50_000)
    assert harness.store.now() == 50_000
    assert harness.store.renew("me", 99_000, 40_000)
    assert harness.store.now() == 50_000
    harness.now = 60_000
    assert harness.store.now() == 60_000


def test_a_worker_that_is_declared_gone_has_ended_and_is_fenced_and_that_is_kept(harness: Harness) -> None:
    harness.enter("w")
    harness.enter("other")
    for id, owner, status in [("mine", "w", "running"), ("asleep", "w", "waiting"), ("theirs", "other", "running")]:
        harness.start(id, owner=owner, status=status)
    before = harness.row("mine")
    assert harness.store.owners() == ["other", "w"]
    assert not harness.store.has_ended("w")
    said = GoneRow("worker", "w", 50, "ann", "its rack burned")
    harness.store.declare_gone(said, ["w"])
    assert harness.store.has_ended("w")
    assert not harness.store.has_ended("other")
    assert harness.one(append_to(before)) == Refused("fenced")
    row = harness.row("mine")
    assert (row.status, row.owner, row.epoch) == ("queued", None, before.epoch + 1)
    assert (harness.row("asleep").status, harness.row("asleep").owner) == ("waiting", None)
    assert harness.row("theirs").owner == "other"
    assert [worker.id for worker in harness.store.workers()] == ["other"]
    assert not harness.store.renew("w", 20_000)

    harness.store.declare_gone(GoneRow("host", "rack-1", 60, "", "the same"), [])
    assert [row.name for row in harness.store.gone()] == ["rack-1", "w"]
    assert harness.store.gone("worker", "w") == [said]
    assert harness.store.gone("host", "w") == []
    assert not harness.store.has_ended("rack-1"), "of a host it matters when something began there"
