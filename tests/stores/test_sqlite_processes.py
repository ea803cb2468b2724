"""Several real processes on one file: they write side by side, die, stop, fork."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.stores.protocol import Accepted, Claim, Claimed, RunFilter, StartRun
from everstep.stores.sqlite import SqliteStore, liveness
from tests.stores.kit import SqliteHarness, append_to, begin_python, new_run, python

WRITE = """
import sys
from everstep.stores.protocol import Accepted, Post, Posted, StartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import append_to, new_run
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = SqliteStore(path, durability="process")
store.commit([StartRun(new_run(name, status="running"))])
sys.stdin.read(1)
for number in range(count):
    append = append_to(store.run(name), 2)
    assert store.commit([append, Post("shared", "signal", name, f"{name}{number}")])[0] == Accepted()
print("done")
"""


def test_two_processes_write_at_once_and_nothing_is_lost(sqlite: SqliteHarness) -> None:
    sqlite.start("shared")
    processes = [begin_python(WRITE, str(sqlite.path), name, "500") for name in ("left", "right")]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    for process in processes:
        out, errors = process.communicate()
        assert out == "done\n", errors
    for name in ("left", "right"):
        assert [event.seq for event in sqlite.store.events(name, 1)] == list(range(1, 1002))
    inbox = sqlite.store.inbox("shared")
    assert [delivery.number for delivery in inbox] == list(range(1, 1001))
    assert {delivery.id for delivery in inbox} == {f"{name}{n}" for name in ("left", "right") for n in range(500)}
    assert sqlite.store.changed()


def test_one_run_is_claimed_by_one_of_many_threads(sqlite: SqliteHarness) -> None:
    stores = [SqliteStore(sqlite.path, durability="process") for _ in range(4)]
    for store in stores:
        store.register_worker(f"w{id(store)}", 1, "host", 10_000)
    for round in range(25):
        sqlite.start(f"r{round}")
        barrier = threading.Barrier(len(stores))
        won: list[str] = []

        def race(store: SqliteStore, barrier: threading.Barrier, won: list[str], run: str) -> None:
            barrier.wait()
            if isinstance(store.commit([Claim(run, f"w{id(store)}", 1, ["queued"])])[0], Claimed):
                won.append(run)

        threads = [threading.Thread(target=race, args=(store, barrier, won, f"r{round}")) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
    for store in stores:
        store.close()


# -- life and death -------------------------------------------------------------------------------------------------

WORK = """
import os, sys
from everstep.stores.protocol import StartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import new_run
store = SqliteStore(sys.argv[1])
store.register_worker(sys.argv[2], os.getpid(), "host", 1)
store.commit([StartRun(new_run(sys.argv[2], status="running", owner=sys.argv[2]))])
if sys.argv[3:] == ["fork"] and os.fork() == 0:
    print("ready", flush=True)
    os.read(0, 1)
    os._exit(0)
if not sys.argv[3:]:
    print("ready", flush=True)
