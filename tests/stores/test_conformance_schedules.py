"""What every store does with schedules."""

from typing import Any

from everstep.stores.protocol import Accepted, Failed, Post, Refused
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow
from tests.stores.kit import Harness, new_run

TAKEN = Refused("taken")


def row(name: str = "s", revision: int = 5, **fields: Any) -> ScheduleRow:
    return ScheduleRow(name=name, revision=revision, **{"workflow": "order", **fields})


def create(harness: Harness, *rows: ScheduleRow) -> None:
    assert harness.do(*[ChangeSchedule(one.name, 0, one) for one in rows]) == [Accepted()] * len(rows)


def due(harness: Harness, at: int = 10, limit: int = 9, workflow: str = "order") -> list[str]:
    return [one.name for one in harness.store.due_schedules(at=at, workflows=["x", workflow], limit=limit)]


def test_a_schedule_is_kept_as_it_was_given(harness: Harness) -> None:
    given = row(next_at=7, waits=True, definition=b'{"a":"\xc3\xbc"}', state=b'{"b":1}', created_at=3)
    create(harness, given, row("r"))
    assert harness.store.schedules() == [row("r"), given]
    assert harness.store.schedules(name="s") == [given]
    assert harness.store.schedules(name="none") == []


def test_only_whoever_knows_the_newest_revision_changes_a_schedule(harness: Harness) -> None:
    create(harness, row())
    again = ChangeSchedule("s", 0, row(revision=9))
    stale, right, late = (ChangeSchedule("s", one, row(revision=6)) for one in (4, 5, 5))
    assert harness.do(again, stale, right, late) == [TAKEN, TAKEN, Accepted(), TAKEN]
    assert harness.store.schedules() == [row(revision=6)]
    assert harness.one(ChangeSchedule("none", 5, row("none"))) == TAKEN
    assert harness.store.schedules() == [row(revision=6)]


def test_a_deleted_schedule_is_gone_and_may_come_again(harness: Harness) -> None:
    create(harness, row())
    assert harness.do(ChangeSchedule("s", 4, None), ChangeSchedule("s", 5, None)) == [TAKEN, Accepted()]
    assert harness.store.schedules() == []
    assert harness.one(ChangeSchedule("s", 5, row(revision=6))) == TAKEN
    create(harness, row(revision=7))


def test_the_runs_of_a_tick_are_started_with_the_change_or_not_at_all(harness: Harness) -> None:
    create(harness, row())
    harness.start("there", preview="the first one")
    starts = [new_run("a", tags={"t": "1"}, payloads=[("d", b"v")]), new_run("there", preview="the second one")]
    assert harness.one(ChangeSchedule("s", 4, row(revision=6), starts)) == TAKEN
    assert harness.store.run("a") is None
    assert harness.one(ChangeSchedule("s", 5, row(revision=6), starts)) == Accepted()
    assert harness.row("a").tags == {"t": "1"}
    assert len(harness.store.events("a", 1)) == 1
    assert harness.store.payload("a", "d") == b"v"
    assert harness.row("there").preview == "the first one"


def test_a_change_with_a_run_that_cannot_be_is_not_made(harness: Harness) -> None:
    create(harness, row())
    broken = new_run("b")
    broken.row.head_seq = 9
    assert isinstance(harness.one(ChangeSchedule("s", 5, row(revision=6), [new_run("a"), broken])), Failed)
    assert harness.store.schedules() == [row()]
    assert harness.store.run("a") is None


def test_what_is_posted_with_a_change_reaches_runs_that_have_not_ended(harness: Harness) -> None:
    create(harness, row())
    harness.start("a", status="running")
    harness.start("b", status="running")
    harness.end("b")
    posts = [Post(run, "cancel", "", "schedule:s", b"{}", 3) for run in ("a", "b", "none", "a")]
    assert harness.one(ChangeSchedule("s", 5, row(revision=6), (), posts)) == Accepted()
    assert [(one.kind, one.id) for one in harness.store.inbox("a")] == [("cancel", "schedule:s")]
    assert harness.store.signals("b") == []


def test_several_changes_and_starts_in_one_batch_are_done_in_order(harness: Harness) -> None:
    create(harness, row())
    first = ChangeSchedule("s", 5, row(revision=6), [new_run("a", preview="first")])
    second = ChangeSchedule("s", 6, row(revision=7), [new_run("a", preview="second"), new_run("b")])
    post = Post("b", "signal", "n", "", b"1", 3)
    verdicts = harness.do(first, second, post)
    assert verdicts[:2] == [Accepted(), Accepted()]
    assert harness.row("a").preview == "first"
    assert len(harness.store.inbox("b")) == 1


def test_schedules_are_due_by_their_time_and_workflow_and_then_those_that_wait(harness: Harness) -> None:
    create(
        harness,
        row("late", next_at=9),
        row("later", next_at=3),
        row("same", next_at=9),
        row("to come", next_at=11),
        row("never"),
        row("waiting b", waits=True),
        row("waiting a", next_at=20, waits=True),
        row("both", next_at=10, waits=True),
        row("other", workflow="other", next_at=1, waits=True),
    )
    assert due(harness) == ["later", "late", "same", "both", "waiting a", "waiting b"]
    assert due(harness, limit=1) == ["later", "waiting a"]
    assert due(harness, workflow="other") == ["other"]
    assert harness.store.due_schedules(at=10, workflows=[], limit=9) == []
    assert harness.store.next_schedule(workflows=["order"]) == 3
    assert harness.store.next_schedule(workflows=["order", "other"]) == 1
    assert harness.store.next_schedule(workflows=["none"]) is None
    assert harness.store.next_schedule(workflows=[]) is None
