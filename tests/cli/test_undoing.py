"""`rollback`, `resolve --rollback`, and how `show`, `history` and `run` tell of what is undone."""

from tests.cli.conftest import Folder

BOOKED = ["book Oslo", "book Rome"]
UNDONE = ["cancel room in Rome", "cancel room in Oslo"]


def test_a_failed_run_says_what_was_undone_and_offers_no_retry(folder: Folder) -> None:
    done = folder.everstep("run", "app.py:trip", "true", "--id", "t-1")
    assert done.status == 1
    assert "↩ cancel_room#2 undoes book_room#2" in done.err
    assert "↩ undone: book_room, book_room#2" in done.err
    assert "everstep retry" not in done.err
    assert folder.effects() == BOOKED + UNDONE
    page = folder.everstep("show", "t-1").out
    assert "↩  book_room " in page
    assert "2 to undo, because RuntimeError: no car" in page
    assert "undoes book_room#2" in page
    assert "↩ undone: book_room, book_room#2" in page
    assert "everstep retry" not in page
    facts = folder.json("show", "t-1")
    assert facts["compensations"] == {"book_room": "compensated", "book_room#2": "compensated"}
    assert facts["rolled_back"] is False
    assert facts["error"]["notes"] == ["Compensated: book_room#2, book_room."]
    undoing = next(step for step in facts["steps"] if step["name"] == "cancel_room")
    assert undoing["undoes"] == "book_room"
    retried = folder.everstep("retry", "t-1")
    assert retried.status == 2
    assert "everstep.run.compensation_begun" in retried.err


def test_rollback_of_a_completed_run(folder: Folder) -> None:
    folder.everstep("run", "app.py:trip", "false", "--id", "t-1")
    assert folder.effects() == BOOKED
    asked = folder.everstep("rollback", "t-1", "--note", "changed my mind")
    assert asked.status == 0
    assert "rollback requested" in asked.out
    assert "No worker is there" in asked.out
    assert "is about to be undone" in folder.everstep("show", "t-1").out
    again = folder.everstep("rollback", "t-1")
    assert again.status == 2
    assert "is being undone already" in again.err
    done = folder.everstep("run", "app.py:trip", "false", "--id", "t-1")
    assert done.status == 1
    assert "run t-1 was rolled back" in done.err
    assert folder.effects() == BOOKED + UNDONE
    page = folder.everstep("show", "t-1").out
    assert "cancelled (rolled back)" in page
    assert "changed my mind" in page
    assert folder.json("show", "t-1")["rolled_back"] is True
    kinds = [line["kind"] for line in folder.json("history", "t-1")]
    assert [kind for kind in kinds if not kind.startswith("step_")] == [
        *("run_started", "run_completed", "rollback_requested", "compensation_started", "run_cancelled"),
    ]
    assert "because=rollback" in folder.everstep("history", "t-1").out


def test_rollback_with_json_says_how_the_run_is_now(folder: Folder) -> None:
    folder.everstep("run", "app.py:trip", "false", "--id", "t-1")
    assert folder.json("rollback", "t-1") == {"run": "t-1", "rollback": "requested", "status": "queued"}


def test_rollback_names_what_it_would_leave_and_how_to_allow_it(folder: Folder) -> None:
    folder.everstep("run", "app.py:trip", "false", "true", "--id", "t-1")
    refused = folder.everstep("rollback", "t-1")
    assert refused.status == 2
    assert "would leave as they are: send_card" in refused.err
    assert "everstep rollback t-1 --allow-uncompensated" in refused.err
    assert folder.run_row("t-1")[0] == "completed"
    assert folder.everstep("rollback", "t-1", "--allow-uncompensated").status == 0
    folder.everstep("run", "app.py:trip", "false", "true", "--id", "t-1")
    assert folder.effects() == [*BOOKED, "card from Rome", *UNDONE]


def test_a_failed_compensation_is_explained_and_skipped(folder: Folder) -> None:
    folder.file("hotel is closed")
    done = folder.everstep("run", "app.py:trip", "true", "--id", "t-1")
    assert done.status == 3
    page = folder.everstep("holds").out
    assert "the compensation of book_room#2 failed" in page
    assert "leave book_room#2 as it is, and continue with the other compensations" in page
    assert "not compensated: book_room#2, book_room" in page
    assert "to be undone: book_room, book_room#2" in folder.everstep("show", "t-1").out
    (folder.path / "hotel is closed").unlink()
    assert folder.everstep("resolve", "t-1", "--skip", "null", "--note", "called them").status == 0
    assert folder.everstep("run", "app.py:trip", "true", "--id", "t-1").status == 1
    assert folder.json("show", "t-1")["compensations"] == {"book_room": "compensated", "book_room#2": "skipped"}
    assert "left as it is: book_room#2" in folder.everstep("show", "t-1").out


def test_a_compensation_that_was_given_up_can_be_gone_on_with(folder: Folder) -> None:
    folder.file("hotel is closed")
    folder.everstep("run", "app.py:trip", "true", "--id", "t-1")
    assert folder.everstep("resolve", "t-1", "--cancel").status == 0
    page = folder.everstep("show", "t-1").out
    assert "not undone: book_room, book_room#2" in page
    assert "everstep rollback t-1" in page
    (folder.path / "hotel is closed").unlink()
    assert folder.everstep("rollback", "t-1").status == 0
    folder.everstep("run", "app.py:trip", "true", "--id", "t-1")
    assert folder.effects() == [*BOOKED, "cancel room in Rome", *UNDONE]


def test_a_held_run_with_nothing_to_undo_offers_no_rollback_and_takes_one(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    folder.everstep("hold", "a-1")
    assert "--rollback" not in folder.everstep("holds").out
    refused = folder.everstep("resolve", "a-1", "--rollback")
    assert refused.status == 2
    assert "`everstep rollback a-1`" in refused.err
    assert folder.json("rollback", "a-1", "--note", "no")["status"] == "queued"
    assert folder.everstep("run", "app.py:approval", '"x"', "--id", "a-1").status == 1
    assert folder.json("show", "a-1")["rolled_back"] is True
