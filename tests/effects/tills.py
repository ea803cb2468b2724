"""Lives of tills: runs with one step that sells, in processes that are killed and stopped around its transaction."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everstep.model.events import decode_body
from everstep.stores.opening import open_store
from everstep.testing.checker import check, export_histories
from tests.effects.test_once_kills import Place, wait_until_stopped
from tests.forked import Program
from tests.waiting import wait_until


class TillLife:
    """A store, whatever the till writes to, and the processes that work on them."""

    def __init__(self, till: Path, folder: Path, contract: str, store: str, **more: Any) -> None:
        self.till = till
        self.folder = folder
        self.store = store
        self.plan = {"folder": str(folder), "contract": contract, "store": store, **more}

    def applied(self) -> int:
        """Return how often it was sold."""
        raise NotImplementedError

    def spawn(self, place: Place | None = None, **environment: str) -> Program:
        if place is not None:
            environment |= {"EVERSTEP_CRASH_AT": place.at} if place.at else {"TILL_KILL": place.name}
        return _spawn(self.till, self.folder / "plan.json", [self.plan], **environment)

    def locks(self, place: str) -> bool:
        """Tell whether a process that is stopped at a place has the lock of the store, as it should."""
        return False

    def is_locked(self) -> bool:
        """Tell whether a process has it now."""
        return False

    def forget(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def statuses(self) -> set[str]:
        return {path.read_text() for path in self.folder.glob("status-*")}

    def events(self) -> list[Any]:
        store = open_store(self.store)
        try:
            return [(event.kind, decode_body(event.kind, event.body)) for event in store.events("p", 1)]
        finally:
            store.close()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events()]

    def outcome(self) -> Any:
        (body,) = [body for kind, body in self.events() if kind == "step_completed"]
        return body

    def violations(self) -> list[str]:
        store = open_store(self.store)
        try:
            return [str(violation) for violation in check(export_histories(store))]
        finally:
            store.close()


def _spawn(till: Path, path: Path, plan: list[dict[str, Any]], **environment: str) -> Program:
    path.write_text(json.dumps(plan))
    with open(path.with_suffix(".txt"), "ab") as output:
        return Program(
            [sys.executable, str(till), str(path)], env={**os.environ, **environment}, stdout=output, stderr=output
        )


def finish(tmp_path: Path, lives: Sequence[TillLife]) -> None:
    """Let one process go on with all of them."""
    done = _spawn(lives[0].till, tmp_path / "again.json", [life.plan for life in lives]).wait(100)
    assert done == 0, (tmp_path / "again.txt").read_text()[-3000:]


def kill(lives: Sequence[TillLife], places: Sequence[Place]) -> None:
    """Kill each of them at its place."""
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda n: lives[n].spawn(places[n]).wait(30), range(len(lives))))
    assert ends == [-signal.SIGKILL] * len(lives), "every process was killed where it should be"


def kill_twice(lives: Sequence[TillLife], pairs: Sequence[tuple[Place, Place]]) -> list[bool]:
    """Kill each of them at its place, and again during recovery. Returns whether it came to its second place."""

    def both(number: int) -> tuple[int, int]:
        first, again = pairs[number]
        return lives[number].spawn(first).wait(30), lives[number].spawn(again).wait(30)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(both, range(len(pairs))))
    assert {first for first, _ in ends} == {-signal.SIGKILL}
    came = [again == -signal.SIGKILL for _, again in ends]
    assert sum(came) >= len(pairs) // 2, "an adopted one passes fewer places"
    return came


def problems_of(life: TillLife, place: Place) -> list[str]:
    """Return what is wrong with a life that was killed at a place and went on."""
    applied, (status,) = life.applied(), life.statuses()
    found = [f"applied {applied}, {status}, {life.kinds()}"] if (applied, status) != (1, "completed") else []
    if life.outcome().adopted != (place.applied == 1 and not place.settled):
        found.append("what had happened is adopted, and nothing else")
    return [f"{life.plan['contract']}, {place.name}: {problem}" for problem in [*found, *life.violations()]]


def problems_of_two(life: TillLife, first: Place, again: Place) -> list[str]:
    """Return what is wrong with a life that was killed twice and went on."""
    found = (life.applied(), life.statuses() - {"running"}, life.violations())
    if found == (1, {"completed"}, []):
        return []
    return [f"{life.plan['contract']}, {first.name}, then {again.name}: {found}"]


@contextmanager
def stopped(life: TillLife, place: str) -> Iterator[Program]:
    """Give a process that was stopped at a place, or at a crash point."""
    armed = {"EVERSTEP_CRASH_AT": f"{place}:1:stop"} if "." in place else {"TILL_KILL": f"stop {place}"}
    process = life.spawn(**armed)
    try:
        wait_until_stopped(process.pid)
        while not life.locks(place) and life.is_locked():  # another of its threads was renewing its lease just then
            process.kill()
            process.wait()
            life.forget()
            process = life.spawn(**armed)
            wait_until_stopped(process.pid)
        yield process
    finally:
        process.kill()
        process.wait()


def prove_that_whoever_takes_over_waits(life: TillLife, place: str, *, woken: bool) -> None:
    """Stopped inside its transaction: woken, it commits, and the other adopts that; killed, the other does it."""
    with stopped(life, place) as first:
        second = life.spawn()
        wait_until(lambda: life.kinds().count("step_started") == 2)
        time.sleep(0.3)
        assert second.poll() is None
        assert life.applied() == 0
        os.kill(first.pid, signal.SIGCONT if woken else signal.SIGKILL)
        assert second.wait(30) == 0
        if woken:
            assert first.wait(30) == 0
    assert (life.applied(), life.statuses()) == (1, {"completed"})
    assert life.outcome().adopted == woken
    assert not life.violations()


def prove_that_what_was_given_up_cannot_happen(life: TillLife) -> None:
    """Stopped before its transaction, while another process has given the step up."""
    life.plan["fails_after_a_crash"] = True
    with stopped(life, "transaction.before") as first:
        assert life.spawn().wait(30) == 0
        assert (life.applied(), life.statuses()) == (0, {"failed"})
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 0
    assert life.applied() == 0, "the history says that it has failed, so it has not happened"
    assert not life.violations()
