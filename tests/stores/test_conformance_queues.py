"""What every store does with queues of runs and named limits of steps."""

from typing import Any

import pytest

from everstep.stores.protocol import Accepted, Claim, Claimed, NotClaimed, Release, StartRun
from everstep.stores.rows.queues import PLENTY, ChangeQueue, FreeSlot, NoSlot, QueueRoom, QueueRow, TakeSlot
from tests.stores.kit import Harness, append_to, claimed, new_run

UNFINISHED = ("queued", "running", "waiting")


def queue(harness: Harness, name: str = "mail", kind: Any = "queue", at: int = 1_000, **changes: Any) -> None:
    assert harness.one(ChangeQueue(kind, name, changes, at)) == Accepted()


def put(harness: Harness, *runs: str, name: str = "mail", **fields: Any) -> None:
    for place, run in enumerate(runs):
        harness.start(run, **{"queue": name, "created_at": place, **fields})


def take(harness: Harness, run: str, worker: str = "me", at: int = 1_000, **fields: Any) -> bool:
    verdict = harness.one(Claim(run, worker, at, UNFINISHED, queued=True, **fields))
    assert isinstance(verdict, (Claimed, NotClaimed))
    return isinstance(verdict, Claimed)


def waiting(harness: Harness, name: str = "mail", at: int = 1_000, limit: int = 10) -> list[str]:
    return harness.store.queued(name, at=at, workflows=["order"], limit=limit)


def room(harness: Harness, worker: str = "me", at: int = 1_000, queues: Any = None) -> list[QueueRoom]:
    return harness.store.queue_room(at=at, worker=worker, queues=queues)


@pytest.fixture
def me(harness: Harness) -> Harness:
    harness.enter("me")
    return harness


# -- order ----------------------------------------------------------------------------------------------------------


def test_runs_wait_in_their_queue_by_priority_and_then_by_age(harness: Harness) -> None:
    put(harness, "a", "b", "c")
    put(harness, "urgent", priority=5, created_at=9)
    put(harness, "other", name="else")
    harness.start("mine")
    assert waiting(harness) == ["urgent", "a", "b", "c"]
    assert waiting(harness, limit=2) == ["urgent", "a"]
    assert waiting(harness, "else") == ["other"]
    assert harness.due() == ["mine"], "what waits in a queue is not looked for among the others"
    assert room(harness) == [QueueRoom("else", PLENTY), QueueRoom("mail", PLENTY)]
    assert room(harness, queues=["else"]) == [QueueRoom("else", PLENTY)]


def test_only_known_workflows_are_named(harness: Harness) -> None:
    put(harness, "a", workflow="foreign")
    put(harness, "b", created_at=1)
    assert waiting(harness) == ["b"]


def test_a_delayed_run_comes_when_its_time_has_come(me: Harness) -> None:
    put(me, "later", wake_at=5_000, priority=9)
    assert room(me) == [QueueRoom("mail", 0, 5_000)]
    assert waiting(me) == []
    assert not take(me, "later")
    put(me, "now", created_at=3)
    assert (waiting(me), room(me)) == (["now"], [QueueRoom("mail", PLENTY, 5_000)])
    assert waiting(me, at=5_000) == ["later", "now"]
    assert take(me, "later", at=5_000)


# -- slots ----------------------------------------------------------------------------------------------------------


def test_no_more_runs_begin_than_the_queue_has_slots(me: Harness) -> None:
    queue(me, concurrency=2)
    put(me, "a", "b", "c")
    assert room(me) == [QueueRoom("mail", 2)]
    assert [take(me, run) for run in "abc"] == [True, True, False]
    assert room(me) == [QueueRoom("mail", 0)]
    me.one(append_to(me.row("a")))
    assert not take(me, "c"), "it runs"
    me.one(append_to(me.row("a"), status="waiting"))
    assert not take(me, "c"), "a run that waits keeps its slot"
    me.end("a")
    assert take(me, "c")


def test_a_refused_claim_changes_nothing(me: Harness) -> None:
    queue(me, paused=True)
    put(me, "a")
    before = me.row("a")
    assert me.one(Claim("a", "me", 1_000, UNFINISHED, queued=True)) == NotClaimed(before)
    assert me.row("a") == before


def test_whoever_only_writes_something_about_a_run_needs_no_slot(me: Harness) -> None:
    queue(me, concurrency=0)
    put(me, "a")
    assert isinstance(me.one(Claim("a", "me", 1_000, UNFINISHED)), Claimed)


