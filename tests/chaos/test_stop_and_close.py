"""Whatever acts is stopped, closed and opened again, while clocks jump, threads are refused and statements cancelled.

The till, which knows nothing of the engine, has each effect once; every run ends, or a person is asked about it. What a
seed stands for is in `nemesis.py`; a failure says how to repeat it.
"""

import asyncio
import os
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import DAY, STORES, Outcome, Plan, many_trials, one_trial, plan_of
from tests.chaos.stage import DEADLINE_SECONDS, Nursery, by_kind
from tests.chaos.stopping import KINDS
from tests.crash.figures import FIGURES

PUSH_BASE = 20_000
PUSH_TRIALS = 150
SOAK_TRIALS = 2000
LEAST = {"stops": 25, "closes": 50, "clock jumps": 60, "threads refused": 20, "statements cancelled": 15, "holds": 10}
"""How often each fault must really have happened in `PUSH_TRIALS` trials."""
MUTANT_SECONDS = 10.0
"""How long is waited for what a planted bug keeps from happening."""


def judge(store: str, base: int, count: int) -> None:
    """Do trials, say what was done, and fail if anything is lost, doubled, stuck, robbed or held without a reason."""
    outcomes = asyncio.run(many_trials((plan_of(store, base + number) for number in range(count)), together=6))
    fired = sum((one.fired for one in outcomes), Counter[str]())
    orders, completed = sum(len(one.plan.orders) for one in outcomes), sum(one.completed for one in outcomes)
    failed = [one for one in outcomes if one.problems]
    kinds = Counter(kind for one in failed for kind in by_kind(one.problems))
    told = " · ".join(f"{name} {fired[name]}" for name in LEAST)
    line = f"stop and close on {store}: trials {count} · runs {orders} completed {completed} · {told}"
    FIGURES.trials += count
    FIGURES.lost += kinds["lost"]
    FIGURES.doubled += kinds["doubled"]
    FIGURES.lines.append(f"{line} · failed {len(failed)}")
    assert not failed, report(failed, kinds)
    assert completed == orders
    assert 3 * sum(one.unaided for one in outcomes) >= orders, "a third of the runs need no person"
    few = {name: fired[name] for name, least in LEAST.items() if fired[name] < least * count / PUSH_TRIALS}
    few |= {kind: fired[f"closed over {kind}"] for kind in KINDS if fired[f"closed over {kind}"] < count / 50}
    assert not few, f"too few of these happened: {few}"


def report(failed: list[Outcome], kinds: Counter[str]) -> str:
    """Return what failed: all seeds by kind, and of each kind one trial with everything that was done in it."""
    lines = [f"{len(failed)} trials failed: {dict(kinds)}"]
    shown: list[Outcome] = []
    for kind in kinds:
        of_kind = [one for one in failed if kind in by_kind(one.problems)]
        lines.append(f"{kind}: seeds {[one.plan.seed for one in of_kind]}")
        shown += [of_kind[0]] if of_kind[0] not in shown else []
    return "\n\n".join(["\n".join(lines), *(one.told() for one in shown)])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", STORES)
def test_nothing_is_lost_or_doubled_whatever_is_stopped_and_closed(store: str) -> None:
    judge(store, PUSH_BASE, PUSH_TRIALS)


@pytest.mark.soak
@pytest.mark.parametrize("store", STORES)
def test_nothing_is_lost_or_doubled_in_thousands_of_trials_that_were_never_made_before(store: str) -> None:
    base = int(os.environ.get("STOPPING_BASE") or random.SystemRandom().randrange(10**6, 10**9))
    print(f"STOPPING_BASE={base}")
    judge(store, base, SOAK_TRIALS)


# -- the judge --------------------------------------------------------------------------------------------------------
CLOSED = [("close",), ("successor",)]
CASES: dict[str, tuple[str, list[str], list[Any], float]] = {
    "believe_that_all_has_ended": ("doubled", ["to_thread_once", "pool_once"], CLOSED, 0.0),
    "forget_that_it_is_once": ("doubled", ["to_thread_once"], CLOSED, 0.0),
    "see_nobody_alive": ("robbed", ["task_repeat"], [("successor",)], DAY),
    "acknowledge_no_start": ("lost", ["task_repeat"], [], 0.0),
    "acknowledge_no_signal": ("lost", ["task_repeat"], [], 0.0),
    "do_nothing": ("lost", ["task_repeat"], [], 0.0),
    "never_close": ("hang", ["task_repeat"], [("close",)], 0.0),
    "end_runs_when_closing": ("ended", ["task_repeat"], CLOSED, 0.0),
    "hold_runs_when_closing": ("hold", ["task_repeat"], CLOSED, 0.0),
    "take_up_nothing": ("stuck", ["task_repeat"], CLOSED, 0.0),
}
"""By planted bug: what it is found as, the bodies, what is done to them, and how far the second clock is ahead."""
OVERLAPPING = {mutant for mutant, (kind, *_) in CASES.items() if kind in ("doubled", "robbed")}
"""Those by which a body is begun beside another. That is waited for."""
ONLY_SQLITE = {"see_nobody_alive"}


def planned(store: str, orders: list[str], moves: list[Any], ahead: float, *, patience: float) -> Plan:
    """Return a trial that was planned by hand."""
    done = [(*move, 0.0) for move in moves]
    return Plan(store, 0, "async", orders, {"first": 0.0, "second": ahead}, [], done, patience, closes_in_the_end=True)


@cache
def trials_of(store: str, *, planted: bool) -> dict[str, Outcome]:
    """Do the trial of each case, all at the same time: with its bug, or with none."""

    async def all_of_them() -> list[Outcome]:
        nursery = Nursery()
        deadline = MUTANT_SECONDS if planted else DEADLINE_SECONDS
        patience = {mutant: deadline if planted and mutant in OVERLAPPING else 1.0 for mutant in CASES}
        plans = {mutant: planned(store, *case[1:], patience=patience[mutant]) for mutant, case in CASES.items()}
        trials = [
            one_trial(plan, nursery, mutant=mutant if planted else "", deadline=deadline)
            for mutant, plan in plans.items()
        ]
        try:
            return list(await asyncio.gather(*trials))
        finally:
            nursery.close()

    return dict(zip(CASES, asyncio.run(all_of_them()), strict=True))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_bug_that_was_planted_is_found_as_what_it_is(store: str, mutant: str) -> None:
    if mutant in ONLY_SQLITE and store != "sqlite":
        pytest.skip("locks of files are SQLite's")
    found = trials_of(store, planted=True)[mutant]
    assert CASES[mutant][0] in by_kind(found.problems), found.told()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_nothing_is_found_where_no_bug_was_planted(store: str, mutant: str) -> None:
    found = trials_of(store, planted=False)[mutant]
    assert not found.problems, found.told()
