"""`everstep fork`: a new run from an event of another one, and who tells of it."""

from tests.cli.conftest import Folder

REPORT = ("run", "app.py:report", '"tides"', '{"name": "ann"}')


def outcomes(folder: Folder, run: str) -> list[tuple[int, str]]:
    events = folder.json("history", run)
    return [(event["seq"], event["step"]) for event in events if event["kind"] == "step_completed"]


def test_a_fork_is_refused_with_the_names_of_what_would_happen_again_and_allowed_by_name(folder: Folder) -> None:
    assert folder.everstep(*REPORT, "--id", "r-1").status == 0
    (_, (at, _), _) = outcomes(folder, "r-1")
    refused = folder.everstep("fork", "r-1", "--at", str(at))
    assert refused.status == 2
    assert "send (event" in refused.err
    assert "--allow STEP" in refused.err
    facts = folder.json("fork", "r-1", "--at", str(at), "--id", "r-2", "--allow", "send")
    assert facts == {
        "run": "r-2", "forked_from": "r-1", "generation": 1, "at": at, "edited": "", "status": "queued",
    }  # fmt: skip
    assert folder.everstep(*REPORT, "--id", "r-2").status == 0
    sent = [line for line in (folder.path / "effects.txt").read_text().splitlines() if line.startswith("send")]
    assert len(set(sent)) == len(sent) == 2, "with another key"
    assert folder.everstep("verify", "--all").status == 0


def test_show_ls_and_history_tell_where_a_fork_comes_from(folder: Folder) -> None:
    assert folder.everstep(*REPORT, "--id", "r-1").status == 0
    (_, (at, _), _) = outcomes(folder, "r-1")
    done = folder.everstep(
        "fork", "r-1", "--at", str(at), "--id", "r-2", "--allow-effects", "--input", '"else"', "--note", "why not"
    )
    assert done.status == 0
    assert f"forked from r-1@{at}" in done.out
    shown = folder.everstep("show", "r-2").out
    assert f"forked from r-1@{at}, with another outcome" in shown
    assert "given when the run was forked" in shown
    forked = folder.json("show", "r-2")["forked"]
    assert (forked["run"], forked["seq"], forked["note"]) == ("r-1", at, "why not")
    assert f"forked from r-1@{at}" in folder.everstep("ls").out
    assert [row["id"] for row in folder.json("ls", "--tag", f"forked-from=r-1@{at}")] == ["r-2"]
    assert f"forked from r-1@{at}" in folder.everstep("history", "r-2").out
    ended = folder.everstep(*REPORT, "--id", "r-2")
    assert ended.status == 0
    assert "else" in ended.out


def test_other_arguments_at_event_1_become_what_the_workflow_takes(folder: Folder) -> None:
    assert folder.everstep(*REPORT, "--id", "r-1").status == 0
    at_1 = ("fork", "r-1", "--at", "1", "--allow-effects", "--id", "r-2", "--input")
    wrong = folder.everstep(*at_1, '"moons"', "--app", "app.py")
    assert (wrong.status, "JSON list" in wrong.err) == (2, True)
    without = folder.everstep(*at_1, '["moons", {"name": "bob"}]')
    assert (without.status, "--app" in without.err) == (2, True)
    assert folder.everstep(*at_1, '["moons", {"name": "bob"}]', "--app", "app.py").status == 0
    assert "send bob" not in (folder.path / "effects.txt").read_text(), "a command does not drive runs"
    done = folder.everstep("run", "app.py:report", '"moons"', '{"name": "bob"}', "--id", "r-2")
    assert done.status == 0
    assert "sent to bob" in done.out
    assert "Reader" in done.out


def test_a_fork_that_the_code_does_not_agree_with_is_refused_where_the_code_is_and_held_where_it_is_not(
    folder: Folder,
) -> None:
    old, new = {"QUESTION": "old"}, {"QUESTION": "new"}
    folder.left_waiting("c-1", "app.py:changing", env=old)
    (at, _) = outcomes(folder, "c-1")[-1]
    refused = folder.everstep("fork", "c-1", "--at", str(at), "--app", "app.py", env=new)
    assert refused.status == 2
    assert "no longer does what was recorded" in refused.err
    assert folder.everstep("fork", "c-1", "--at", str(at), "--id", "c-2").status == 0
    assert folder.everstep("run", "app.py:changing", "--id", "c-2", env=new).status == 3
    assert [one["reason"] for one in folder.json("holds")] == ["diverged"]
