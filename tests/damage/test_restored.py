"""A backup is restored, with real processes that are killed and a real ledger: what had happened does not again."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.model.events import decode_body
from everstep.stores.sqlite import SqliteStore
from everstep.testing.ledger import Ledger, Mode
from tests import forked
from tests.forked import Program
from tests.waiting import open_raw, wait_until

PROGRAM = Path(__file__).with_name("restoring.py")
EFFECTS = 56


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger.start(tmp_path_factory.mktemp("restored") / "ledger") as ledger:
        for effect in ("pay", "send"):
            ledger.behave(effect, Mode(honours_keys=False))
        yield ledger


class Place:
    """A folder with a store, its book of the ledger, and the program at work in it."""

    def __init__(self, folder: Path, ledger: Ledger, kind: str = "probed") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.kind = folder, kind
        self.book = ledger.book(f"{folder.parent.name}-{folder.name}".replace("_", "-"))
        self.path = folder / "runs.db"
        self.process: Program | None = None

    def begin(self, at: str = "") -> Program:
        (self.folder / "rest").unlink(missing_ok=True)
        environment = {**os.environ, **({"EVERSTEP_CRASH_AT": at} if at else {})}
        entries = str(self.book.folder / "ledger.jsonl")
        command = [sys.executable, str(PROGRAM), str(self.folder), self.book.url, entries, self.kind]
        with open(self.folder / "output.txt", "ab") as output:
            self.process = Program(command, env=environment, stdout=output, stderr=output)
        return self.process

    def applied(self) -> list[tuple[str, str, Any]]:
        entries = [entry for entry in self.book.entries() if entry["kind"] == "applied"]
        return [(entry["effect"], entry["key"], entry["arguments"]) for entry in entries]

    def until(self, happened: Callable[[], Any]) -> None:
        wait_until(happened, lambda: self.output())

    def until_rest(self) -> None:
        self.until((self.folder / "rest").exists)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-3000:]

    def back_up(self) -> None:
        """Copy the store while it is in use, as an operator does."""
        connection = open_raw(self.path)
        connection.execute("VACUUM INTO ?", (str(self.folder / "backup.db"),))
        connection.close()

    def restore(self) -> None:
        """Put the backup in the place of the store."""
        for name in ("runs.db", "runs.db-wal", "runs.db-shm", "runs.db-live"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "backup.db").rename(self.path)

    def everstep(self, *words: str) -> Any:
        done = forked.run(
            [sys.executable, "-m", "everstep", *words, "--json"],
            env={**os.environ, "EVERSTEP_URL": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def kinds(self, run: str = "r") -> list[str]:
        store = SqliteStore(self.path)
        try:
            return [event.kind for event in store.events(run, 1)]
        finally:
            store.close()

    def bodies(self, kind: str, run: str = "r") -> list[Any]:
        store = SqliteStore(self.path)
        try:
            return [decode_body(kind, event.body) for event in store.events(run, 1) if event.kind == kind]
        finally:
            store.close()


def fifty_effects_after_a_backup(place: Place, at: int = 6) -> list[tuple[str, str, Any]]:
    """Let the program go; back its store up when a few effects were applied; kill it when all were. Returns those."""
    place.begin()
    place.until(lambda: len(place.applied()) >= at)
    place.back_up()
    place.until_rest()
    place.kill()
    applied = place.applied()
    place.restore()
    return applied


def test_a_store_restored_from_a_copy_taken_many_effects_ago_changes_nothing_outside(
    tmp_path: Path, ledger: Ledger
) -> None:
    place = Place(tmp_path / "place", ledger)
    before = fifty_effects_after_a_backup(place)
    assert len(before) == EFFECTS
    marked = place.everstep("restored")
    assert marked["restores"] == 1
    assert "r" in marked["unfinished"]
    place.begin()
    place.until_rest()
    assert place.applied() == before, "the ledger does not change"
    assert place.kinds().count("run_restored") == 1
    assert [body.because for body in place.bodies("step_doubted")].count("restored") > 5
    forked.run([sys.executable, "-m", "everstep", "signal", "r", "end", '"x"'], env=url(place), check=True)
    assert place.process is not None
    assert place.process.wait(30) == 0, place.output()
    assert place.applied() == before
    assert place.everstep("verify", "--all")["sound"]


def url(place: Place) -> dict[str, str]:
    return {**os.environ, "EVERSTEP_URL": str(place.path)}


def test_without_being_told_it_does_things_again(tmp_path: Path, ledger: Ledger) -> None:
    """What the one above shows is seen by the ledger: nothing else keeps it from changing."""
    place = Place(tmp_path / "place", ledger)
    before = fifty_effects_after_a_backup(place)
    place.begin()
    place.until_rest()
    place.kill()
    again = place.applied()[len(before) :]
    assert again
    assert {effect for effect, _, _ in again} == {"pay"}, "the keys of `note` are honoured, and are the same"


@pytest.mark.parametrize(
    "point", ["run.replayed:1", "store.commit.written:4", "unit.durable:3", "probe.before:2", "probe.after:3"]
)
def test_killed_again_while_it_recovers_it_still_changes_nothing(tmp_path: Path, ledger: Ledger, point: str) -> None:
    place = Place(tmp_path / "place", ledger)
    before = fifty_effects_after_a_backup(place)
    place.everstep("restored")
    assert place.begin(at=point).wait(60) == -signal.SIGKILL, place.output()
    place.begin()
    place.until_rest()
    place.kill()
    assert place.applied() == before
    assert place.kinds().count("run_restored") == 1


def test_what_nobody_can_be_asked_about_is_held_for_a_person(tmp_path: Path, ledger: Ledger) -> None:
    def sent(place: Place) -> int:
        return [effect for effect, _, _ in place.applied()].count("send")

    place = Place(tmp_path / "place", ledger, "unprobed")
    (place.folder / "gate").touch()
    place.begin()
    place.until(lambda: sent(place))
    place.back_up()
    (place.folder / "gate").unlink()  # only now the rest is sent
    place.until_rest()
    place.kill()
    assert sent(place) == 4
    before = place.applied()
    place.restore()
    place.everstep("restored")
    held = []
    for _ in range(10):
        process = place.begin()
        place.until(lambda: process.poll() is not None or (place.folder / "rest").exists())  # noqa: B023
        if process.poll() is None:
            break
        assert process.wait() == 3, place.output()
        (hold,) = place.everstep("holds")
        held.append((hold["reason"], hold["step"]))
        assert place.applied() == before
        number = hold["step"].partition("#")[2] or "1"
        value = next(entry for entry in before if entry[0] == "send" and entry[2] == int(number) - 1)
        assert value
        answer = place.everstep("resolve", "r", "--done", f'"send-{number}"', "--note", "looked")
        assert answer["status"] == "queued"
    place.kill()
    assert place.applied() == before, "nothing was sent again"
    assert held
    assert set(held[1:]) <= {("restored", f"send#{number}") for number in (2, 3, 4)}


def test_accepting_many_at_once_lets_the_runs_go_on(tmp_path: Path, ledger: Ledger) -> None:
    """Nothing had happened after the backup, and somebody who has checked says so."""
    place = Place(tmp_path / "place", ledger, "unprobed")
    assert place.begin(at="outcome.recorded:1").wait(60) == -signal.SIGKILL
    place.back_up()
    place.restore()
    place.everstep("restored")
    assert place.begin().wait(60) == 3, place.output()
    (hold,) = place.everstep("holds")
    assert (hold["reason"], hold["step"]) == ("restored", "send")
    assert list(hold["resolutions"]) == ["accept", "done", "not-done", "cancel"]
    done = place.everstep("resolve", "--reason", "restored", "--accept", "--yes")
    assert done["resolved"] == ["r"]
    place.begin()
    place.until_rest()
    place.kill()
    assert [effect for effect, _, _ in place.applied()] == ["note", *["send"] * 4]
    assert place.kinds().count("run_held") == 1, "one question for all of them"


def test_a_store_that_is_in_use_is_not_marked(tmp_path: Path, ledger: Ledger) -> None:
    place = Place(tmp_path / "place", ledger, "unprobed")
    place.begin()
    place.until_rest()
    refused = place.everstep("restored")
    assert refused["error"]["code"] == "everstep.misuse"
    assert "Stop every process" in refused["error"]["message"]
    place.kill()
    assert place.everstep("restored")["restores"] == 1
