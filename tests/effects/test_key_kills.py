"""Real processes that share keys: they race for them, and are killed while they have one or wait for one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.ledger import Ledger
from tests.forked import Program
from tests.waiting import wait_until

PROGRAM = Path(__file__).with_name("keyed.py")
KEYS = 200


class Place:
    """A store, its book of the ledger, and the processes that work on it."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.book = ledger.book(folder.name.replace("_", "-").replace("[", "").replace("]", ""))
        self._processes: list[Program] = []

    def spawn(self, work: str, *arguments: str, **environment: str) -> Program:
        entries = str(self.book.folder / "ledger.jsonl")
        command = [sys.executable, str(PROGRAM), work, str(self.folder), self.book.url, entries, *arguments]
        with open(self.folder / "output.txt", "ab") as output:
            process = Program(command, env={**os.environ, **environment}, stdout=output, stderr=output)
        self._processes.append(process)
        return process

    def run(self, *arguments: str, **environment: str) -> int:
        return self.spawn("one", *arguments, **environment).wait(60)

    def end(self, run: str) -> str:
        return (self.folder / f"{run}.end").read_text()

    def applied(self) -> list[dict[str, Any]]:
        return [entry for entry in self.book.entries() if entry["kind"] == "applied"]

    def store(self) -> SqliteStore:
        return SqliteStore(self.folder / "runs.db", create=False)

    def kinds(self, run: str) -> list[str]:
        store = self.store()
        try:
            return [event.kind for event in store.events(run, 1)]
        finally:
            store.close()

    def until(self, what: str) -> None:
        """Wait until a run of the store has a status: `b is waiting`."""
        run, _, status = what.partition(" is ")
        store = self.store()
        try:
            wait_until(lambda: (row := store.run(run)) is not None and row.status == status, self.output)
        finally:
            store.close()

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-3000:]

    def check(self, *, settled: bool = True) -> None:
        store = self.store()
        try:
            assert check(export_histories(store), ledger=self.book.entries(), settled=settled) == []
        finally:
            store.close()

    def shut(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def place(tmp_path: Path, ledger: Ledger) -> Any:
    made = Place(tmp_path, ledger)
    yield made
    made.shut()


def test_two_processes_race_for_two_hundred_keys_and_each_is_used_once(place: Place) -> None:
    """The receiver forgets keys: whatever is sent twice is applied twice."""
    points = place.folder / "points"
    counted = {"EVERSTEP_CRASH_COUNT": str(points)}
    racers = [place.spawn("race", name, str(KEYS), **counted) for name in ("left", "right")]
    wait_until(
        lambda: all((place.folder / f"{name}.ready").exists() for name in ("left", "right")), lambda: place.output()
    )
    (place.folder / "go").touch()
    assert [racer.wait(150) for racer in racers] == [0, 0], place.output()
    left, right = (json.loads(place.end(name)) for name in ("left", "right"))
    assert left == right, "both were given the same outcomes"
    assert len(left) == KEYS
    applied = place.applied()
    assert sorted(entry["arguments"] for entry in applied) == list(range(KEYS)), "each exactly once"
    assert len({entry["key"] for entry in applied}) == KEYS
    owners = {"left": 0, "right": 0}
    for number in range(KEYS):
        for name in owners:
            owners[name] += "step_started" in place.kinds(f"{name}-{number}")
    assert sum(owners.values()) == KEYS
    assert min(owners.values()) > KEYS / 10, f"it was a race: {owners}"
    assert points.read_text().split().count("key.refused") > 0, "also between the look and the claim"
    place.check()


@pytest.mark.parametrize("where", ["before the effect", "after the effect"])
def test_who_may_be_repeated_goes_on_and_who_waits_shares_its_outcome(place: Place, where: str) -> None:
    assert place.run("a", "repeat", KEYED_KILL=where) == -signal.SIGKILL
    waiter = place.spawn("one", "b", "repeat")
    place.until("b is waiting")
    assert place.run("a", "repeat") == 0, place.output()
    assert waiter.wait(30) == 0, place.output()
    assert place.end("a") == place.end("b")
    assert len({entry["key"] for entry in place.applied()}) == 1
    assert len(place.applied()) == (1 if where == "before the effect" else 2), "by the one that has the key alone"
    assert "step_started" not in place.kinds("b")
    assert place.kinds("b")[1:] == ["key_taken", "step_shared", "run_completed"]


@pytest.mark.parametrize("answer", ["done", "not-done"])
@pytest.mark.parametrize("where", ["before the effect", "after the effect"])
def test_who_must_not_be_repeated_is_held_and_who_waits_gets_what_a_person_says(
    place: Place, where: str, answer: str
) -> None:
    assert place.run("a", "once", KEYED_KILL=where) == -signal.SIGKILL
    waiter = place.spawn("one", "b", "once")
    place.until("b is waiting")
    assert place.run("a", "once") == 0, place.output()
    assert place.end("a") == "held"
    done_by_then = 0 if where == "before the effect" else 1
    assert len(place.applied()) == done_by_then
    assert waiter.poll() is None, "it waits"
    assert place.run("a", "once", answer) == 0, place.output()
    assert waiter.wait(30) == 0, place.output()
    assert place.end("a") == place.end("b")
    if answer == "done":
        assert place.end("b") == "by hand"
        assert len(place.applied()) == done_by_then, "nobody did it again"
    else:
        assert len(place.applied()) == done_by_then + 1, "the person was believed, once"
        assert "step_started" not in place.kinds("b")


@pytest.mark.parametrize("where", ["before the effect", "after the effect"])
def test_with_a_probe_both_end_and_it_happened_once(place: Place, where: str) -> None:
    assert place.run("a", "once, probed", KEYED_KILL=where) == -signal.SIGKILL
    waiter = place.spawn("one", "b", "once, probed")
    place.until("b is waiting")
    assert place.run("a", "once, probed") == 0, place.output()
    assert waiter.wait(30) == 0, place.output()
    assert place.end("a") == place.end("b")
    assert len(place.applied()) == 1
    place.check()


@pytest.mark.parametrize("at", ["key.woken:1", "key.shared:1", "store.commit.written:2", "store.commit.after:2"])
def test_who_waits_is_killed_while_it_is_told_and_goes_on(place: Place, at: str) -> None:
    assert place.run("a", "once, probed", KEYED_KILL="after the effect") == -signal.SIGKILL
    waiter = place.spawn("one", "b", "once, probed", EVERSTEP_CRASH_AT=at)
    if at.startswith("key"):
        place.until("b is waiting")
        assert place.run("a", "once, probed") == 0, place.output()
        assert waiter.wait(30) == -signal.SIGKILL, place.output()
    else:
        assert waiter.wait(30) == -signal.SIGKILL, place.output()
        assert place.run("a", "once, probed") == 0, place.output()
    assert place.run("b", "once, probed") == 0, place.output()
    assert place.end("a") == place.end("b")
    assert len(place.applied()) == 1
    place.check()


def test_an_owner_that_never_comes_back_is_cancelled_and_its_key_goes_on(place: Place) -> None:
    """Without its code: what may be repeated frees its key with the end of its run."""
    assert place.run("a", "repeat", KEYED_KILL="before the effect") == -signal.SIGKILL
    waiter = place.spawn("one", "b", "repeat")
    place.until("b is waiting")
    everstep = [sys.executable, "-m", "everstep", "cancel", "a", "--now", "--url", str(place.folder / "runs.db")]
    assert subprocess.run(everstep, capture_output=True).returncode == 0
    assert waiter.wait(30) == 0, place.output()
    assert len(place.applied()) == 1
    assert place.kinds("b")[1:4] == ["key_taken", "step_started", "step_completed"]
    place.check()