@pytest.mark.parametrize("status", ["held", "completed", "queued"])
def test_a_slot_comes_back_when_a_run_is_held_or_ends_or_is_given_back(me: Harness, status: str) -> None:
    queue(me, concurrency=1)
    put(me, "a", "b")
    assert take(me, "a")
    assert not take(me, "b")
    if status == "queued":
        me.one(Release("a", me.row("a").epoch, "queued"))
    else:
        me.one(append_to(me.row("a"), status=status, release=True))
    assert take(me, "b")


def test_a_run_of_a_dead_worker_keeps_its_slot_and_is_taken_over_without_another(me: Harness) -> None:
    me.enter("you")
    queue(me, concurrency=1)
    put(me, "a", "b")
    assert take(me, "a", "you")
    me.one(append_to(me.row("a")))
    me.kill("you")
    me.store.bury_dead(1_000)
    assert not take(me, "b")
    assert me.due() == ["a"]
    assert take(me, "a")
    assert not take(me, "b")


def test_whoever_claimed_a_run_and_died_before_it_began_has_no_slot(me: Harness) -> None:
    me.enter("you")
    queue(me, concurrency=1)
    put(me, "a", "b")
    assert take(me, "a", "you")
    me.kill("you")
    me.store.bury_dead(1_000)
    assert room(me) == [QueueRoom("mail", 1)]
    assert me.due() == ["a"]
    assert take(me, "b")
    assert not take(me, "a"), "its turn comes again"


def test_each_worker_has_its_own_limit(me: Harness) -> None:
    me.enter("you")
    queue(me, per_worker=1)
    put(me, "a", "b", "c")
    assert take(me, "a")
    assert room(me) == [QueueRoom("mail", 0)]
    assert room(me, "you") == [QueueRoom("mail", 1)]
    assert [take(me, "b"), take(me, "b", "you"), take(me, "c", "you")] == [False, True, False]
    assert take(me, "a"), "the owner may claim again"


def test_each_key_has_its_own_limit_and_others_pass(me: Harness) -> None:
    queue(me, per_key=1)
    put(me, "a1", "a2", "a3", tags={"key": "ann"})
    put(me, "b1", tags={"key": "bob"}, created_at=7)
    put(me, "free", created_at=8)
    assert waiting(me) == ["a1", "b1", "free"]
    assert take(me, "a1")
    assert not take(me, "a2")
    assert waiting(me) == ["b1", "free"]
    me.end("a1")
    assert waiting(me, limit=1) == ["a2"]


def test_a_queue_is_only_claimed_from_by_those_who_serve_it(me: Harness) -> None:
    put(me, "a")
    me.start("b")
    assert not take(me, "a", queues=["default"])
    assert take(me, "b", queues=["mail"]), "runs of the default queue are for whoever has them to drive"
    assert take(me, "a", queues=["mail"])


def test_due_names_only_runs_of_the_queues_that_are_served(me: Harness) -> None:
    put(me, "a", status="running")
    me.start("b", status="running", created_at=1)
    put(me, "own", status="waiting", wake_at=1, owner="me", created_at=2)

    def due(*queues: str) -> list[str]:
        return me.store.due(at=1_000, workflows=["order"], worker="me", everyone=True, limit=9, queues=queues)

    assert due("default") == ["b", "own"]
    assert due("mail") == ["a", "own"]


# -- rates ----------------------------------------------------------------------------------------------------------


def test_a_rate_lets_a_bucketful_begin_and_then_one_by_one(me: Harness) -> None:
    queue(me, rate=2, seconds=1.0)
    put(me, "a", "b", "c", "d")
    assert room(me) == [QueueRoom("mail", 2)]
    assert [take(me, run) for run in "abc"] == [True, True, False]
    assert room(me) == [QueueRoom("mail", 0, 501_000)]
    assert not take(me, "c", at=500_999)
    assert take(me, "c", at=501_000)
    assert not take(me, "d", at=501_000)


def test_a_claim_that_fails_for_another_reason_takes_no_token(me: Harness) -> None:
    me.enter("you")
    queue(me, rate=1, seconds=1.0)
    put(me, "a", owner="you")
    put(me, "b")
    assert not take(me, "a"), "another worker has it"
    assert take(me, "b")


def test_a_changed_rate_begins_with_a_full_bucket(me: Harness) -> None:
    queue(me, rate=1, seconds=60.0)
    put(me, "a", "b", "c")
    assert take(me, "a")
    queue(me, paused=False)
    assert not take(me, "b"), "any other change leaves it as it is"
    queue(me, rate=2)
    assert take(me, "b")


# -- settings -------------------------------------------------------------------------------------------------------


