"""`verify`, `replay`, `doctor` and `migrate`."""

from pathlib import Path

import pytest

from everstep.cli.doctor import file_system_of, sqlite_finding
from everstep.engine.verbs.replay import Comparison, patches_in
from tests.cli.conftest import Folder


def test_verify_exits_with_0_for_sound_histories_and_1_for_a_damaged_one(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    folder.everstep("run", "app.py:hostile", '"x"', "--id", "h-1")
    assert folder.everstep("verify", "f-1").status == 0
    assert folder.json("verify", "--all")["sound"] is True
    folder.change("UPDATE events SET at = at + 1 WHERE run = 'f-1' AND seq = 2")
    done = folder.everstep("verify", "f-1")
    assert done.status == 1
    assert "Event 2 of run f-1 does not match its digest" in done.out
    everything = folder.everstep("verify", "--all", "--json")
    assert everything.status == 1
    assert {one["run"]: one["sound"] for one in everything.json()["runs"]} == {"f-1": False, "h-1": True}
    assert "damaged: Event 2" in folder.everstep("show", "f-1").out
    assert folder.everstep("verify").status == 2


def test_replay_says_which_runs_the_new_code_would_not_continue(folder: Folder) -> None:
    folder.left_waiting("c-1", "app.py:changing", env={"QUESTION": "old"})
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    before = folder.json("history", "c-1")
    same = folder.everstep("replay", "app.py", env={"QUESTION": "old"})
    assert same.status == 0, same.out
    assert "c-1  goes on" in same.out
    other = folder.everstep("replay", "app.py", "--json", env={"QUESTION": "new"})
    assert other.status == 1
    verdicts = {one["run"]: one["verdict"] for one in other.json()["runs"]}
    assert verdicts == {"a-1": "goes on", "c-1": "diverged"}
    page = folder.everstep("replay", "app.py", "c-1", env={"QUESTION": "new"}).out
    assert '["old"]' in page
    assert '["new"]' in page
    assert folder.json("history", "c-1") == before, "nothing was written"
    assert folder.run_row("c-1")[0] == "waiting"


def test_replay_says_which_patches_can_go(folder: Folder) -> None:
    folder.left_waiting("old", "app.py:changing")
    folder.left_waiting("new", "app.py:changing", env={"PATCHED": "1"})
    patched = {"PATCHED": "1"}
    patches = folder.json("replay", "app.py", env=patched)["patches"]
    assert patches == [{"name": "louder", "can_go": False, "old_way": ["old"], "new_way": 1}]
    folder.everstep("cancel", "old", "--now")
    done = folder.everstep("replay", "app.py", env=patched)
    assert "patched('louder') can go" in done.out


def test_a_patch_that_only_ended_runs_passed_can_go() -> None:
    found = [Comparison("a", "flow", "completed", patches={"p": False})]
    assert patches_in(found)[0].can_go
    found[0].status = "waiting"
    assert not patches_in(found)[0].can_go


def test_doctor_looks_at_versions_file_workers_and_runs(folder: Folder) -> None:
    missing = folder.everstep("doctor")
    assert missing.status == 0
    assert "does not exist yet" in missing.out
    folder.everstep("run", "app.py:exhausted", "--id", "e-1")
    done = folder.everstep("doctor", "--json")
    assert done.status == 0, done.out
    findings = {one["name"]: one for one in done.json()["findings"]}
    assert {"python", "everstep", "sqlite", "store", "file system", "mode", "schema", "journal", "integrity"} <= set(
        findings
    )
    assert findings["journal"]["text"] == "wal"
    assert findings["holds"]["verdict"] == "warning"
    assert findings["runs"]["text"] == "1 held"
    (folder.path / "everstep.db").chmod(0o644)
    assert "others can read" in folder.everstep("doctor").out


def test_doctor_sees_a_worker_that_died(folder: Folder) -> None:
    folder.left_waiting("a-1", "app.py:approval", '"x"')
    done = folder.everstep("doctor")
    assert "dead; its runs are free" in done.out


@pytest.mark.parametrize("version", ["3.7.0", "3.45.1", "3.51.2"])
def test_a_sqlite_with_the_wal_reset_bug_is_wrong(version: str) -> None:
    assert sqlite_finding(version, "x").verdict == "wrong"


@pytest.mark.parametrize("version", ["3.51.3", "3.52.0", "4.0.0"])
def test_a_sqlite_without_it_is_fine(version: str) -> None:
    assert sqlite_finding(version, "x").verdict == "ok"


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 0:5 / /mnt/share rw - nfs4 server:/x rw\n"
        "3 2 0:6 / /mnt/share/my\\040disk rw - xfs /dev/sdb rw\n"
    )
    assert file_system_of("/tmp", str(mounts)) == "ext4"
    assert file_system_of("/mnt/share/deep", str(mounts)) == "nfs4"
    assert file_system_of("/mnt/shared", str(mounts)) == "ext4"
    assert file_system_of("/mnt/share/my disk/x", str(mounts)) == "xfs"
    assert file_system_of("/tmp", str(tmp_path / "gone")) == ""


def test_migrate_says_from_which_version_to_which(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    facts = folder.json("migrate")
    assert facts["from"] == facts["to"]
    assert "already" in folder.everstep("migrate").out


def test_doctor_says_when_the_store_s_clock_is_ahead(folder: Folder) -> None:
    folder.everstep("run", "app.py:failing", "--id", "f-1")
    (clock,) = [one for one in folder.json("doctor")["findings"] if one["name"] == "clock"]
    assert clock["verdict"] == "ok"
    folder.change("UPDATE meta SET value = value + 86400000000 WHERE name = 'latest_time'")
    (clock,) = [one for one in folder.json("doctor")["findings"] if one["name"] == "clock"]
    assert clock["verdict"] == "warning"
    assert "ahead" in clock["text"]
