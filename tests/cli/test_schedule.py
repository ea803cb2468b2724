"""`everstep schedule`: what is started at which times, from the command line."""

import pytest

from tests.cli.conftest import Folder


def create(folder: Folder, *words: str, name: str = "nightly") -> None:
    done = folder.everstep("schedule", "create", name, "approval", '"tides"', *words)
    assert done.status == 0, done.err


def test_a_schedule_is_created_listed_shown_and_deleted(folder: Folder) -> None:
    made = folder.everstep(
        "schedule", "create", "nightly", "approval", '"tides"', "--cron", "0 9 * * MON-FRI", "--zone", "Europe/Berlin"
    )
    assert made.status == 0
    assert "nightly: starts approval at 0 9 * * MON-FRI (Europe/Berlin); next 2" in made.out
    assert "No worker is there" in made.out
    assert "everstep worker FILE" in made.out
    (row,) = folder.json("schedule", "ls")
    assert (row["name"], row["workflow"], row["arguments"]) == ("nightly", "approval", '[["tides"]]')
    listed = folder.everstep("schedule", "ls").out
    assert "nightly" in listed
    assert "none yet" in listed
    shown = folder.everstep("schedule", "show", "nightly").out
    assert 'approval("tides")' in shown
    assert "0 started, 0 skipped, 0 missed" in shown
    assert folder.json("schedule", "show", "nightly") == row
    assert folder.json("schedule", "delete", "nightly") == {"schedule": "nightly", "deleted": True}
    assert "There are no schedules" in folder.everstep("schedule", "ls").out
    gone = folder.everstep("schedule", "show", "nightly")
    assert gone.status == 2
    assert "everstep.schedule.unknown" in gone.err


def test_all_options_reach_the_schedule(folder: Folder) -> None:
    words = ["--every", "1h", "--offset", "5m", "--jitter", "90s", "--overlap", "cancel", "--catch-up", "all"]
    create(folder, *words, "--catch-up-max", "7", "--queue", "slow", "--priority", "3", "--tag", "team=a")
    facts = folder.json("schedule", "show", "nightly")
    assert (facts["every"], facts["offset"], facts["jitter"], facts["catch_up_max"]) == (3600.0, 300.0, 90.0, 7)
    assert (facts["overlap"], facts["catch_up"], facts["queue"], facts["priority"]) == ("cancel", "all", "slow", 3)
    assert facts["tags"] == {"team": "a"}
    shown = folder.everstep("schedule", "show", "nightly").out
    assert "every 1 h, moved by 5 min, up to 1 min 30 s later" in shown
    assert "all, 7 at most" in shown


def test_a_schedule_is_paused_with_a_note_and_resumed(folder: Folder) -> None:
    create(folder, "--every", "1h")
    assert folder.everstep("schedule", "pause", "nightly", "--note", "the printer \x1b[31mburns").status == 0
    shown = folder.everstep("schedule", "show", "nightly").out
    assert "it is paused" in shown
    assert "the printer \\x1b[31mburns" in shown
    assert folder.json("schedule", "show", "nightly")["is_paused"] is True
    assert "continues; next 2" in folder.everstep("schedule", "resume", "nightly").out
    assert folder.json("schedule", "show", "nightly")["is_paused"] is False


def test_what_is_triggered_and_backfilled_is_kept_until_a_worker_is_there(folder: Folder) -> None:
    create(folder, "--every", "1d")
    run = folder.json("schedule", "trigger", "nightly")["run"]
    filled = folder.json(
        "schedule", "backfill", "nightly", "--from", "2026-11-01T00:00:00Z", "--to", "2026-11-03T00:00:00Z"
    )
    assert filled["runs"] == ["nightly@2026-11-01T00:00:00Z", "nightly@2026-11-02T00:00:00Z"]
    worker = folder.begin("worker", "app.py")
    for one in (run, *filled["runs"]):
        folder.wait_for(lambda one=one: folder.run_row(one)[0] == "waiting")
    folder.kill(worker)
    facts = folder.json("schedule", "show", "nightly")
    assert (facts["fired"], facts["asked"]) == (3, [])
    assert {row["id"] for row in folder.json("ls", "--tag", "schedule=nightly")} == {run, *filled["runs"]}


def test_a_worker_that_is_there_starts_what_a_command_schedules(folder: Folder) -> None:
    worker = folder.begin("worker", "app.py")
    folder.wait_for((folder.path / "everstep.db").exists)
    create(folder, "--cron", "* * * * * *")
    folder.wait_for(lambda: len(folder.json("ls", "--tag", "schedule=nightly")) == 1)
    folder.everstep("schedule", "create", "nightly", "approval", '"other"', "--every", "1s", "--overlap", "allow")
    folder.wait_for(lambda: len(folder.json("ls", "--tag", "schedule=nightly")) > 3)
    folder.kill(worker)


def test_arguments_are_checked_where_the_code_is_known(folder: Folder) -> None:
    wrong = folder.begin("schedule", "create", "s", "app.py:approval", "--every", "1h")
    done = folder.finish(wrong)
    assert done.status == 2
    assert "approval takes (question: str)" in done.err
    right = folder.begin("schedule", "create", "s", "app.py:approval", '"why"', "--every", "1h", "--json")
    assert '"workflow": "approval"' in folder.finish(right).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cron", "61 * * * *"], "not a cron expression"),
        ([], "cron= expression or an every= interval"),
        (["--every", "1h", "--zone", "Moon/Base"], "no time zone"),
        (["--every", "5"], "30d, 1h30m or 2s"),
        (["--every", "1h", "--overlap", "both"], "--overlap"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(folder: Folder, words: list[str], said: str) -> None:
    done = folder.everstep("schedule", "create", "s", "approval", '"x"', *words)
    assert done.status == 2
    assert said in done.err


def test_a_backfill_without_a_tick_says_so(folder: Folder) -> None:
    create(folder, "--cron", "0 0 29 2 *")
    done = folder.everstep("schedule", "backfill", "nightly", "--from", "2026-11-01T00:00:00Z")
    assert done.status == 2
    assert "no tick in that time" in done.err
