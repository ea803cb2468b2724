"""Whole programs on PostgreSQL: they are killed, and another process goes on; the command line works as everywhere."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from everstep.stores.postgres import PostgresStore, opening
from tests.forked import Program
from tests.postgres import programs
from tests.postgres.server import Server
from tests.waiting import wait_until

PROGRAM = str(Path(programs.__file__))


class Folder:
    """Processes of the program, and what its steps have noted."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        self.notes = path / "notes"
        self.notes.touch()
        self.processes: list[Program] = []

    def begin(self, *words: str, **more: str) -> Program:
        source = str(Path(everstep.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "NOTES": str(self.notes), "EVERSTEP_URL": self.url, **more}
        process = Program(
            [sys.executable, *words],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def do(self, *words: str) -> str:
        """Run a command to its end."""
        process = self.begin(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (words, out, err)
        return out

    def everstep(self, *words: str) -> str:
        return self.do("-m", "everstep", *words)

    def lines(self) -> list[str]:
        return self.notes.read_text().split("\n")[:-1]


@pytest.fixture
def folder(tmp_path: Path, url: str) -> Iterator[Folder]:
    made = Folder(tmp_path, url)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def test_the_same_script_run_again_after_a_kill_goes_on_where_it_was(folder: Folder) -> None:
    first = folder.begin(PROGRAM, "run", folder.url, "12")
    wait_until(lambda: len(folder.lines()) >= 5)
    first.kill()
    first.communicate()
    done = len(folder.lines())
    assert folder.do(PROGRAM, "run", folder.url, "12") == "19\n"
    counts = Counter(line.split()[0] if not line.startswith("paid") else line for line in folder.lines())
    assert counts["paid 7"] == 1
    assert set(counts) == {"paid 7", *map(str, range(12))}
    assert len(folder.lines()) <= 13 + 1, "only the step that was under way may be done again"
    assert done < 13


def test_another_worker_takes_over_the_run_of_one_that_was_killed(folder: Folder) -> None:
    first = folder.begin(PROGRAM, "run", folder.url, "40")
    wait_until(lambda: len(folder.lines()) >= 4)
    second = folder.begin(PROGRAM, "drive", folder.url, "1")
    assert second.stdout is not None
    assert second.stdout.readline() == "driving\n"
    first.kill()
    first.communicate()
    wait_until(lambda: any(line.endswith(str(second.pid)) for line in folder.lines()))
    assert second.wait(30) == 0
    store = PostgresStore(folder.url)
    row = store.run("j")
    store.close()
    assert row is not None
    assert (row.status, row.epoch) == ("completed", 2)
    assert folder.lines().count("paid 7") == 1


def test_a_worker_goes_on_by_itself_when_the_server_was_restarted(folder: Folder, server: Server) -> None:
    process = folder.begin(PROGRAM, "run", folder.url, "40")
    for count in (5, 15, 25):
        wait_until(lambda count=count: len(folder.lines()) >= count)
        server.restart("immediate")
    out, err = process.communicate(timeout=60)
    assert out == "47\n", err
    counts = Counter(line.split()[0] for line in folder.lines())
    assert counts["paid"] == 1
    assert all(counts[str(place)] == 1 for place in range(40)), counts
    assert "work continues" in err


def test_a_stopped_worker_that_was_overtaken_writes_nothing_when_it_wakes(folder: Folder, server: Server) -> None:
    first = folder.begin(PROGRAM, "run", folder.url, "30")
    wait_until(lambda: len(folder.lines()) >= 4)
    first.send_signal(signal.SIGSTOP)
    server.terminate(f"everstep {first.pid} %")  # as if its network had gone
    second = folder.begin(PROGRAM, "drive", folder.url, "1")
    assert second.wait(30) == 0
    store = PostgresStore(folder.url)
    events = store.events("j", 1)
    first.send_signal(signal.SIGCONT)
    out, _ = first.communicate(timeout=60)
    assert out == "37\n", "it learns of the end that another worker has reached"
    assert store.events("j", 1) == events
    store.close()
    assert folder.lines().count("paid 7") == 1


POINTS = [
    *(f"store.migrate.{moment}:1" for moment in ("before", "written", "after")),
    *(f"store.register_worker.{moment}:1" for moment in ("before", "written", "after")),
    *(f"store.commit.{moment}:{count}" for moment in ("before", "after") for count in (1, 3, 5)),
    *(f"store.leave.{moment}:1" for moment in ("before", "written", "after")),
    *(f"store.close.{moment}:1" for moment in ("before", "after")),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_run_survives_a_kill_at_every_crash_point_of_the_store(folder: Folder, point: str) -> None:
    killed = folder.begin(PROGRAM, "walk", folder.url, "6", EVERSTEP_CRASH_AT=point)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, "the point was not passed"
    assert folder.do(PROGRAM, "walk", folder.url, "6") == "6\n"
    counts = Counter(line.split()[0] for line in folder.lines())
    assert set(counts) == set(map(str, range(6)))
    assert sum(counts.values()) <= 6 + 2, "only steps that were under way may be done again"


# -- the command line -----------------------------------------------------------------------------------------------
def test_the_command_line_works_on_postgresql(folder: Folder) -> None:
    assert folder.do(PROGRAM, "run", folder.url, "2") == "9\n"
    assert "completed" in folder.everstep("ls")
    assert "journey" in folder.everstep("show", "j")
    assert "note" in folder.everstep("history", "j")
    assert "sound" in folder.everstep("verify", "--all")
    doctor = folder.everstep("doctor")
    assert "fsync" in doctor
    assert "✗" not in doctor
    assert f"version {len(opening.migrations('x'))}" in folder.everstep("migrate")
    assert "CREATE TABLE" not in folder.everstep("migrate", "--print"), "nothing is left to do"


def test_what_would_be_done_is_printed_for_somebody_who_may_do_it(folder: Folder) -> None:
    script = folder.everstep("migrate", "--print")
    assert script.startswith("BEGIN;")
    assert "CREATE TABLE" in script
    assert script.endswith("COMMIT;\n")
    assert "there is no store yet" in folder.everstep("doctor")


def test_runs_are_moved_from_sqlite_to_postgresql(folder: Folder, tmp_path: Path) -> None:
    old = f"sqlite:///{tmp_path}/old.db"
    assert folder.do(PROGRAM, "run", old, "2") == "9\n"
    folder.everstep("export", "j", "j.everstep", "--url", old)
    folder.everstep("migrate")
    folder.everstep("import", "j.everstep")
    assert "completed" in folder.everstep("show", "j")
    assert "sound" in folder.everstep("verify", "j")


def test_a_signal_from_the_command_line_reaches_a_run(folder: Folder) -> None:
    folder.everstep("migrate")
    process = folder.begin(PROGRAM, "greet", folder.url)
    wait_until(lambda: "waiting" in folder.everstep("ls"))
    folder.everstep("signal", "g", "name", '"Ann"')
    out, err = process.communicate(timeout=30)
    assert out == "hello Ann\n", err


def test_a_password_is_never_shown(server: Server, schema: str) -> None:
    store = PostgresStore(server.as_role("postgres", "hush").url(schema))
    assert "hush" not in store.url
    store.close()
