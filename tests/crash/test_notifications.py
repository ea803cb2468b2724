"""The process is killed at every point between a hold and the acknowledgement of its notification."""

from pathlib import Path

import pytest

from everstep.model.crash_points import POINTS
from everstep.stores.sqlite import SqliteStore
from everstep.testing.ledger import Ledger
from tests.crash.figures import FIGURES
from tests.crash.hooks import Hooks
from tests.crash.nursery import Nursery
from tests.crash.test_crash_points import PASSES, cases, kill_at
from tests.crash.trial import Expected, Trial, all_of, told


def untold(trial: Trial, hooks: Hooks) -> list[str]:
    """Return what is wrong with who was told: each hold must have arrived, and nothing else."""
    store = SqliteStore(trial.folder / "store.db", create=False)
    try:
        holds = {hold.id for hold in store.holds(open_only=False)}
        states = {note.hold: note.state for note in store.notifications(undelivered_only=False)}
    finally:
        store.close()
    problems = []
    if not holds:
        problems.append("nothing was held")
    if set(states) != holds or set(states.values()) != {"sent"}:
        problems.append(f"the holds are {holds}, the notifications {states}")
    arrived = {message["id"] for message in hooks.arrived(trial)}
    if arrived != holds:
        problems.append(f"the holds are {holds}, and told were {arrived}")
    return [f"{trial.folder.name} ({', '.join(trial.faults)}): {problem}" for problem in problems]


@pytest.mark.parametrize("most", [PASSES, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_hold_is_told_of_whenever_its_process_is_killed(
    place: Path, ledger: Ledger, hooks: Hooks, nursery: Nursery, notified: Expected, most: int
) -> None:
    def one(case: tuple[str, int]) -> list[str]:
        trial = hooks.trial(place, ledger, nursery)
        if not kill_at(trial, *case) and case[1] == 1:
            return [f"{case[0]} did not fire"]
        trial.run_to_the_end()
        return [*untold(trial, hooks), *trial.finish(notified)]

    FIGURES.points = POINTS
    problems = all_of(one, cases(notified.points, most))
    assert not problems, told(problems)