def test_a_change_leaves_what_it_does_not_name(harness: Harness) -> None:
    queue(harness, concurrency=3, rate=5, seconds=2.0)
    queue(harness, paused=True, at=2_000)
    queue(harness, "api", "limit", concurrency=1)
    wanted = QueueRow(kind="queue", name="mail", concurrency=3, rate=5, seconds=2.0, paused=True, changed_at=2_000)
    assert harness.store.queues() == [
        QueueRow(kind="limit", name="api", concurrency=1, changed_at=1_000),
        wanted,
    ]
    queue(harness, concurrency=None, at=3_000)
    assert harness.store.queues()[1].concurrency is None


def test_a_paused_queue_begins_nothing_and_goes_on_with_what_has_begun(me: Harness) -> None:
    put(me, "a", "b")
    assert take(me, "a")
    me.one(append_to(me.row("a")))
    queue(me, paused=True)
    assert room(me) == [QueueRoom("mail", 0)]
    assert not take(me, "b")
    assert take(me, "a")
    queue(me, paused=False)
    assert take(me, "b")


def test_counts_say_who_waits_and_who_has_begun(me: Harness) -> None:
    put(me, "a", "b", "c")
    put(me, "later", wake_at=9_000, name="else")
    take(me, "a")
    me.end("c")
    (other, mail) = me.store.queue_counts()
    assert (mail.name, mail.waiting, mail.delayed, mail.begun, mail.oldest_at) == ("mail", 1, 0, 1, 1)
    assert (other.name, other.waiting, other.delayed, other.begun, other.oldest_at) == ("else", 0, 1, 0, None)


def test_many_claims_of_one_batch_share_what_room_there_is(me: Harness) -> None:
    queue(me, concurrency=2)
    me.do(*(StartRun(new_run(run, queue="mail")) for run in "abcd"))
    verdicts = me.do(*(Claim(run, "me", 1_000, UNFINISHED, queued=True) for run in "abcd"))
    assert [isinstance(verdict, Claimed) for verdict in verdicts] == [True, True, False, False]
    assert claimed(verdicts[0]).id == "a"


# -- named limits of steps ------------------------------------------------------------------------------------------


def slot(run: str, call: int = 1, worker: str = "me", at: int = 1_000) -> TakeSlot:
    return TakeSlot("api", run, call, worker, at)


def test_a_limit_has_so_many_slots(me: Harness) -> None:
    queue(me, "api", "limit", concurrency=2)
    assert me.do(slot("a"), slot("a", 2), slot("b")) == [Accepted(), Accepted(), NoSlot()]
    assert me.one(slot("a")) == Accepted(), "it has it already"
    assert [(one.run, one.call, one.worker, one.since) for one in me.store.slots()] == [
        ("a", 1, "me", 1_000),
        ("a", 2, "me", 1_000),
    ]
    assert me.do(FreeSlot("api", "a", 2, "you"), slot("b")) == [Accepted(), NoSlot()], "another's is not freed"
    assert me.do(FreeSlot("api", "a", 2, "me"), slot("b")) == [Accepted(), Accepted()]


def test_a_limit_of_which_nothing_was_said_has_room_for_all(me: Harness) -> None:
    assert me.do(*(slot("a", call) for call in range(5))) == [Accepted()] * 5


def test_slots_of_a_dead_worker_come_back(me: Harness) -> None:
    me.enter("you")
    queue(me, "api", "limit", concurrency=1)
    assert me.one(slot("a", worker="you")) == Accepted()
    assert me.one(slot("b")) == NoSlot()
    me.kill("you")
    me.store.bury_dead(1_000)
    assert me.store.slots() == []
    assert me.one(slot("b")) == Accepted()


def test_a_limit_may_be_a_rate(me: Harness) -> None:
    queue(me, "api", "limit", rate=1, seconds=10.0)
    assert me.one(slot("a")) == Accepted()
    assert me.one(FreeSlot("api", "a", 1, "me")) == Accepted()
    assert me.one(slot("b")) == NoSlot(10_001_000)
    assert me.one(slot("b", at=10_001_000)) == Accepted()


def test_what_a_worker_says_about_itself_is_kept_with_its_row(harness: Harness) -> None:
    harness.store.register_worker("me", 1, "host", 5, (), b'{"a":1}')
    assert harness.store.workers()[0].about == b'{"a":1}'
    harness.store.renew("me", 9)
    assert harness.store.workers()[0].about == b'{"a":1}'
    harness.store.renew("me", 9, 0, b'{"a":2}')
    assert harness.store.workers()[0].about == b'{"a":2}'
