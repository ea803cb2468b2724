"""What every store does with notifications of holds."""

from typing import Any

import pytest

from everstep.stores.protocol import Accepted, Failed, HoldRow, Refused
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
from tests.stores.kit import Harness, append_to

TARGET = "https://example.org/hooks"
TAKEN = Refused("taken")


def note(hold: str = "h", run: str = "a", target: str = TARGET, **fields: Any) -> NotificationRow:
    return NotificationRow(id=f"{hold}-{target}", hold=hold, run=run, target=target, **fields)


def hold_run(harness: Harness, *notes: NotificationRow, hold: str = "h", run: str = "a") -> None:
    """Start a run and put it on hold, with notifications."""
    row = harness.start(run, status="running")
    unit = append_to(row, status="held", hold=HoldRow(id=hold, run=run, reason="asked"), notifications=notes)
    assert harness.one(unit) == Accepted()


def take(attempt: int = 1, worker: str = "me", at: int = 10, until: int = 50, hold: str = "h") -> TakeNotification:
    return TakeNotification(f"{hold}-{TARGET}", attempt, worker, at, until)


def settle(state: Any, attempt: int = 1, next_at: int = 0, error: str = "") -> SettleNotification:
    return SettleNotification(f"h-{TARGET}", attempt, state, next_at, error)


def due(harness: Harness, at: int = 10, limit: int = 9, target: str = TARGET) -> list[str]:
    return [row.hold for row in harness.store.due_notifications(target=target, at=at, limit=limit)]


def the_note(harness: Harness) -> NotificationRow:
    (row,) = harness.store.notifications(undelivered_only=False)
    return row


def test_a_notification_is_written_with_its_hold_and_as_it_was_given(harness: Harness) -> None:
    given = note(state="pending", attempts=3, next_at=7, claimed_by="you", last_error="ünï\n'", created_at=5)
    hold_run(harness, given)
    assert harness.store.notifications() == harness.store.notifications(run="a") == [given]
    assert harness.store.notifications(run="b") == []


def test_a_hold_that_is_refused_or_fails_leaves_no_notification(harness: Harness) -> None:
    hold_run(harness, note())
    row = harness.row("a")
    row.epoch += 1
    other = append_to(row, hold=HoldRow(id="i", run="a", reason="asked"), notifications=[note("i")])
    assert harness.one(other) == Refused("fenced")
    again = append_to(harness.row("a"), hold=HoldRow(id="h", run="a", reason="asked"), notifications=[note("j")])
    assert isinstance(harness.one(again), Failed)
    assert [row.hold for row in harness.store.notifications(undelivered_only=False)] == ["h"]


def test_notifications_are_due_by_target_the_longest_due_first(harness: Harness) -> None:
    for name, next_at in (("x", 9), ("y", 3), ("z", 11), ("w", 9)):
        hold_run(harness, note(name, name, next_at=next_at), hold=name, run=name)
    hold_run(harness, note("v", "v", "https://example.org/others", next_at=1), hold="v", run="v")
    assert due(harness) == ["y", "w", "x"]
    assert due(harness, limit=2) == ["y", "w"]
    assert due(harness, target="https://example.org/others") == ["v"]
    assert harness.store.next_notification(target=TARGET) == 3
    assert harness.store.next_notification(target="none") is None


def test_of_two_who_take_one_notification_one_gets_it(harness: Harness) -> None:
    hold_run(harness, note())
    harness.enter("me")
    assert harness.do(take(), take(worker="you"), take(2, worker="you")) == [Accepted(), TAKEN, TAKEN]
    row = the_note(harness)
    assert (row.attempts, row.claimed_by, row.next_at) == (1, "me", 50)
    assert due(harness, at=49) == []
    assert due(harness, at=50) == ["h"]


def test_a_claim_ends_with_its_time(harness: Harness) -> None:
    hold_run(harness, note())
    harness.enter("me")
    harness.one(take(until=50))
    assert harness.one(take(2, "you", at=49, until=90)) == TAKEN
    assert harness.one(take(1, "you", at=50, until=90)) == TAKEN, "the attempt that was begun counts"
    assert harness.one(take(2, "you", at=50, until=90)) == Accepted()


