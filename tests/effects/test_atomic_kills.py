"""Real processes, killed and stopped around the transaction of an atomic step: one row in the end, at every place."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.figures import note_again
from tests.effects.shops import store_rows
from tests.effects.test_once_kills import PLACES as AROUND
from tests.effects.test_once_kills import Place
from tests.effects.tills import (
    TillLife,
    finish,
    kill,
    kill_twice,
    problems_of,
    problems_of_two,
    prove_that_what_was_given_up_cannot_happen,
    prove_that_whoever_takes_over_waits,
    stopped,
)
from tests.waiting import is_locked

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


class Life(TillLife):
    """A store, and a shop in it or beside it."""

    def __init__(self, folder: Path, contract: str, **more: Any) -> None:
        folder.mkdir(parents=True)
        super().__init__(TILL, folder, contract, str(folder / "runs.db"), **more)
        self.shop = folder / ("runs.db" if "store" in contract else "shop.db")

    def locks(self, place: str) -> bool:
        return "store" in self.plan["contract"] and place in LOCKED

    def is_locked(self) -> bool:
        return is_locked(self.folder / "runs.db")

    def applied(self) -> int:
        return len(store_rows(self.shop)) if self.shop.exists() and self.shop.stat().st_size else 0


def test_killed_around_its_transaction_an_atomic_step_happens_once(
    tmp_path: Path, effects_table: dict[tuple[str, str], str]
) -> None:
    cases = [(contract, place) for contract in CONTRACTS for place in PLACES]
    lives = [Life(tmp_path / f"{n:02}", contract) for n, (contract, _) in enumerate(cases)]
    kill(lives, [place for _, place in cases])
    for life, (_, place) in zip(lives, cases, strict=True):
        kinds = life.kinds()
        assert ("step_started" in kinds) == place.begun, (place, kinds)
        assert life.applied() == place.applied, place
        assert ("step_completed" in kinds) == place.settled, (place, kinds)
    finish(tmp_path, lives)

    problems = []
    for life, (contract, place) in zip(lives, cases, strict=True):
        effects_table[contract, place.name] = f"{life.applied()} {next(iter(life.statuses()))}"
        problems += problems_of(life, place)
    assert not problems, "\n".join(problems)


FIRST = [place for place in PLACES if place.name in (IN_THE_BODY, "the transaction is committed", "before the body")]
AGAIN = [
    *(Place(name, at, True, 0) for name, at in (("claimed", "run.claimed:1"), ("begun again", "attempt.again:1"))),
    *(place for place in PLACES if place.begun and not place.settled),
]


@pytest.mark.parametrize("contract", ["atomic", "atomic, store"])
def test_killed_again_during_recovery_it_still_happens_once(
    tmp_path: Path, effects_table: dict[tuple[str, str], str], contract: str
) -> None:
    pairs = [(first, again) for first in FIRST for again in AGAIN][:: 1 if contract == "atomic" else 3]
    lives = [Life(tmp_path / f"{n:02}", contract) for n in range(len(pairs))]

    came = kill_twice(lives, pairs)
    finish(tmp_path, lives)
    for life, (_, again), came_there in zip(lives, pairs, came, strict=True):
        if came_there:
            note_again(effects_table, contract, again.at or again.name, life.applied())
    problems = [problem for life, pair in zip(lives, pairs, strict=True) for problem in problems_of_two(life, *pair)]
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
LOCKED = ["in the body, before the effect", IN_THE_BODY, "transaction.written"]
FREE = ["transaction.before", "transaction.after", "body.before", "body.after"]


@pytest.mark.parametrize("woken", [True, False], ids=["woken", "killed"])
@pytest.mark.parametrize("place", LOCKED)
def test_stopped_inside_its_transaction_whoever_takes_over_waits_for_it(
    tmp_path: Path, place: str, woken: bool
) -> None:
    prove_that_whoever_takes_over_waits(Life(tmp_path / "life", "atomic", lease=1), place, woken=woken)


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
    prove_that_what_was_given_up_cannot_happen(Life(tmp_path / "life", "atomic", lease=1))


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
