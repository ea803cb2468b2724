"""Real processes, killed and stopped around a transaction in PostgreSQL: one row in the end, at every place."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.figures import FIGURES, note_again
from tests.effects.test_atomic_kills import AGAIN, FIRST, IN_THE_BODY, INSIDE, PLACES
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
from tests.postgres.server import Server
from tests.postgres.shops import Shop
from tests.postgres.ways import WAYS

TILL = Path(__file__).with_name("till.py")


class Life(TillLife):
    """A store, and a shop in a schema of its own."""

    def __init__(self, folder: Path, server: Server, contract: str, **more: Any) -> None:
        folder.mkdir(parents=True)
        self.shop = Shop(server, server.fresh_schema())
        store = self.shop.store_url() if WAYS[contract].in_store else str(folder / "runs.db")
        super().__init__(TILL, folder, contract, store, shop=self.shop.url(), **more)

    def applied(self) -> int:
        return len(self.shop.sales())


SOME = [place for place in PLACES if place in INSIDE or place.name == IN_THE_BODY]
CASES = [
    *(("psycopg", place) for place in PLACES),
    *(("store", place) for place in PLACES if place in SOME or place.settled),
    *((way, place) for way in ("psycopg, async", "engine", "session, async") for place in SOME[::2]),
]


def test_killed_around_its_transaction_an_atomic_step_happens_once(tmp_path: Path, server: Server) -> None:
    lives = [Life(tmp_path / f"{n:02}", server, contract) for n, (contract, _) in enumerate(CASES)]
    kill(lives, [place for _, place in CASES])
    for life, (contract, place) in zip(lives, CASES, strict=True):
        assert life.applied() == place.applied, (contract, place)
    finish(tmp_path, lives)
    problems = []
    for life, (contract, place) in zip(lives, CASES, strict=True):
        FIGURES.effects[f"{contract} (PG)", place.name] = f"{life.applied()} {next(iter(life.statuses()))}"
        problems += problems_of(life, place)
        life.shop.drop()
    assert not problems, "\n".join(problems)


def test_killed_again_during_recovery_it_still_happens_once(tmp_path: Path, server: Server) -> None:
    every = [(first, again) for first in FIRST for again in AGAIN]
    pairs = [*(("psycopg", *pair) for pair in every[::6]), *(("store", *pair) for pair in every[2::15])]
    lives = [Life(tmp_path / f"{n:02}", server, contract) for n, (contract, _, _) in enumerate(pairs)]

    came = kill_twice(lives, [pair for _, *pair in pairs])
    finish(tmp_path, lives)
    problems = []
    for life, (contract, first, again), came_there in zip(lives, pairs, came, strict=True):
        if came_there:
            note_again(FIGURES.effects, f"{contract} (PG)", again.at or again.name, life.applied())
        problems += problems_of_two(life, first, again)
    for life in lives:
        life.shop.drop()
    assert not problems, "\n".join(problems)


# -- stopped -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def life(tmp_path: Path, server: Server) -> Iterator[Life]:
    made = Life(tmp_path / "life", server, "psycopg", lease=1)
    yield made
    made.shop.drop()


@pytest.mark.parametrize("woken", [True, False], ids=["woken", "killed"])
def test_stopped_inside_its_transaction_whoever_takes_over_waits_for_it(life: Life, woken: bool) -> None:
    prove_that_whoever_takes_over_waits(life, "transaction.written", woken=woken)


def test_stopped_before_a_transaction_that_another_process_gave_up_it_cannot_do_it_any_more(life: Life) -> None:
    prove_that_what_was_given_up_cannot_happen(life)


def test_two_processes_with_the_same_step_at_once_do_it_once(life: Life) -> None:
    """The second one finds the first one's lease lapsed, although it is only slow."""
    with stopped(life, "in the body, before the effect") as first:
        others = [life.spawn() for _ in range(2)]
        time.sleep(1.5)
        os.kill(first.pid, signal.SIGCONT)
        assert [process.wait(30) for process in (first, *others)] == [0, 0, 0]
    assert (life.applied(), life.statuses()) == (1, {"completed"})
    assert not life.violations()
