"""Real processes, killed and stopped around a transaction in PostgreSQL: one row in the end, at every place."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.model.events import decode_body
from everstep.stores.opening import open_store
from everstep.testing.checker import check, export_histories
from tests.crash.figures import FIGURES, note_again
from tests.effects.test_atomic_kills import AGAIN, FIRST, IN_THE_BODY, INSIDE, PLACES
from tests.effects.test_once_kills import Place, wait_until_stopped
from tests.postgres.server import Server
from tests.postgres.shops import Shop
from tests.postgres.ways import WAYS

TILL = Path(__file__).with_name("till.py")


class Life:
    """A shop in a schema of its own, a store, and the processes that work on them."""

    def __init__(self, folder: Path, server: Server, contract: str, **more: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.shop = Shop(server, server.fresh_schema())
        self.store = self.shop.store_url() if WAYS[contract].in_store else str(folder / "runs.db")
        shop = self.shop.url()
        self.plan = {"folder": str(folder), "contract": contract, "shop": shop, "store": self.store, **more}

    def spawn(self, place: Place | None = None, **environment: str) -> "subprocess.Popen[bytes]":
        if place is not None:
            environment |= {"EVERSTEP_CRASH_AT": place.at} if place.at else {"TILL_KILL": place.name}
        return spawn(self.folder / "plan.json", [self.plan], **environment)

    def statuses(self) -> set[str]:
        return {path.read_text() for path in self.folder.glob("status-*")}

    def applied(self) -> int:
        return len(self.shop.sales())

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


def spawn(path: Path, plan: list[dict[str, Any]], **environment: str) -> "subprocess.Popen[bytes]":
    path.write_text(json.dumps(plan))
    with open(path.with_suffix(".txt"), "ab") as output:
        return subprocess.Popen(
            [sys.executable, str(TILL), str(path)], env={**os.environ, **environment}, stdout=output, stderr=output
        )


def finish(tmp_path: Path, lives: list[Life]) -> None:
    """Let one process go on with all of them."""
    done = spawn(tmp_path / "again.json", [life.plan for life in lives]).wait(100)
    assert done == 0, (tmp_path / "again.txt").read_text()[-3000:]


SOME = [place for place in PLACES if place in INSIDE or place.name == IN_THE_BODY]
CASES = [
    *(("psycopg", place) for place in PLACES),
    *(("store", place) for place in PLACES if place in SOME or place.settled),
    *((way, place) for way in ("psycopg, async", "engine", "session, async") for place in SOME[::2]),
]


@pytest.mark.timeout(300)
def test_killed_around_its_transaction_an_atomic_step_happens_once(tmp_path: Path, server: Server) -> None:
    lives = [Life(tmp_path / f"{n:02}", server, contract) for n, (contract, _) in enumerate(CASES)]
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda n: lives[n].spawn(CASES[n][1]).wait(30), range(len(CASES))))
    assert ends == [-signal.SIGKILL] * len(CASES), "every process was killed where it should be"
    for life, (contract, place) in zip(lives, CASES, strict=True):
        assert life.applied() == place.applied, (contract, place)
    finish(tmp_path, lives)
    problems = []
    for life, (contract, place) in zip(lives, CASES, strict=True):
        applied, (status,) = life.applied(), life.statuses()
        FIGURES.effects[f"{contract} (PG)", place.name] = f"{applied} {status}"
        if (applied, status) != (1, "completed"):
            problems.append(f"{contract}, {place.name}: applied {applied}, {status}, {life.kinds()}")
        if life.outcome().adopted != (place.applied == 1 and not place.settled):
            problems.append(f"{contract}, {place.name}: what had happened is adopted, and nothing else")
        problems += [f"{contract}, {place.name}: {violation}" for violation in life.violations()]
        life.shop.drop()
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(300)
def test_killed_again_during_recovery_it_still_happens_once(tmp_path: Path, server: Server) -> None:
    every = [(first, again) for first in FIRST for again in AGAIN]
    pairs = [*(("psycopg", *pair) for pair in every[::6]), *(("store", *pair) for pair in every[2::15])]
    lives = [Life(tmp_path / f"{n:02}", server, contract) for n, (contract, _, _) in enumerate(pairs)]

    def both(number: int) -> tuple[int, int]:
        _, first, again = pairs[number]
        return lives[number].spawn(first).wait(30), lives[number].spawn(again).wait(30)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(both, range(len(pairs))))
    assert {first for first, _ in ends} == {-signal.SIGKILL}
    assert sum(again == -signal.SIGKILL for _, again in ends) >= len(pairs) // 2, "an adopted one passes fewer places"
    finish(tmp_path, lives)
    for life, (contract, _, again), (_, end) in zip(lives, pairs, ends, strict=True):
        if end == -signal.SIGKILL:
            note_again(FIGURES.effects, f"{contract} (PG)", again.at or again.name, life.applied())
    problems = [
        f"{contract}, {first.name}, then {again.name}: {life.applied()}, {life.statuses()}, {life.violations()}"
        for life, (contract, first, again) in zip(lives, pairs, strict=True)
        if (life.applied(), life.statuses() - {"running"}, life.violations()) != (1, {"completed"}, [])
    ]
    for life in lives:
        life.shop.drop()
    assert not problems, "\n".join(problems)


# -- stopped -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def life(tmp_path: Path, server: Server) -> Iterator[Life]:
    made = Life(tmp_path / "life", server, "psycopg", lease=1)
    yield made
    made.shop.drop()


@contextmanager
def stopped(life: Life, place: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that was stopped at a place, or at a crash point."""
    armed = {"EVERSTEP_CRASH_AT": f"{place}:1:stop"} if "." in place else {"TILL_KILL": f"stop {place}"}
    process = life.spawn(**armed)
    try:
        wait_until_stopped(process.pid)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("woken", [True, False], ids=["woken", "killed"])
def test_stopped_inside_its_transaction_whoever_takes_over_waits_for_it(life: Life, woken: bool) -> None:
    """Woken, it commits, and the other adopts that. Killed, it has not happened, and the other does it."""
    with stopped(life, "transaction.written") as first:
        second = life.spawn()
        until = time.monotonic() + 20
        while life.kinds().count("step_started") < 2:
            assert time.monotonic() < until, "another process takes the run over when the lease has lapsed"
            time.sleep(0.02)
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


def test_stopped_before_a_transaction_that_another_process_gave_up_it_cannot_do_it_any_more(life: Life) -> None:
    life.plan["fails_after_a_crash"] = True
    with stopped(life, "transaction.before") as first:
        assert life.spawn().wait(30) == 0
        assert (life.applied(), life.statuses()) == (0, {"failed"})
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 0
    assert life.applied() == 0, "the history says that it has failed, so it has not happened"
    assert not life.violations()


def test_two_processes_with_the_same_step_at_once_do_it_once(life: Life) -> None:
    """The second one finds the first one's lease lapsed, although it is only slow."""
    with stopped(life, "in the body, before the effect") as first:
        others = [life.spawn() for _ in range(2)]
        time.sleep(1.5)
        os.kill(first.pid, signal.SIGCONT)
        assert [process.wait(30) for process in (first, *others)] == [0, 0, 0]
    assert (life.applied(), life.statuses()) == (1, {"completed"})
    assert not life.violations()
