"""Checkpoints on the command line: they are shown, verified, and new code is compared from the newest one."""

from tests.cli.conftest import Folder


def flip_the_newest(folder: Folder) -> None:
    folder.change(
        "UPDATE checkpoints SET state = CAST(state || x'00' AS BLOB) "
        "WHERE seq = (SELECT max(seq) FROM checkpoints WHERE run = 'r-1')"
    )


def test_show_and_history_mark_checkpoints(folder: Folder) -> None:
    folder.left_waiting("r-1", "app.py:rounds", "5")
    facts = folder.json("show", "r-1")
    events = folder.json("history", "r-1")
    seqs = [event["seq"] for event in events if event["kind"] == "checkpoint_taken"]
    assert facts["checkpoints"] == seqs
    assert len(seqs) == 5
    shown = folder.everstep("show", "r-1").out
    assert f"5 checkpoints, the newest at event {seqs[-1]}" in shown
    assert folder.everstep("history", "r-1").out.count("checkpoint_taken") == 5


def test_a_run_goes_on_and_says_that_it_passed_over_a_damaged_checkpoint(folder: Folder) -> None:
    folder.left_waiting("r-1", "app.py:rounds", "5")
    assert folder.everstep("verify", "r-1").status == 0
    flip_the_newest(folder)
    verified = folder.everstep("verify", "r-1")
    assert verified.status == 1
    assert "does not match its digest" in verified.out
    folder.everstep("signal", "r-1", "go", "true")
    done = folder.everstep("run", "app.py:rounds", "5", "--id", "r-1")
    assert done.status == 0, done.err
    assert "was not used: it does not match its digest" in done.out + done.err
    assert len(folder.effects()) == 5, "nothing was done again"
    assert folder.everstep("verify", "r-1").status == 0, "it is in the archive now"
    assert "was not used" in folder.everstep("show", "r-1").out


def test_replay_compares_new_code_from_the_newest_checkpoint_and_changes_nothing(folder: Folder) -> None:
    folder.left_waiting("r-1", "app.py:rounds", "5")
    (found,) = folder.json("replay", "app.py", env={"READER": "bob"})["runs"]
    assert found["verdict"] == "goes on", "what lies before the checkpoint is not compared"
    flip_the_newest(folder)
    (found,) = folder.json("replay", "app.py")["runs"]
    assert found["verdict"] == "goes on"
    (found,) = folder.json("replay", "app.py", env={"READER": "bob"})["runs"]
    assert found["verdict"] == "diverged", "from the next older one a finished step is compared"
    assert found["differences"][0]["what"] == "arguments"
    assert folder.everstep("verify", "r-1").status == 1, "whoever only looks archives nothing"