def test_a_claim_ends_with_the_worker_that_made_it(harness: Harness) -> None:
    hold_run(harness, note())
    harness.enter("me")
    harness.one(take(until=5_000))
    harness.kill("me")
    assert due(harness) == []
    harness.store.bury_dead(10)
    assert due(harness) == ["h"]
    assert harness.one(take(2, "you", until=90)) == Accepted()
    assert due(harness) == ["h"], "whoever is not among the workers is as good as gone"


def test_a_notification_that_was_put_off_is_due_later(harness: Harness) -> None:
    hold_run(harness, note())
    harness.enter("me")
    harness.one(take(until=50))
    assert harness.one(settle("pending", next_at=70, error="HTTP 500")) == Accepted()
    row = the_note(harness)
    assert (row.state, row.attempts, row.claimed_by, row.last_error) == ("pending", 1, None, "HTTP 500")
    assert due(harness, at=69) == []
    assert due(harness, at=70) == ["h"]


def test_what_was_sent_is_sent_once_and_for_all(harness: Harness) -> None:
    hold_run(harness, note())
    harness.one(take())
    assert harness.one(settle("sent")) == Accepted()
    assert harness.do(settle("sent"), settle("pending", next_at=1), take(2)) == [TAKEN] * 3
    row = the_note(harness)
    assert (row.state, row.claimed_by, row.last_error) == ("sent", None, "")
    assert harness.store.notifications() == []
    assert harness.store.next_notification(target=TARGET) is None


def test_only_the_last_attempt_says_what_comes_next(harness: Harness) -> None:
    hold_run(harness, note())
    harness.enter("me")
    harness.do(take(until=10), take(2, "you", until=90))
    assert harness.one(settle("given up", 1)) == TAKEN
    assert harness.one(settle("sent", 1)) == Accepted(), "but what has arrived has arrived"


def test_what_was_given_up_is_not_taken_again_and_stays_in_sight(harness: Harness) -> None:
    hold_run(harness, note())
    harness.one(take())
    assert harness.one(settle("given up", error="HTTP 410")) == Accepted()
    assert due(harness, at=10_000) == []
    assert harness.one(take(2, at=10_000)) == TAKEN
    assert [row.state for row in harness.store.notifications()] == ["given up"]


@pytest.mark.parametrize("state", ["pending", "sent", "given up"])
def test_when_a_hold_is_resolved_its_pending_notifications_are_dropped(harness: Harness, state: str) -> None:
    hold_run(harness, note(), note("h", "a", "https://example.org/others"))
    hold_run(harness, note("i", "b"), hold="i", run="b")
    harness.one(take())
    if state != "pending":
        harness.one(settle(state))
    resolved = HoldRow(id="h", run="a", reason="", resolved_at=5)
    assert harness.one(append_to(harness.row("a"), status="queued", hold=resolved)) == Accepted()
    states = {row.target: row.state for row in harness.store.notifications(run="a", undelivered_only=False)}
    assert states == {TARGET: "dropped" if state == "pending" else state, "https://example.org/others": "dropped"}
    assert [row.hold for row in harness.store.notifications()] == ["i"], "another hold's waits on"
    assert harness.store.notifications(run="a") == []
    assert harness.one(take(2, at=5_000)) == TAKEN
    if state == "pending":
        assert harness.one(settle("sent")) == Accepted(), "it arrived while the hold was being resolved"


def test_a_resolution_that_changes_nothing_drops_nothing(harness: Harness) -> None:
    hold_run(harness, note())
    wrong = HoldRow(id="h", run="b", reason="", resolved_at=5)
    harness.start("b", status="running")
    harness.one(append_to(harness.row("b"), hold=wrong))
    assert the_note(harness).state == "pending"


def test_operations_on_a_notification_that_is_not_there_are_refused(harness: Harness) -> None:
    assert harness.do(take(), settle("sent"), settle("pending")) == [TAKEN] * 3


def test_a_worker_says_which_targets_it_delivers_to(harness: Harness) -> None:
    harness.store.register_worker("me", 1, "host", 10_000, ["https://example.org/ünï", "b"])
    harness.enter("you")
    assert [worker.targets for worker in harness.store.workers()] == [["https://example.org/ünï", "b"], []]
