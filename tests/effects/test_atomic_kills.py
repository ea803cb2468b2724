"""Real processes, killed and stopped around the transaction of an atomic step: one row in the end, at every place."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.model.events import decode_body
from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from tests.crash.figures import note_again
from tests.effects.shops import store_rows
from tests.effects.test_once_kills import PLACES as AROUND
from tests.effects.test_once_kills import Place, wait_until_stopped
from tests.forked import Program

TILL = Path(__file__).with_name("till.py")
CONTRACTS = ("atomic", "atomic, async", "atomic, store")

INSIDE = (
    Place("before the transaction", "transaction.before:1", True, 0),
    Place("the marker is written, not committed", "transaction.written:1", True, 0),
    Place("the transaction is committed", "transaction.after:1", True, 1),
)
IN_THE_BODY = "in the body, after the effect"
PLACES = (*(place._replace(applied=0) if place.name == IN_THE_BODY else place for place in AROUND), *INSIDE)
"""Those of the other contracts, where what the body wrote is not there before its transaction is; and those inside."""


class Life:
    """A store, perhaps a shop beside it, and the processes that work on them."""

    def __init__(self, folder: Path, contract: str, **more: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.plan = {"folder": str(folder), "contract": contract, **more}
        self.effects = folder / ("runs.db" if "store" in contract else "shop.db")

    def spawn(self, place: Place | None = None, **environment: str) -> Program:
        if place is not None:
            environment |= {"EVERSTEP_CRASH_AT": place.at} if place.at else {"TILL_KILL": place.name}
        return spawn(self.folder / "plan.json", [self.plan], **environment)

    def statuses(self) -> set[str]:
        return {path.read_text() for path in self.folder.glob("status-*")}

    def applied(self) -> int:
        return len(store_rows(self.effects)) if self.effects.exists() and self.effects.stat().st_size else 0

    def events(self) -> list[Any]:
        if not (self.folder / "runs.db").exists():
            return []
        store = SqliteStore(self.folder / "runs.db", create=False)
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
        store = SqliteStore(self.folder / "runs.db", create=False)
        try:
            return [str(violation) for violation in check(export_histories(store))]
        finally:
            store.close()


def spawn(path: Path, plan: list[dict[str, Any]], **environment: str) -> Program:
    path.write_text(json.dumps(plan))
    with open(path.with_suffix(".txt"), "ab") as output:
        return Program(
            [sys.executable, str(TILL), str(path)], env={**os.environ, **environment}, stdout=output, stderr=output
        )


def finish(tmp_path: Path, lives: list[Life]) -> None:
    """Let one process go on with all of them."""
    done = spawn(tmp_path / "again.json", [life.plan for life in lives]).wait(100)
    assert done == 0, (tmp_path / "again.txt").read_text()[-3000:]


@pytest.mark.timeout(300)
def test_killed_around_its_transaction_an_atomic_step_happens_once(
    tmp_path: Path, effects_table: dict[tuple[str, str], str]
) -> None:
    cases = [(contract, place) for contract in CONTRACTS for place in PLACES]
    lives = [Life(tmp_path / f"{n:02}", contract) for n, (contract, _) in enumerate(cases)]
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda n: lives[n].spawn(cases[n][1]).wait(30), range(len(cases))))
    assert ends == [-signal.SIGKILL] * len(cases), "every process was killed where it should be"
    for life, (_, place) in zip(lives, cases, strict=True):
        kinds = life.kinds()
        assert ("step_started" in kinds) == place.begun, (place, kinds)
        assert life.applied() == place.applied, place
        assert ("step_completed" in kinds) == place.settled, (place, kinds)
    finish(tmp_path, lives)

    problems = []
    for life, (contract, place) in zip(lives, cases, strict=True):
        applied, (status,) = life.applied(), life.statuses()
        effects_table[contract, place.name] = f"{applied} {status}"
        if (applied, status) != (1, "completed"):
            problems.append(f"{contract}, {place.name}: applied {applied}, {status}, {life.kinds()}")
        if life.outcome().adopted != (place.applied == 1 and not place.settled):
            problems.append(f"{contract}, {place.name}: what had happened is adopted, and nothing else")
        problems += [f"{contract}, {place.name}: {violation}" for violation in life.violations()]
    assert not problems, "\n".join(problems)


FIRST = [place for place in PLACES if place.name in (IN_THE_BODY, "the transaction is committed", "before the body")]
AGAIN = [
    *(Place(name, at, True, 0) for name, at in (("claimed", "run.claimed:1"), ("begun again", "attempt.again:1"))),
    *(place for place in PLACES if place.begun and not place.settled),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("contract", ["atomic", "atomic, store"])
def test_killed_again_during_recovery_it_still_happens_once(
    tmp_path: Path, effects_table: dict[tuple[str, str], str], contract: str
) -> None:
    pairs = [(first, again) for first in FIRST for again in AGAIN][:: 1 if contract == "atomic" else 3]
    lives = [Life(tmp_path / f"{n:02}", contract) for n in range(len(pairs))]

    def both(number: int) -> tuple[int, int]:
        first, again = pairs[number]
        return lives[number].spawn(first).wait(30), lives[number].spawn(again).wait(30)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(both, range(len(pairs))))
    assert {first for first, _ in ends} == {-signal.SIGKILL}
    assert sum(again == -signal.SIGKILL for _, again in ends) >= len(pairs) // 2, "an adopted one passes fewer places"
    finish(tmp_path, lives)
    for life, (_, again), (_, end) in zip(lives, pairs, ends, strict=True):
        if end == -signal.SIGKILL:
            note_again(effects_table, contract, again.at or again.name, life.applied())
    problems = [
        f"{first.name}, then {again.name}: {life.applied()}, {life.statuses()}, {life.violations()}"
        for life, (first, again) in zip(lives, pairs, strict=True)
        if (life.applied(), life.statuses() - {"running"}, life.violations()) != (1, {"completed"}, [])
    ]
    assert not problems, "\n".join(problems)


VOIDING = ["transaction.void.before:1", "transaction.void.written:1", "transaction.void.after:1"]


@pytest.mark.parametrize("at", VOIDING)
def test_killed_while_it_rules_out_earlier_attempts_it_does_that_again(tmp_path: Path, at: str) -> None:
    life = Life(tmp_path / "life", "atomic", fails_after_a_crash=True)
    assert life.spawn(TILL_KILL=IN_THE_BODY).wait(30) == -signal.SIGKILL
    assert life.spawn(EVERSTEP_CRASH_AT=at).wait(30) == -signal.SIGKILL
    assert life.spawn().wait(30) == 0
    assert (life.applied(), life.statuses()) == (0, {"failed"})
    assert life.kinds().count("step_started") == 3
    assert not life.violations()


# -- stopped -----------------------------------------------------------------------------------------------------------
@contextmanager
def stopped(life: Life, place: str) -> Iterator[Program]:
    """Give a process that was stopped at a place, or at a crash point."""
    armed = {"EVERSTEP_CRASH_AT": f"{place}:1:stop"} if "." in place else {"TILL_KILL": f"stop {place}"}
    process = life.spawn(**armed)
    try:
        wait_until_stopped(process.pid)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not become so"
        time.sleep(0.02)


LOCKED = ["in the body, before the effect", IN_THE_BODY, "transaction.written"]
FREE = ["transaction.before", "transaction.after", "body.before", "body.after"]


@pytest.mark.parametrize("woken", [True, False], ids=["woken", "killed"])
@pytest.mark.parametrize("place", LOCKED)
def test_stopped_inside_its_transaction_whoever_takes_over_waits_for_it(
    tmp_path: Path, place: str, woken: bool
) -> None:
    """Woken, it commits, and the other adopts that. Killed, it has not happened, and the other does it."""
    life = Life(tmp_path / "life", "atomic", lease=1)
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


@pytest.mark.parametrize("place", FREE)
def test_stopped_outside_of_its_transaction_it_does_nothing_when_it_is_woken(tmp_path: Path, place: str) -> None:
    life = Life(tmp_path / "life", "atomic", lease=1)
    with stopped(life, place) as first:
        assert life.spawn().wait(30) == 0, "another process takes the run over when the lease has lapsed"
        assert (life.applied(), life.statuses()) == (1, {"completed"})
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 0
    assert life.applied() == 1
    assert life.kinds().count("step_completed") == 1
    assert not life.violations()


def test_stopped_before_a_transaction_that_another_process_gave_up_it_cannot_do_it_any_more(tmp_path: Path) -> None:
    life = Life(tmp_path / "life", "atomic", lease=1, fails_after_a_crash=True)
    with stopped(life, "transaction.before") as first:
        assert life.spawn().wait(30) == 0
        assert (life.applied(), life.statuses()) == (0, {"failed"})
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 0
    assert life.applied() == 0, "the history says that it has failed, so it has not happened"
    assert not life.violations()


@pytest.mark.parametrize("place", LOCKED)
def test_stopped_inside_a_transaction_of_the_store_everybody_waits(tmp_path: Path, place: str) -> None:
    """The store has one writer, so nobody can even take over; nothing is lost and nothing is doubled."""
    life = Life(tmp_path / "life", "atomic, store", lease=1)
    with stopped(life, place) as first:
        second = life.spawn()
        time.sleep(2)
        assert second.poll() is None
        os.kill(first.pid, signal.SIGCONT)
        assert (first.wait(30), second.wait(30)) == (0, 0)
    assert (life.applied(), life.statuses()) == (1, {"completed"})
    assert not life.violations()
