"""`everstep effects`: keys, who has them, and what a person decides about one."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import INSTRUCTIONS, Folder


@pytest.fixture(autouse=True)
def program(folder: Folder) -> None:
    shutil.copy(Path(__file__).with_name("paying.py"), folder.path / "paying.py")


def paid(folder: Folder, number: int, run: str) -> None:
    assert folder.everstep("run", "paying.py", str(number), "--id", run).status == 0


def left_in_doubt(folder: Folder) -> None:
    """Leave a cancelled run of which nobody knows whether it paid."""
    folder.file("reset")
    assert folder.everstep("run", "paying.py", "7", "--id", "a").status == 3
    assert folder.everstep("resolve", "a", "--cancel").status == 0
    (folder.path / "reset").unlink()


def test_keys_are_listed_and_searched(folder: Folder) -> None:
    paid(folder, 7, "a")
    paid(folder, 8, "b")
    paid(folder, 7, "c")
    assert len(folder.effects()) == 2
    shown = folder.everstep("effects")
    assert shown.status == 0
    assert shown.out.index("invoice:8") < shown.out.index("invoice:7")
    assert "paid 8" in shown.out
    (seven,) = folder.json("effects", "--key", "invoice:7")
    wanted = {"key": "invoice:7", "state": "done", "step": "pay", "effect": "once", "run": "a", "outcome": "paid 7"}
    assert wanted.items() <= seven.items()
    assert (seven["run_status"], seven["waiting"], seven["generation"], seven["seq"]) == ("completed", [], 1, 2)
    for words, expected in {
        ("--key", "invoice:"): ["invoice:8", "invoice:7"],
        ("--key", "*:8"): ["invoice:8"],
        ("--key", "inv?ice:[7]"): ["invoice:7"],
        ("--key", "nothing"): [],
        ("--run", "b"): ["invoice:8"],
        ("--step", "pay", "--limit", "1"): ["invoice:8"],
        ("--step", "other"): [],
        ("--state", "done"): ["invoice:8", "invoice:7"],
        ("--state", "in-doubt"): [],
    }.items():
        assert [one["key"] for one in folder.json("effects", *words)] == expected, words
    assert "No key matches" in folder.everstep("effects", "--key", "nothing").out


def test_show_and_history_say_who_did_it(folder: Folder) -> None:
    paid(folder, 7, "a")
    paid(folder, 7, "b")
    shown = folder.everstep("show", "b")
    assert "done by a" in shown.out
    assert [one["kind"] for one in folder.json("history", "b")][1:3] == ["key_taken", "step_shared"]
    again = folder.everstep("run", "paying.py", "7", "--id", "d")
    assert "pay  was done by a" in again.err + again.out


def test_show_says_which_key_a_run_waits_for(folder: Folder) -> None:
    folder.file("slow")
    first = folder.begin("run", "paying.py", "7", "--id", "a")
    folder.wait_for(folder.effects)
    second = folder.begin("run", "paying.py", "7", "--id", "b")
    folder.wait_for(lambda: folder.run_row("b")[0] == "waiting")
    (wait,) = folder.json("show", "b")["waits_for"]
    told = {"key": "invoice:7", "step": "pay", "run": "a", "command": "everstep effects --key invoice:7"}
    assert wait == {**told, "state": "under-way"}
    shown = folder.everstep("show", "b").out
    assert "waits for the key invoice:7, which run a has" in shown
    assert [one["waiting"] for one in folder.json("effects")] == [["b"]]
    refused = folder.everstep("effects", "--free", "invoice:7", "--note", "no", "--yes")
    assert refused.status == 2
    assert "everstep.step.key_conflict" in refused.err
    assert "everstep show a" in refused.err
    (folder.path / "slow").unlink()
    assert [folder.finish(process).status for process in (first, second)] == [0, 0]
    assert len(folder.effects()) == 1


def test_a_key_left_in_doubt_is_shown_with_both_answers(folder: Folder) -> None:
    left_in_doubt(folder)
    shown = folder.everstep("effects").out
    assert "in-doubt" in shown
    assert "everstep effects --free invoice:7" in shown
    assert "everstep effects --done invoice:7 JSON" in shown
    assert [one["state"] for one in folder.json("effects", "--state", "in-doubt")] == ["in-doubt"]


def test_without_yes_a_decision_only_shows_its_consequences(folder: Folder) -> None:
    left_in_doubt(folder)
    shown = folder.everstep("effects", "--free", "invoice:7")
    assert shown.status == 0
    assert "with the same idempotency key" in shown.out
    assert "Nothing was changed" in shown.out
    assert folder.json("effects")[0]["state"] == "in-doubt"
    assert folder.json("effects", "--done", "invoice:7", '"x"')["decided"] is False


def test_a_key_left_in_doubt_is_given_the_outcome_that_a_person_knows(folder: Folder) -> None:
    left_in_doubt(folder)
    said = folder.json("effects", "--done", "invoice:7", '"paid, says the bank"', "--note", "asked them", "--yes")
    assert said["decided"] is True
    done = folder.everstep("run", "paying.py", "7", "--id", "b")
    assert done.out.strip() == '"paid, says the bank"'
    (row,) = folder.json("effects")
    assert (row["state"], row["note"], bool(row["by"])) == ("done", "asked them", True)
    assert len(folder.effects()) == 1


def test_a_key_left_in_doubt_is_freed(folder: Folder) -> None:
    left_in_doubt(folder)
    assert folder.everstep("effects", "--free", "invoice:7", "--note", "they know nothing", "--yes").status == 0
    paid(folder, 7, "b")
    keys = {line.split()[2] for line in folder.effects()}
    assert len(folder.effects()) == 2
    assert len(keys) == 1


def test_what_was_done_is_freed_for_another_round(folder: Folder) -> None:
    paid(folder, 7, "a")
    shown = folder.everstep("effects", "--free", "invoice:7")
    assert "another idempotency key" in shown.out
    folder.everstep("effects", "--free", "invoice:7", "--yes")
    assert [one["state"] for one in folder.json("effects")] == ["free"]
    paid(folder, 7, "b")
    assert len({line.split()[2] for line in folder.effects()}) == 2
    refused = folder.everstep("effects", "--done", "invoice:7", "1", "--yes")
    assert "has an outcome" in refused.err


def test_mistakes_are_answered(folder: Folder) -> None:
    paid(folder, 7, "a")
    nobody = folder.everstep("effects", "--free", "invoice:none", "--yes")
    assert nobody.status == 2
    assert "No step has the key" in nobody.err
    assert folder.everstep("effects", "--free", "a", "--done", "b", "1").status == 2
    wrong = folder.everstep("effects", "--done", "invoice:7", "yes", "--yes")
    assert """'"yes"'""" in wrong.err


def test_a_hostile_outcome_reaches_the_terminal_as_text(folder: Folder) -> None:
    paid(folder, 7, "a")
    folder.everstep("effects", "--free", "invoice:7", "--yes", "--note", "\x1b[31mred")
    folder.change("UPDATE effects SET step = ?, run = ?", "\x1b[2J", "\x9b2J")
    assert not INSTRUCTIONS.search(folder.everstep("effects").out)
    assert not INSTRUCTIONS.search(folder.everstep("effects", "--json").out)
