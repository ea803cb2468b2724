"""A process dies inside of `send_mail`: `everstep holds` prints enough to decide, and each line can be pasted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.ledger import Ledger, Mode

COMMAND = re.compile(r"^ +(everstep resolve .*)$", re.MULTILINE)


class Desk:
    """A folder with a program and a store, a book of the ledger, and a shell in it."""

    def __init__(self, folder: Path, ledger: Ledger, name: str) -> None:
        self.folder = folder
        self.book = ledger.book(name)
        folder.mkdir(parents=True, exist_ok=True)
        self.book.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("mailing.py"), folder / "app.py")

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        entries = str(self.book.folder / "ledger.jsonl")
        return {**kept, "PATH": path, "LEDGER_URL": self.book.url, "LEDGER_ENTRIES": entries, "LOGNAME": "ann"}

    def shell(self, line: str, status: int = 0) -> str:
        """Paste a line into a real shell."""
        done = subprocess.run(
            ["sh", "-c", line], cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, (line, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def copied(self, ledger: Ledger, name: str) -> "Desk":
        """Return the same desk once more, with its own copy of the store and of the ledger's book."""
        shutil.copytree(self.folder, self.folder.parent / name)
        other = Desk(self.folder.parent / name, ledger, f"{self.folder.parent.name}-{name}".replace("_", "-"))
        entries = self.book.folder / "ledger.jsonl"
        if entries.exists():
            shutil.copy(entries, other.book.folder / "ledger.jsonl")
        return other

    def applied(self) -> list[dict[str, Any]]:
        return [entry for entry in self.book.entries() if entry["kind"] == "applied"]

    def row(self) -> tuple[str, Any]:
        store = SqliteStore(self.folder / "everstep.db", create=False)
        try:
            row = store.run("m-1")
            assert row is not None
            return row.status, json.loads(row.outcome)[0] if row.outcome else None
        finally:
            store.close()

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads(self.shell("everstep history m-1 --json"))
        return events

    def violations(self) -> list[Any]:
        store = SqliteStore(self.folder / "everstep.db", create=False)
        try:
            return list(check(export_histories(store), ledger=self.book.entries(), settled=True))
        finally:
            store.close()


