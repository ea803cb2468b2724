"""`signal`, `cancel`, `hold`, `holds` and `resolve`."""

from tests.cli.conftest import INSTRUCTIONS, Folder

OLD, NEW = {"QUESTION": "old"}, {"QUESTION": "new"}


def diverged(folder: Folder, run: str = "c-1") -> None:
    """Leave a run that the code no longer agrees with, held."""
    folder.left_waiting(run, "app.py:changing", env=OLD)
    assert folder.everstep("run", "app.py:changing", "--id", run, env=NEW).status == 3


def test_a_signal_is_kept_while_nobody_drives_the_run(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    facts = folder.json("signal", "a-1", "approved", "false", "--signal-id", "one")
    assert facts["run"] == "a-1"
    assert facts["signal"] == "approved"
    assert facts["new"] is True
    assert folder.json("signal", "a-1", "approved", "false", "--signal-id", "one")["new"] is False
    other = folder.everstep("signal", "a-1", "approved", "true", "--signal-id", "one")
    assert other.status == 2
    assert "everstep.run.id_conflict" in other.err
    done = folder.everstep("run", "app.py:approval", '"x"', "--id", "a-1")
    assert done.status == 0
    assert done.out.strip() == "false", "a second signal with the same id is not delivered"
    late = folder.everstep("signal", "a-1", "approved", "true")
    assert late.status == 2
    assert "everstep.run.ended" in late.err
    again = folder.everstep("signal", "a-1", "approved", "false", "--signal-id", "one")
    assert again.status == 0
    assert "it took that signal before" in again.err + again.out


def test_what_a_run_did_not_take_before_it_ended_is_shown(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    folder.everstep("signal", "a-1", "other", "1", "--signal-id", "one")
    assert folder.everstep("cancel", "a-1", "--now").status == 0
    assert "signal other (one)" in folder.everstep("show", "a-1").out
    assert folder.json("show", "a-1")["undelivered"] == [{"kind": "signal", "name": "other", "id": "one"}]
    refused = folder.everstep("signal", "a-1", "other", "1", "--signal-id", "one")
    assert refused.status == 2
    assert "ended without taking it" in refused.err


def test_a_value_that_is_no_json_is_answered_with_how_to_write_it(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    done = folder.everstep("signal", "a-1", "approved", "yes")
    assert done.status == 2
    assert """'"yes"'""" in done.err


def test_a_value_that_the_run_rejects_is_told_to_its_sender_and_to_who_looks(folder: Folder) -> None:
    worker = folder.begin("worker", "app.py")
    folder.left_waiting("i-1", "app.py:introduced")
    folder.wait_for(lambda: folder.json("show", "i-1")["waits_for"])
    done = folder.everstep("signal", "i-1", "reader", '{"name": 3}')
    assert done.status == 1
    assert (
        "i-1 rejected the signal reader: not a Reader: Expected `str`, got `int` - at `$.name`" in done.out + done.err
    )
    shown = folder.everstep("show", "i-1").out
    assert "rejected the signal reader: not a Reader: Expected `str`" in shown
    assert "The code did not get it, and the run still waits. Send another value:" in shown
    assert "$.name" in folder.json("show", "i-1")["rejected"][0]["why"]
    again = folder.everstep("signal", "i-1", "reader", "3", "--json")
    assert again.status == 1
    assert "Expected `object`, got `int`" in again.json()["rejected"]
    assert folder.everstep("signal", "i-1", "reader", "4", "--no-wait").status == 0
    assert folder.everstep("signal", "i-1", "reader", '{"name": "ann"}').status == 0
    folder.wait_for(lambda: folder.json("approvals"))
    refused = folder.everstep("approve", "i-1", '{"age": 1}')
    assert refused.status == 1
    assert "i-1 rejected the answer to other: not a Reader: Object missing required field `name`" in refused.out
    assert "rejected the answer to other" in folder.everstep("show", "i-1").out
    assert folder.everstep("approve", "i-1", '{"name": "bob"}').status == 0
    folder.wait_for(lambda: folder.run_row("i-1")[0] == "completed")
    assert folder.json("show", "i-1")["result"] == ["ann", "bob"]
    folder.kill(worker)


def test_cancel_now_ends_a_run_that_nobody_drives(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    assert folder.json("cancel", "a-1", "--now", "--reason", "enough")["status"] == "cancelled"
    done = folder.everstep("run", "app.py:approval", '"x"', "--id", "a-1")
    assert done.status == 1
    assert "was cancelled" in done.err


def test_cancel_reaches_the_process_that_drives_the_run(folder: Folder) -> None:
    process = folder.begin("run", "app.py:approval", '"x"', "--id", "a-1")
    folder.wait_for(lambda: folder.run_row("a-1")[0] == "waiting")
    assert folder.everstep("cancel", "a-1").status == 0
    assert folder.finish(process).status == 1
    assert folder.run_row("a-1")[0] == "cancelled"


def test_a_person_s_hold_stops_a_run_until_it_is_resolved(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    assert folder.everstep("hold", "a-1", "--note", "look at it first").status == 0
    held = folder.everstep("run", "app.py:approval", '"x"', "--id", "a-1")
    assert held.status == 3
    assert "look at it first" in held.err
    assert folder.json("resolve", "a-1", "--retry", "--note", "fine")["status"] == "queued"
    folder.everstep("signal", "a-1", "approved", "true")
    assert folder.everstep("run", "app.py:approval", '"x"', "--id", "a-1").status == 0


def test_a_diverged_run_shows_what_was_recorded_and_what_is_now(folder: Folder) -> None:
    diverged(folder)
    page = folder.everstep("holds").out
    assert "c-1" in page
    assert 'step ask([["old"]]) [read]' in page
    assert 'step ask([["new"]]) [read]' in page
    assert page.count("app.py:") >= 2, "both have their source lines"
    hold = folder.json("holds", "--run", "c-1")[0]
    assert hold["reason"] == "diverged"
    assert hold["workflow"] == "changing"
    assert set(hold["resolutions"]) == {"retry", "accept", "cancel"}
    accept = hold["resolutions"]["accept"]
    assert accept["command"] == f"everstep resolve c-1 --hold {hold['id']} --accept"
    assert accept["consequence"]
    assert folder.json("show", "c-1")["holds"][0]["id"] == hold["id"]


def test_a_hold_about_hostile_text_prints_nothing_that_a_terminal_obeys(folder: Folder) -> None:
    folder.left_waiting("c-1", "app.py:changing", env={"QUESTION": "\x9b2J \x1b[2J \u202e old"})
    held = folder.everstep("run", "app.py:changing", "--id", "c-1", env={"QUESTION": "\x9b2J new"})
    assert held.status == 3
    for done in (held, folder.everstep("holds"), folder.everstep("holds", "--json"), folder.everstep("show", "c-1")):
        found = INSTRUCTIONS.search(done.out + done.err)
        assert found is None, repr(found)


def test_accept_keeps_the_recorded_outcomes_and_the_run_goes_on(folder: Folder) -> None:
    diverged(folder)
    assert folder.everstep("resolve", "c-1", "--accept", "--note", "only the prompt").status == 0
    folder.everstep("signal", "c-1", "go", "true")
    done = folder.everstep("run", "app.py:changing", "--id", "c-1", env=NEW)
    assert done.status == 0, done.err
    assert folder.effects() == ["ask old"]
    note = [event for event in folder.json("history", "c-1") if event["kind"] == "run_resolved"]
    assert note[0]["body"]["note"] == "only the prompt"


def test_the_right_code_lets_it_go_on_without_a_person(folder: Folder) -> None:
    diverged(folder)
    folder.everstep("signal", "c-1", "go", "true")
    assert folder.everstep("run", "app.py:changing", "--id", "c-1", env=OLD).status == 0


def test_skip_gives_an_exhausted_step_its_outcome(folder: Folder) -> None:
    done = folder.everstep("run", "app.py:exhausted", "--id", "e-1", "--json")
    assert done.status == 3
    assert done.json()["holds"][0]["reason"] == "exhausted"
    assert "--skip 1\n" in folder.everstep("holds").out
    assert folder.everstep("resolve", "e-1", "--skip", "41").status == 0
    assert folder.everstep("run", "app.py:exhausted", "--id", "e-1").out.strip() == "42"


def test_many_alike_are_listed_first_and_resolved_with_yes(folder: Folder) -> None:
    for number in (1, 2):
        folder.everstep("run", "app.py:exhausted", "--id", f"e-{number}")
    listed = folder.everstep("resolve", "--reason", "exhausted", "--step", "never_works", "--cancel")
    assert listed.status == 0
    assert "2 would be resolved with cancel" in listed.out
    assert folder.run_row("e-1")[0] == "held"
    assert folder.json("resolve", "--reason", "diverged", "--cancel", "--yes")["resolved"] == []
    done = folder.json("resolve", "--workflow", "exhausted", "--cancel", "--yes")
    assert sorted(done["resolved"]) == ["e-1", "e-2"]
    assert folder.run_row("e-2")[0] == "cancelled"


REFUSED = [
    (("resolve", "e-1"), "Say one of --done, --not-done, --probe, --accept"),
    (("resolve", "e-1", "--retry", "--cancel"), "Say one of"),
    (("resolve", "--retry"), "Name a RUN, or choose many"),
    (("resolve", "e-1", "--retry", "--reason", "x"), "do not go with RUN"),
    (("resolve", "e-1", "--accept"), "'accept' does not resolve hold"),
    (("resolve", "e-1", "--retry", "--hold", "h0"), "has no open hold h0"),
    (("resolve", "e-1", "--skip", "word"), "--skip is not JSON"),
    (("resolve", "f-1", "--retry"), "is failed, not held"),
    (("retry", "e-1"), "only a failed run can be retried"),
    (("hold", "e-1"), "is held already"),
]


def test_what_cannot_be_done_is_refused_with_a_reason(folder: Folder) -> None:
    folder.everstep("run", "app.py:exhausted", "--id", "e-1")
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    for words, said in REFUSED:
        done = folder.everstep(*words)
        assert done.status == 2, words
        assert said in done.err, words
        assert "Traceback" not in done.err
    assert folder.run_row("e-1")[0] == "held", "nothing was changed"