sys.stdin.read(1)
"""


@pytest.fixture
def worker(sqlite: SqliteHarness) -> "Iterator[Worker]":
    made = Worker(sqlite)
    yield made
    made.end()


class Worker:
    """A real process that is a worker."""

    def __init__(self, sqlite: SqliteHarness) -> None:
        self.path = sqlite.path

    def begin(self, name: str, *more: str) -> None:
        self.process = begin_python(WORK, str(self.path), name, *more)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_killed_process_is_buried_at_once_and_its_run_is_free(sqlite: SqliteHarness, worker: Worker) -> None:
    worker.begin("you")
    assert sqlite.store.bury_dead(1_000_000) == []
    worker.kill()
    assert sqlite.due() == []  # A time says nothing; the lock does.
    assert sqlite.store.bury_dead(0) == ["you"]
    assert sqlite.due() == ["you"]
    verdict = sqlite.one(Claim("you", "me", 0, ["running"]))
    assert isinstance(verdict, Claimed)
    assert verdict.row.deaths == 1


def test_a_stopped_process_is_not_buried(sqlite: SqliteHarness, worker: Worker) -> None:
    worker.begin("you")
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert sqlite.store.bury_dead(1_000_000) == []
    assert [row.id for row in sqlite.store.workers()] == ["you"]
    os.kill(worker.process.pid, signal.SIGCONT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_keep_its_dead_parent_alive(sqlite: SqliteHarness, worker: Worker) -> None:
    worker.begin("you", "fork")
    assert sqlite.store.bury_dead(0) == []
    worker.kill()
    assert sqlite.store.bury_dead(0) == ["you"]


def test_two_stores_in_one_process_see_each_other_as_alive(sqlite: SqliteHarness) -> None:
    other = SqliteStore(sqlite.path)
    sqlite.store.register_worker("one", os.getpid(), "host", 0)
    other.register_worker("two", os.getpid(), "host", 0)
    assert sqlite.store.bury_dead(0) == other.bury_dead(0) == []
    third = SqliteStore(sqlite.path)
    third.bury_dead(0)
    third.close()  # Closing a file of locks must not free those of others.
    assert sqlite.store.bury_dead(0) == []
    other.close()
    assert sqlite.store.bury_dead(0) == ["two"]


def test_where_locks_belong_to_the_process_the_living_and_the_dead_are_told_apart(
    sqlite: SqliteHarness, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_HAS_OFD", False)
    worker.begin("you")
    other = SqliteStore(sqlite.path)
    sqlite.store.register_worker("one", os.getpid(), "host", 0)
    other.register_worker("two", os.getpid(), "host", 0)
    assert sqlite.store.bury_dead(0) == other.bury_dead(0) == []
    worker.kill()
    assert sqlite.store.bury_dead(0) == ["you"]
    other.close()
    assert sqlite.store.bury_dead(0) == ["two"]
    assert [row.id for row in sqlite.store.workers()] == ["one"]


# -- crash points ---------------------------------------------------------------------------------------------------

EVERYTHING = """
import os, sys
from everstep.stores.protocol import Accepted, StartRun
from everstep.stores.sqlite import SqliteStore
from tests.stores.kit import append_to, new_run
path = sys.argv[1]
dead = SqliteStore(path)
dead.register_worker("dead", 1, "host", 1)
store = SqliteStore(path)
store.register_worker("me", os.getpid(), "host", 1)
store.commit([StartRun(new_run("a", status="running", owner="me"))])
for brings in ({}, {"payloads": [("p", b"1")]}, {"payloads": [("q", b"2")]}, {}):
    store.commit([append_to(store.run("a"), 2, **brings)])  # as one statement; as a transaction
    print(store.run("a").head_seq, flush=True)
store.renew("me", 2)
dead.close()
assert store.bury_dead(0) == ["dead"]
store.leave("me")
store.close()
print("end", flush=True)
"""

OURS = sorted(point for point in POINTS if point.startswith("store."))


def test_everything_passes_every_crash_point_of_the_store(tmp_path: Path) -> None:
    count = tmp_path / "count"
    python(EVERYTHING, str(tmp_path / "a.db"), EVERSTEP_CRASH_COUNT=str(count))
    assert sorted(set(count.read_text().split())) == OURS
    assert count.read_text().split().count("store.commit.after") == 5


@pytest.mark.parametrize("point", OURS)
def test_a_kill_at_any_point_leaves_a_store_that_goes_on(tmp_path: Path, point: str) -> None:
    for passed in (1, 3) if point.startswith("store.commit") else (1,):
        path = tmp_path / f"{passed}.db"
        with begin_python(EVERYTHING, str(path), EVERSTEP_CRASH_AT=f"{point}:{passed}") as process:
            out, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        store = SqliteStore(path)
        store.bury_dead(0)
        assert store.workers() == []
        row = store.run("a")
        acknowledged = [int(line) for line in out.split() if line.isdigit()]
        if row is None:
            assert not acknowledged
            assert store.runs(RunFilter()) == []
            assert store.commit([StartRun(new_run("a"))]) == [Accepted()]
        else:
            events = store.events("a", 1)
            assert row.head_seq == len(events) >= max(acknowledged, default=1)
            assert row.head_digest == events[-1].digest
            assert store.commit([append_to(row)]) == [Accepted()]
        store.close()


def test_a_stopped_process_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with begin_python(EVERYTHING, str(path), EVERSTEP_CRASH_AT="store.commit.after:2:stop") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(process.pid, signal.SIGCONT)
        out, errors = process.communicate()
    assert out.endswith("end\n"), errors


@pytest.mark.parametrize(
    "armed", ["nowhere:1", "store.commit.after", "store.commit.after:x", "store.commit.after:1:go"]
)
def test_a_wrong_crash_point_is_refused(armed: str) -> None:
    code = "from everstep.model import crash_points"
    with begin_python(code, EVERSTEP_CRASH_AT=armed) as process:
        _, errors = process.communicate()
    assert "EVERSTEP_CRASH_AT" in errors


def test_a_point_that_is_not_in_the_table_cannot_be_passed_when_armed(tmp_path: Path) -> None:
    code = "from everstep.model.crash_points import crash_point; crash_point('nowhere')"
    python(code)
    with begin_python(code, EVERSTEP_CRASH_COUNT=str(tmp_path / "count")) as process:
        _, errors = process.communicate()
    assert "not in the table" in errors
