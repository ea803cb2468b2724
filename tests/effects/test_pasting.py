"""A process dies inside of `send_mail`: `everstep holds` prints enough to decide, and each line can be pasted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.ledger import Ledger, Mode
from tests import forked
from tests.waiting import open_raw, wait_until

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

    def look(self, *words: str, status: int = 0) -> str:
        """Return what a command says that is not pasted, but helps to judge what was."""
        command = [sys.executable, "-m", "everstep", *words]
        done = forked.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        said: str = done.stdout
        return said

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

    def effects(self) -> list[str]:
        return [entry["effect"] for entry in self.applied()]

    def commands(self) -> dict[str, str]:
        """Return the commands that `everstep holds` prints, by the answer that each gives."""
        return {answer_in(command): command for command in COMMAND.findall(self.look("holds"))}

    def row(self) -> tuple[str, Any]:
        store = SqliteStore(self.folder / "everstep.db", create=False)
        try:
            row = store.run("m-1")
            assert row is not None
            return row.status, json.loads(row.outcome)[0] if row.outcome else None
        finally:
            store.close()

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads(self.look("history", "m-1", "--json"))
        return events

    def violations(self) -> list[Any]:
        store = SqliteStore(self.folder / "everstep.db", create=False)
        try:
            return list(check(export_histories(store), ledger=self.book.entries(), settled=True))
        finally:
            store.close()


def answer_in(command: str) -> str:
    return command.split("--")[-1].split()[0]


def killed_inside(desk: Desk, place: str, workflow: str) -> int:
    """Let the process die inside of the step. Returns its number."""
    (desk.folder / "die").write_text(place)
    line = ["everstep", "run", f"app.py:{workflow}", '"ann@example.org"', '"Tides come and go."', "--id", "m-1"]
    process = subprocess.Popen(
        line, cwd=desk.folder, env=desk.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert process.wait(30) == -signal.SIGKILL
    return process.pid


def wait_for_end(desk: Desk) -> tuple[str, Any]:
    wait_until(lambda: desk.row()[0] in ("completed", "failed", "cancelled"), desk.row)
    return desk.row()


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
        printed = " ".join(page[page.index(command) + len(command) :].split())
        assert printed.startswith(facts["resolutions"][answer]["consequence"])
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


# -- holds that come of undoing, of damage and of a backup -----------------------------------------------------------
RUN = "everstep run app.py:{} '\"ann@example.org\"' '\"Tides come and go.\"' --id m-1"


def ended(desk: Desk, command: str) -> tuple[str, list[str]]:
    """Paste a command beside a worker: how the run ends then, and what has happened outside."""
    with Worker(desk):
        desk.shell(command)
        status, _ = wait_for_end(desk)
    assert desk.violations() == [], command
    return status, desk.effects()


def held_again(desk: Desk, command: str) -> None:
    """Paste a command beside a worker, which leads to another question."""
    before = {one["id"] for one in json.loads(desk.look("holds", "--json"))}
    with Worker(desk):
        desk.shell(command)
        wait_until(lambda: {one["id"] for one in json.loads(desk.look("holds", "--json"))} not in (before, set()))


def desk_in(folder: Path, ledger: Ledger) -> Desk:
    return Desk(folder / "desk", ledger, f"{folder.name}-desk".replace("_", "-"))


def all_ended(desk: Desk, ledger: Ledger, prefix: str = "") -> dict[str, tuple[str, list[str]]]:
    """Paste each printed command, on a desk of its own."""
    return {
        answer: ended(desk.copied(ledger, f"{prefix}{answer}"), command) for answer, command in desk.commands().items()
    }


def test_a_step_in_doubt_that_can_be_undone_offers_a_rollback_which_ends_the_run_after_one_more_question(
    tmp_path: Path, mail_ledger: Ledger
) -> None:
    desk = desk_in(tmp_path, mail_ledger)
    killed_inside(desk, "after", "travelling")
    desk.shell(RUN.format("travelling"), status=3)
    commands = desk.commands()
    assert list(commands) == ["done", "not-done", "cancel", "rollback"]
    asked = desk.copied(mail_ledger, "asked")
    held_again(asked, commands.pop("rollback"))
    assert all_ended(asked, mail_ledger, "asked-") == {
        "done": ("cancelled", ["book", "send_mail", "recall", "unbook"]),
        "not-done": ("cancelled", ["book", "send_mail", "unbook"]),
        "cancel": ("cancelled", ["book", "send_mail"]),
    }
    assert ended(desk.copied(mail_ledger, "done"), commands["done"]) == ("completed", ["book", "send_mail"])
    assert ended(desk.copied(mail_ledger, "cancel"), commands["cancel"]) == ("cancelled", ["book", "send_mail"])


def test_a_compensation_in_doubt_is_told_with_commands_that_end_the_run(tmp_path: Path, mail_ledger: Ledger) -> None:
    desk = desk_in(tmp_path, mail_ledger)
    (desk.folder / "fail").write_text("")
    killed_inside(desk, "unbooking", "travelling")
    desk.shell(RUN.format("travelling"), status=3)
    assert "the compensation of book is in doubt" in " ".join(desk.shell("everstep holds").split())
    assert all_ended(desk, mail_ledger) == {
        "done": ("failed", ["book"]),
        "not-done": ("failed", ["book", "unbook"]),
        "cancel": ("cancelled", ["book"]),
    }


def test_a_compensation_that_fails_for_good_is_told_with_commands_that_end_the_run(
    tmp_path: Path, mail_ledger: Ledger
) -> None:
    desk = desk_in(tmp_path, mail_ledger)
    for mark in ("fail", "closed"):
        (desk.folder / mark).write_text("")
    desk.shell(RUN.format("travelling"), status=3)
    (desk.folder / "closed").unlink()
    assert all_ended(desk, mail_ledger) == {
        "retry": ("failed", ["book", "unbook"]),
        "skip": ("failed", ["book"]),
        "cancel": ("cancelled", ["book"]),
    }


def spoil(desk: Desk) -> tuple[int, bytes]:
    """Flip a bit in the newest event. Returns its number, and what stood there."""
    connection = open_raw(desk.folder / "everstep.db")
    ((seq, body),) = connection.execute("SELECT seq, body FROM events ORDER BY seq DESC LIMIT 1")
    connection.execute("UPDATE events SET body = ? WHERE seq = ?", (bytes([body[0] ^ 1]) + body[1:], seq))
    connection.close()
    return seq, body


def test_a_damaged_run_is_told_with_commands_that_end_it(tmp_path: Path, mail_ledger: Ledger) -> None:
    """After a repair the step that may have been begun in what is lost is asked about."""
    desk = desk_in(tmp_path, mail_ledger)
    killed_inside(desk, "after", "mailing")
    seq, body = spoil(desk)
    desk.shell(RUN.format("mailing"), status=3)
    commands = desk.commands()
    assert list(commands) == ["retry", "repair"]
    put_right = desk.copied(mail_ledger, "right")
    connection = open_raw(put_right.folder / "everstep.db")
    connection.execute("UPDATE events SET body = ? WHERE seq = ?", (body, seq))
    connection.close()
    held_again(put_right, commands["retry"])
    assert list(put_right.commands()) == ["done", "not-done", "cancel"], "it goes on where it was"
    repaired = desk.copied(mail_ledger, "repaired")
    held_again(repaired, commands["repair"])
    page = " ".join(repaired.shell("everstep holds").split())
    assert "send_mail may have happened in the part of the history that was archived" in page
    assert "begun:" not in page, "nobody knows who began it, if anybody did"
    commands = repaired.commands()
    assert list(commands) == ["done", "not-done", "accept", "cancel"]
    assert ended(repaired.copied(mail_ledger, "done"), commands["done"]) == ("completed", ["send_mail"])
    assert ended(repaired.copied(mail_ledger, "cancel"), commands["cancel"]) == ("cancelled", ["send_mail"])


def test_after_a_restore_the_question_comes_with_commands_that_end_the_run(tmp_path: Path, mail_ledger: Ledger) -> None:
    desk = desk_in(tmp_path, mail_ledger)
    waiting = subprocess.Popen(
        ["sh", "-c", f"exec {RUN.format('mailing_later')}"],
        cwd=desk.folder,
        env=desk.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: "timer_started" in desk.shell("everstep history m-1 --json || true"))
    waiting.kill()
    waiting.wait(30)
    desk.shell("everstep restored")
    desk.shell(RUN.format("mailing_later"), status=3)
    commands = desk.commands()
    assert list(commands) == ["accept", "done", "not-done", "cancel"]
    assert all_ended(desk, mail_ledger) == {
        "accept": ("completed", ["send_mail"]),
        "done": ("completed", []),
        "not-done": ("completed", ["send_mail"]),
        "cancel": ("cancelled", []),
    }


def test_a_run_without_room_in_its_budget_is_told_with_commands_that_end_it(
    tmp_path: Path, mail_ledger: Ledger
) -> None:
    desk = desk_in(tmp_path, mail_ledger)
    desk.shell(RUN.format("mailing_dearly"), status=3)
    page = " ".join(desk.shell("everstep holds").split())
    assert "there is no room in its budget for send_mail: 0 of 0.4 usd are used, and it is estimated at 0.6" in page
    assert list(desk.commands()) == ["accept", "skip", "cancel", "rollback"]
    assert all_ended(desk, mail_ledger) == {
        "accept": ("completed", ["book", "send_mail"]),
        "skip": ("completed", ["book"]),
        "cancel": ("cancelled", ["book"]),
        "rollback": ("cancelled", ["book", "unbook"]),
    }