def killed_inside(desk: Desk, place: str, workflow: str) -> int:
    """Let the process die inside of the step. Returns its number."""
    (desk.folder / "die").write_text(place)
    line = ["everstep", "run", f"app.py:{workflow}", '"ann@example.org"', '"Tides come and go."', "--id", "m-1"]
    process = subprocess.Popen(
        line, cwd=desk.folder, env=desk.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert process.wait(30) == -signal.SIGKILL
    return process.pid


def wait_for_end(desk: Desk, seconds: float = 30.0) -> tuple[str, Any]:
    until = time.monotonic() + seconds
    while (row := desk.row())[0] not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < until, row
        time.sleep(0.05)
    return row


class Worker:
    """A worker on a desk."""

    def __init__(self, desk: Desk) -> None:
        self._process = subprocess.Popen(
            ["everstep", "worker", "app.py"],
            cwd=desk.folder,
            env=desk.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def mail_ledger(ledger: Ledger) -> Ledger:
    """The mail server forgets keys: what is sent twice is delivered twice."""
    ledger.behave("send_mail", Mode(honours_keys=False))
    return ledger


@pytest.mark.parametrize("place", ["before", "after"])
def test_after_a_kill_inside_a_step_each_printed_command_ends_the_run_as_it_promised(
    tmp_path: Path, mail_ledger: Ledger, place: str
) -> None:
    desk = Desk(tmp_path / "desk", mail_ledger, f"{tmp_path.name}-desk".replace("_", "-"))
    pid = killed_inside(desk, place, "mailing")
    before = len(desk.applied())
    assert before == (place == "after")
    desk.shell("everstep run app.py:mailing '\"ann@example.org\"' '\"Tides come and go.\"' --id m-1", status=3)
    page = desk.shell("everstep holds")
    (facts,) = json.loads(desk.shell("everstep holds --json"))
    key = facts["report"]["key"]
    for part in ("m-1", "send_mail", key, '"ann@example.org", "Tides come and go."', f"by process {pid} on "):
        assert part in page, part
    assert re.search(r"died: after \d\d:\d\d:\d\d, .* and before \d\d:\d\d:\d\d", page), page
    commands = COMMAND.findall(page)
    assert [command.split("--")[-1].split()[0] for command in commands] == ["done", "not-done", "cancel"]
    expected = {
        "done": ("completed", "text", before),
        "not-done": ("completed", None, before + 1),
        "cancel": ("cancelled", None, before),
    }
    for command in commands:
        answer = command.split("--")[-1].split()[0]
        consequence = page[page.index(command) + len(command) :].strip().splitlines()[0].strip()
        assert consequence == facts["resolutions"][answer]["consequence"]
        other = desk.copied(mail_ledger, answer)
        with Worker(other):
            other.shell(command)
            status, value = wait_for_end(other)
        wanted_status, wanted_value, wanted_count = expected[answer]
        assert (status, len(other.applied())) == (wanted_status, wanted_count), answer
        if wanted_value is not None:
            assert value == wanted_value
        assert {entry["key"] for entry in other.applied()} <= {key}, "with the same key"
        (resolved,) = [event["body"] for event in other.events() if event["kind"] == "run_resolved"]
        assert (resolved["resolution"], resolved["by"]) == (answer, "ann")
        if not (answer == "not-done" and place == "after"):  # then a person said what was not so
            assert other.violations() == []


def test_with_a_probe_each_printed_command_ends_the_run_as_well(tmp_path: Path, mail_ledger: Ledger) -> None:
    """The probe does not know at first: the ledger's entries are out of its sight."""
    desk = Desk(tmp_path / "desk", mail_ledger, f"{tmp_path.name}-desk".replace("_", "-"))
    killed_inside(desk, "after", "mailing_probed")
    entries = desk.book.folder / "ledger.jsonl"
    hidden = entries.with_suffix(".hidden")
    entries.rename(hidden)
    (desk.folder / "app.py").write_text((desk.folder / "app.py").read_text().replace("else NotDone()", "else None"))
    desk.shell("everstep run app.py:mailing_probed '\"ann@example.org\"' '\"Tides come and go.\"' --id m-1", status=3)
    hidden.rename(entries)
    commands = COMMAND.findall(desk.shell("everstep holds"))
    answers = [command.split("--")[-1].split()[0] for command in commands]
    assert answers == ["done", "not-done", "probe", "cancel"]
    expected = {"done": 1, "not-done": 2, "probe": 1, "cancel": 1}
    for command, answer in zip(commands, answers, strict=True):
        other = desk.copied(mail_ledger, answer)
        with Worker(other):
            other.shell(command)
            status, value = wait_for_end(other)
        assert status == ("cancelled" if answer == "cancel" else "completed")
        assert len(other.applied()) == expected[answer], answer
        if answer == "probe":
            assert value == "found in the outbox"


def test_a_command_stays_on_one_line_however_long_it_is(tmp_path: Path, mail_ledger: Ledger) -> None:
    folder = tmp_path / ("a long name " * 12).strip()
    desk = Desk(folder, mail_ledger, f"{tmp_path.name}-long".replace("_", "-"))
    killed_inside(desk, "before", "mailing")
    url = f"sqlite:///{folder}/everstep.db"
    desk.shell("everstep run app.py:mailing '\"ann@example.org\"' '\"Tides come and go.\"' --id m-1", status=3)
    commands = COMMAND.findall(desk.shell(f"everstep holds --url '{url}'"))
    assert len(commands) == 3
    assert all(command.endswith(f"--url '{url}'") for command in commands)
    desk.shell(commands[-1])
    assert desk.row()[0] == "cancelled"
