"""`everstep repair` and `resolve --repair` in real processes, killed at every point of their one transaction."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from everstep.cli import main
from tests import forked
from tests.damage.subject import OPEN, File, copy_of, flip
from tests.waiting import open_raw

POINTS = ("store.commit.before:1", "store.commit.written:1", "store.commit.after:1")


def everstep(path: Path, *words: str, at: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "EVERSTEP_URL": str(path), **({"EVERSTEP_CRASH_AT": at} if at else {})}
    command = [sys.executable, "-m", "everstep", *words]
    return forked.run(command, env=environment, capture_output=True, text=True, timeout=60)


def here(path: Path, *words: str) -> Any:
    done = CliRunner(env={"EVERSTEP_URL": str(path), "COLUMNS": "160"}).invoke(main, [*words, "--json"])
    return json.loads(done.stdout)


@pytest.fixture
def damaged(original: Path, tmp_path: Path) -> Path:
    path = copy_of(original, tmp_path)
    file = File(path)
    (row,) = file.rows("events", "run = ? AND seq = 30", OPEN)
    file.raw.execute("UPDATE events SET body = ? WHERE rowid = ?", (flip(row["body"], 60), row["rowid_"]))
    file.close()
    return path


def rows(path: Path) -> tuple[list[Any], list[Any], int]:
    """Return the run's events, what is archived of it, and its epoch."""
    connection = open_raw(path)
    try:
        events = connection.execute("SELECT seq, kind, body FROM events WHERE run = ? ORDER BY seq", (OPEN,)).fetchall()
        archived = connection.execute("SELECT what, seq FROM archive WHERE run = ?", (OPEN,)).fetchall()
        ((epoch,),) = connection.execute("SELECT epoch FROM runs WHERE id = ?", (OPEN,))
        return events, archived, epoch
    finally:
        connection.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_repair_that_is_killed_was_done_or_was_not(damaged: Path, point: str) -> None:
    before = rows(damaged)
    killed = everstep(damaged, "repair", OPEN, "--note", "a bad disk", at=point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    events, archived, epoch = rows(damaged)
    if "after" not in point:
        assert (events, archived, epoch) == before
    again = everstep(damaged, "repair", OPEN, "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["repaired"] == ("after" not in point)
    events, archived, epoch = rows(damaged)
    assert [seq for seq, _, _ in events] == list(range(1, 31))
    assert events[-1][1] == "run_repaired"
    assert archived == [("run", 66), *(("event", seq) for seq in range(30, 67)), ("checkpoint", 61)]
    assert epoch == before[2] + 1
    assert here(damaged, "verify", OPEN)["sound"]


def test_the_command_says_what_it_archived_and_what_cannot_be_seen(damaged: Path) -> None:
    before = rows(damaged)
    looked = everstep(damaged, "repair", OPEN, "--dry-run")
    assert looked.returncode == 0
    assert "would continue from event 29; 37 events archived" in looked.stdout
    assert rows(damaged) == before
    done = everstep(damaged, "repair", OPEN)
    assert "continues from event 29; 37 events archived" in done.stdout
    assert "everstep worker" in done.stdout
    (event,) = [event for event in here(damaged, "history", OPEN) if event["kind"] == "run_repaired"]
    assert (event["body"]["archived"], event["body"]["since"]) == (37, 30)
    assert "repaired" in everstep(damaged, "show", OPEN).stdout
    archived = here(damaged, "history", OPEN, "--archived")
    whats = [(one["what"], one["seq"]) for one in archived]
    assert [what for what in whats if what[0] != "checkpoint"] == [("run", 66), *(("event", n) for n in range(30, 67))]
    assert [what for what, _ in whats].count("checkpoint") == 1
    assert {one.get("kind", "") for one in archived} >= {"child_ended", "run_failed", "signal_awaited"}
    assert "run_failed" in everstep(damaged, "history", OPEN, "--archived").stdout
    again = everstep(damaged, "repair", OPEN)
    assert "sound, nothing to repair" in again.stdout


def test_a_hold_is_resolved_with_repair_also_many_at_once(damaged: Path, tmp_path: Path) -> None:
    held = everstep(damaged, "hold", OPEN)
    assert held.returncode == 0, held.stderr
    (hold,) = here(damaged, "holds")
    assert hold["reason"] == "damaged"
    assert "--repair" in hold["resolutions"]["repair"]["command"]
    listed = here(damaged, "resolve", "--reason", "damaged", "--repair")
    assert [one["run"] for one in listed["matching"]] == [OPEN]
    done = here(damaged, "resolve", "--reason", "damaged", "--repair", "--yes", "--note", "bulk")
    assert (done["resolved"], done["refused"]) == ([OPEN], [])
    assert here(damaged, "verify", OPEN)["sound"]
    assert here(damaged, "show", OPEN)["status"] == "queued"


def test_what_cannot_be_repaired_says_how_to_go_on(damaged: Path) -> None:
    file = File(damaged)
    file.raw.execute("UPDATE events SET digest = zeroblob(16) WHERE run = ? AND seq = 1", (OPEN,))
    file.close()
    done = everstep(damaged, "repair", OPEN)
    assert done.returncode == 1
    assert "--on-existing restart" in done.stderr
    assert "Traceback" not in done.stderr
    unknown = everstep(damaged, "repair", "nobody")
    assert unknown.returncode == 2
