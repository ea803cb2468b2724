"""A tree of runs with a budget is killed at every named point: what it really used is charged, and within the limit.

What was really used is the ledger's account: each request that it received cost 30 cents (at length: 55).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.model.events import decode_body
from everstep.testing.checker import RunHistory, check
from everstep.testing.ledger import Ledger
from tests.crash.conftest import THENS
from tests.crash.figures import FIGURES
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Trial, all_of, told
from tests.effects.spending import charged_in

LIMIT = 7.00
PRICES = {"consult": 0.30, "buy": 0.30, "consult_at_length": 0.55}
READS = ("consult", "consult_at_length")
ENDS = ("completed", "failed")
"""With `fail`, a child run fails that gets no answer."""
AT_ONCE = 14
"""So many estimates of 50 cents fit into the budget: no more steps are ever under way."""


def really_used(trial: Trial) -> float:
    requests = Counter(entry["effect"] for entry in trial.book.entries() if entry["kind"] == "request")
    return round(sum(PRICES[effect] * count for effect, count in requests.items()), 6)


def charged_by(histories: Sequence[RunHistory]) -> float:
    """Return what all histories have charged themselves, children for their own."""
    own = 0.0
    for history in histories:
        own += charged_in([event for event in history.events if event.kind != "child_ended"])[0]
    return round(own, 6)


def granted_in(histories: Sequence[RunHistory]) -> float:
    """Return what a person has granted."""
    resolved = [decode_body(e.kind, e.body) for one in histories for e in one.events if e.kind == "run_resolved"]
    return sum((one.granted.microdollars or 0) / 1_000_000 for one in resolved if one.granted is not None)


def judge(trial: Trial, histories: Sequence[RunHistory], *, is_over: bool) -> list[str]:
    problems = []
    used, charged = really_used(trial), charged_by(histories)
    if charged < used:
        problems.append(f"{used} dollars were used, and the histories have charged {charged}")
    limit = LIMIT + granted_in(histories)
    if used > limit + AT_ONCE * 0.05:  # what is beyond an estimate is only ever the nickel of `consult_at_length`
        problems.append(f"{used} dollars were used of {limit}")
    violations = check(histories, ledger=trial.book.entries(), settled=is_over, reads=READS)
    problems += [str(violation) for violation in violations]
    if is_over:
        problems += [f"{one.row.id} is {one.row.status}" for one in histories if one.row.status not in ENDS]
        root = charged_in(next(one for one in histories if one.row.id == "budget-1").events)[0]
        if round(root, 6) != charged:
            problems.append(f"the tree has charged {charged}, and its root says {root}")
    return [f"{trial.folder.name} ({', '.join(trial.faults)}): {problem}" for problem in problems]


@pytest.mark.parametrize("then", THENS)
def test_undisturbed_it_uses_what_it_has_and_no_more(spending: dict[str, Trial], then: str) -> None:
    trial = spending[then]
    histories = trial.histories()
    assert judge(trial, histories, is_over=True) == []
    used, results = really_used(trial), trial.results()["budget-1"][0]
    assert used == round(charged_by(histories) - 0.10, 6), "and ten cents by the code itself"
    assert (granted_in(histories) > 0) == (then == "hold")
    if then == "hold":
        assert used == round(24 * 0.30 + 0.55, 6), "everything was done in the end"
    else:
        assert LIMIT - 0.60 < used <= LIMIT
        assert {"fallback": "too dear", "fail": "BudgetExceeded"}[then] in str(results), "the budget did run out"


@pytest.mark.parametrize("then", THENS)
def test_killed_at_every_crash_point_all_that_was_used_is_charged(
    place: Path, ledger: Ledger, nursery: Nursery, spending: dict[str, Trial], then: str
) -> None:
    kill_everywhere(place, ledger, nursery, spending[then], most=PASSES if then == "fallback" else 1)


@pytest.mark.parametrize("then", THENS)
@pytest.mark.soak
def test_killed_at_every_pass_of_every_crash_point_all_that_was_used_is_charged(
    place: Path, ledger: Ledger, nursery: Nursery, spending: dict[str, Trial], then: str
) -> None:
    kill_everywhere(place, ledger, nursery, spending[then], most=1000)


def kill_everywhere(place: Path, ledger: Ledger, nursery: Nursery, undisturbed: Trial, most: int) -> None:
    killed: list[tuple[str, int]] = []

    def one(case: tuple[str, int]) -> list[str]:
        trial = Trial.new(place, ledger, "budget", undisturbed.count, nursery)
        problems: list[str] = []
        if kill_at(trial, *case):
            killed.append(case)
            problems = judge(trial, trial.histories(copied=True), is_over=False)
        trial.run_to_the_end()
        return problems + trial.problems + judge(trial, trial.histories(), is_over=True)

    FIGURES.points = POINTS
    passed = undisturbed.passed()
    problems = all_of(one, cases(passed, most))
    assert not problems, told(problems)
    missed = {name for name in passed if name.startswith("budget.")} - {name for name, _ in killed}
    assert not missed, f"not killed at {missed}"
    assert len(killed) >= len(passed) - 3, "almost everywhere"


def test_killed_twice_all_that_was_used_is_charged(
    place: Path, ledger: Ledger, nursery: Nursery, spending: dict[str, Trial]
) -> None:
    starts = ("budget.", "body.", "child.", "unit.", "outcome.")
    names = [name for name in spending["fallback"].passed() if name.startswith(starts)]

    def one(name: str) -> list[str]:
        trial = Trial.new(place, ledger, "budget", nursery=nursery)
        problems: list[str] = []
        for occurrence in (3, 1):
            kill_at(trial, name, occurrence)
            problems += judge(trial, trial.histories(copied=True), is_over=False)
        trial.run_to_the_end()
        return problems + trial.problems + judge(trial, trial.histories(), is_over=True)

    problems = all_of(one, sorted(names))
    assert not problems, told(problems)
