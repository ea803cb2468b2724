"""Real processes, killed around the effect of a step and started again; and one that was only stopped."""

import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from everstep.model.events import decode_body
from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import check, export_histories
from everstep.testing.ledger import Ledger
from tests import forked
from tests.crash.figures import note_again
from tests.forked import Program
from tests.waiting import is_locked, wait_until

PAYMENTS = Path(__file__).with_name("payments.py")
CONTRACTS = ("repeat", "repeat, keys forgotten", "once", "once, probed")


class Place(NamedTuple):
    name: str
    at: str
    """The crash point; a place inside of the body has none."""
    begun: bool
    """Whether the intent is durable by then."""
    applied: int
    """How often the effect is applied by then."""
    settled: bool = False
    """Whether the outcome is durable by then."""


PLACES = (
    Place("before the intent is written", "store.commit.before:2", False, 0),
    Place("the intent is written, not committed", "store.commit.written:2", False, 0),
    Place("the intent is durable, nobody knows", "store.commit.after:2", True, 0),
    Place("the intent is known to be durable", "unit.durable:1", True, 0),
    Place("before the body", "body.before:1", True, 0),
    Place("in the body, before the effect", "", True, 0),
    Place("in the body, after the effect", "", True, 1),
    Place("after the body", "body.after:1", True, 1),
    Place("the outcome is recorded in memory", "outcome.recorded:1", True, 1),
    Place("before the outcome is written", "store.commit.before:3", True, 1),
    Place("the outcome is written, not committed", "store.commit.written:3", True, 1),
    Place("the outcome is durable", "store.commit.after:3", True, 1, True),
)


class Life:
    """A store, its book of the ledger, and the processes that work on it."""

    def __init__(self, folder: Path, ledger: Ledger, contract: str, **more: Any) -> None:
        folder.mkdir(parents=True)
        name = "-".join(folder.parts[-2:]).replace("_", "-").replace(",", "").replace(" ", "-")
        self.folder, self.contract = folder, contract
        self.book = ledger.book(name)
        entries = str(self.book.folder / "ledger.jsonl")
        self.plan = {"folder": str(folder), "contract": contract, "url": self.book.url, "entries": entries, **more}

    def spawn(self, **environment: str) -> Program:
        return spawn(self.folder / "plan.json", [self.plan], **environment)

    def status(self) -> str:
        return (self.folder / "status").read_text()

    def applied(self) -> int:
        return sum(entry["kind"] == "applied" for entry in self.book.entries())

    def store(self) -> SqliteStore:
        return SqliteStore(self.folder / "runs.db", create=False)

    def kinds(self) -> list[str]:
        store = self.store()
        try:
            return [event.kind for event in store.events("p", 1)]
        finally:
            store.close()


def spawn(path: Path, plan: list[dict[str, Any]], **environment: str) -> Program:
    path.write_text(json.dumps(plan))
    with open(path.with_suffix(".txt"), "ab") as output:
        return Program(
            [sys.executable, str(PAYMENTS), str(path)], env={**os.environ, **environment}, stdout=output, stderr=output
        )


def test_killed_around_its_effect_a_once_step_never_happens_twice_and_never_silently_not_at_all(
    tmp_path: Path, ledger: Ledger, effects_table: dict[tuple[str, str], str]
) -> None:
    """Where the receiver forgets keys, what is sent twice is applied twice: `repeat` shows that the test can see it."""
    cases = [(contract, place) for contract in CONTRACTS for place in PLACES]
    lives = [Life(tmp_path / f"{n:02}", ledger, contract) for n, (contract, _) in enumerate(cases)]

    def first(number: int) -> int:
        place = cases[number][1]
        armed = {"EVERSTEP_CRASH_AT": place.at} if place.at else {"PAYMENTS_KILL": place.name}
        return lives[number].spawn(**armed).wait(30)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(first, range(len(cases))))
    assert ends == [-signal.SIGKILL] * len(cases), "every process was killed where it should be"
    for life, (_, place) in zip(lives, cases, strict=True):
        kinds = life.kinds() if (life.folder / "runs.db").exists() else []
        assert ("step_started" in kinds) == place.begun, (place, kinds)
        assert life.applied() == place.applied, place
        assert ("step_completed" in kinds) == place.settled, (place, kinds)
    assert spawn(tmp_path / "again.json", [life.plan for life in lives]).wait(60) == 0, (
        tmp_path / "again.txt"
    ).read_text()[-3000:]

    problems = []
    for life, (contract, place) in zip(lives, cases, strict=True):
        applied, status = life.applied(), life.status()
        effects_table[contract, place.name] = f"{applied} {status}"
        if (applied, status) != expected(contract, place):
            problems.append(f"{contract}, {place.name}: applied {applied}, {status}, {life.kinds()}")
        problems += [f"{contract}, {place.name}: {violation}" for violation in violations(life)]
    assert not problems, "\n".join(problems)


def expected(contract: str, place: Place) -> tuple[int, str]:
    """What the contract promises: how often the effect is applied in the end, and how the run stands then."""
    if place.settled or not place.begun or contract in ("once, probed", "repeat"):
        return 1, "completed"
    if contract == "once":
        return place.applied, "held"
    return place.applied + 1, "completed"


def violations(life: Life) -> list[str]:
    """What the checker finds, by the history and the ledger. Where keys are forgotten, doubles are expected."""
    if life.contract == "repeat, keys forgotten":
        return []
    store = life.store()
    try:
        entries = life.book.entries()
        return [str(found) for found in check(export_histories(store), ledger=entries, settled=life.status() != "held")]
    finally:
        store.close()


