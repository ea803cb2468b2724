"""The command line as a user has it: a folder with a program and a store, and real processes."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from everstep.cli import main
from everstep.engine.code.workflow import DECLARED
from tests import forked
from tests.forked import Program
from tests.waiting import open_sqlite, stop_between_writes, wait_until

PATIENCE_SECONDS = 30.0
INSTRUCTIONS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
"""What a terminal could take for an instruction."""
LOADING = frozenset({"run", "worker", "replay"})


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Folder:
    """A user's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes: list[Program] = []
        shutil.copy(Path(__file__).with_name("app.py"), path / "app.py")

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        return {**kept, "COLUMNS": "160", **(more or {})}

    def everstep(self, *words: str, env: dict[str, str] | None = None) -> Done:
        """Run a command to its end: in a process of its own if it loads the user's code, else right here."""
        if words[0] not in LOADING and "--app" not in words:
            return self._here(words, env)
        done = forked.run(
            [sys.executable, "-m", "everstep", *words],
            cwd=self.path,
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def _here(self, words: tuple[str, ...], env: dict[str, str] | None) -> Done:
        before, declared = Path.cwd(), DECLARED._by_name
        os.chdir(self.path)
        DECLARED._by_name = {}  # as in a process of its own
        try:
            kept = {name: None for name in os.environ if name.startswith("EVERSTEP_")}
            result = CliRunner(env={**kept, "COLUMNS": "160", **(env or {})}).invoke(main, list(words))
        finally:
            os.chdir(before)
            DECLARED._by_name = declared
        return Done(result.exit_code, result.stdout, result.stderr)

    def json(self, *words: str, env: dict[str, str] | None = None) -> Any:
        """Run a command with `--json` and return what it prints."""
        return self.everstep(*words, "--json", env=env).json()

    def begin(self, *words: str, env: dict[str, str] | None = None) -> Program:
        """Begin a command and leave it running."""
        process = Program(
            [sys.executable, "-m", "everstep", *words],
            cwd=self.path,
            env=self.environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def finish(self, process: Program) -> Done:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return Done(process.returncode, out, err)

    def kill(self, process: Program) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)

    def run_row(self, run: str) -> tuple[str, str | None]:
        """Return a run's status and owner, as the table has them."""
        if not (self.path / "everstep.db").exists():
            return "", None
        connection = open_sqlite(self.path / "everstep.db")
        try:
            rows = connection.execute("SELECT status, owner FROM runs WHERE id = ?", (run,)).fetchall()
        except sqlite3.OperationalError:  # the tables are being made
            rows = []
        finally:
            connection.close()
        return rows[0] if rows else ("", None)

    def count(self, statement: str) -> int:
        """Ask the store for a number, past the product."""
        connection = open_sqlite(self.path / "everstep.db")
        try:
            return int(connection.execute(statement).fetchone()[0])
        finally:
            connection.close()

    def change(self, statement: str, *values: Any) -> None:
        """Change the store behind everybody's back."""
        connection = open_sqlite(self.path / "everstep.db")
        with connection:
            connection.execute(statement, values)
        connection.close()

    def wait_for(self, happened: Callable[[], Any]) -> None:
        wait_until(happened, "it did not happen")

    def effects(self) -> list[str]:
        path = self.path / "effects.txt"
        return path.read_text().splitlines() if path.exists() else []

    def file(self, name: str, text: str = "") -> Path:
        path = self.path / name
        path.write_text(text)
        return path

    def left_waiting(self, run: str, *words: str, env: dict[str, str] | None = None) -> None:
        """Start a run that waits for a signal, and kill its process."""
        process = self.begin("run", *words, "--id", run, env=env)
        self.wait_for(lambda: self.run_row(run)[0] == "waiting")
        self.kill(process)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    one = Folder(tmp_path)
    yield one
    for process in one.processes:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def stop_between_transactions(folder: Folder, process: Program) -> None:
    """Stop a process that has the file's lock at no time: with it, everybody would wait for that process."""
    stop_between_writes(folder.path / "everstep.db", process.send_signal)