AGAIN = (
    "run.claimed:1",
    "store.commit.written:1",
    "store.commit.after:1",
    "run.replayed:1",
    "body.before:1",
    "body.after:1",
    "outcome.recorded:1",
    "store.commit.after:2",
    "run.ended:1",
)
"""Where the process that recovers the run is killed, too. Each place of the first kill meets one or two of them."""


@pytest.mark.parametrize("contract", ["repeat", "once", "once, probed"])
def test_killed_again_during_recovery_it_keeps_its_contract(
    tmp_path: Path, ledger: Ledger, effects_table: dict[tuple[str, str], str], contract: str
) -> None:
    pairs = [(place, AGAIN[(n + k) % len(AGAIN)]) for n, place in enumerate(PLACES) for k in (0, 4)[: 1 + n % 2]]
    lives = [Life(tmp_path / f"{contract}{n:02}", ledger, contract) for n in range(len(pairs))]

    def both(number: int) -> tuple[int, int]:
        place, again = pairs[number]
        armed = {"EVERSTEP_CRASH_AT": place.at} if place.at else {"PAYMENTS_KILL": place.name}
        return lives[number].spawn(**armed).wait(30), lives[number].spawn(EVERSTEP_CRASH_AT=again).wait(30)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(both, range(len(pairs))))
    assert {first for first, _ in ends} == {-signal.SIGKILL}
    killed = [again == -signal.SIGKILL for _, again in ends]
    assert sum(killed) >= len(pairs) // 2, "a run that is held at once passes fewer places"
    assert spawn(tmp_path / "again.json", [life.plan for life in lives]).wait(100) == 0, (
        tmp_path / "again.txt"
    ).read_text()[-3000:]
    problems = []
    for life, (place, again), was_killed in zip(lives, pairs, killed, strict=True):
        applied, status = life.applied(), life.status()
        allowed = {(1, "completed")} | ({(0, "held"), (1, "held")} if contract == "once" else set())
        found = violations(life)
        if (applied, status) not in allowed or found:
            problems.append(f"{place.name}, then {again}: applied {applied}, {status}, {found}, {life.kinds()}")
        if was_killed:
            note_again(effects_table, contract, again, applied)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("point", ["probe.before:1", "probe.after:1"])
@pytest.mark.parametrize("place", ["in the body, before the effect", "in the body, after the effect"])
def test_killed_once_more_around_the_probe_it_is_asked_again(
    tmp_path: Path, ledger: Ledger, place: str, point: str
) -> None:
    life = Life(tmp_path / "life", ledger, "once, probed")
    assert life.spawn(PAYMENTS_KILL=place).wait(30) == -signal.SIGKILL
    assert life.spawn(EVERSTEP_CRASH_AT=point).wait(30) == -signal.SIGKILL
    assert life.spawn().wait(30) == 0
    assert (life.applied(), life.status()) == (1, "completed")
    assert life.kinds().count("step_doubted") == 1


@pytest.mark.parametrize("contract", ["once", "once, probed"])
def test_a_stopped_worker_may_still_act_so_nobody_else_does(tmp_path: Path, ledger: Ledger, contract: str) -> None:
    """It is stopped before it sends. Its probe truthfully says NotDone, and it sends when it is woken."""
    life = Life(tmp_path / "life", ledger, contract, lease=1)
    stopped = life.spawn(PAYMENTS_KILL="stop")
    try:
        wait_until_stopped(stopped.pid)
        while is_locked(life.folder / "runs.db"):  # it was renewing its lease just then: it begins anew
            stopped.kill()
            stopped.wait()
            shutil.rmtree(life.folder)
            life.folder.mkdir()
            stopped = life.spawn(PAYMENTS_KILL="stop")
            wait_until_stopped(stopped.pid)
        assert life.applied() == 0
        assert life.spawn().wait(30) == 0, "another process takes the run over when the lease has lapsed"
        assert (life.applied(), life.status()) == (0, "held")
        store = life.store()
        (hold,) = store.holds(run="p")
        store.close()
        assert hold.reason == "in-doubt"
        if contract == "once, probed":
            assert f"pid {stopped.pid}" in hold.summary, "it says where the first may still run"
        os.kill(stopped.pid, signal.SIGCONT)
        wait_until(lambda: life.applied() != 0)
        assert stopped.wait(30) == 0
    finally:
        stopped.kill()
        stopped.wait()
    assert life.applied() == 1, "the zombie's effect, and no other"
    assert "step_completed" not in life.kinds(), "the zombie's outcome is fenced off"
    if contract == "once, probed":
        (life.folder / "again.py").write_text(RESOLVE)
        resolved = forked.run(
            [sys.executable, str(life.folder / "again.py"), str(life.folder / "plan.json")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PAYMENTS.parent), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
        )
        assert resolved.returncode == 0, resolved.stderr
        assert (life.applied(), life.status()) == (1, "completed")
        assert completed(life).adopted


RESOLVE = """
import asyncio, json, sys
import everstep, payments

async def main():
    (life,) = json.load(open(sys.argv[1]))
    async with everstep.open(life["folder"] + "/runs.db") as app:
        payments.LIFE.update(life)
        await app.resolve("p", "probe")
        await app.get("p").result(timeout=60)
    await payments.live(life)

asyncio.run(main())
"""


def completed(life: Life) -> Any:
    store = life.store()
    try:
        (one,) = [event for event in store.events("p", 1) if event.kind == "step_completed"]
        return decode_body(one.kind, one.body)
    finally:
        store.close()


def wait_until_stopped(pid: int) -> None:
    wait_until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text(), "it was not stopped")
