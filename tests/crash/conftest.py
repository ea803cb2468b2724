"""What the crash tests share: one ledger, and what undisturbed runs give."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, Mode
from tests.crash.hooks import Hooks
from tests.crash.nursery import KILLED, Nursery
from tests.crash.trial import Expected, Trial
from tests.graphs.kit import points_passed as graph_points_passed
from tests.schedules.passing import points_passed

READ_SECONDS = 0.2
THENS = ("fallback", "fail", "hold")
"""What the budgets of the workload do when they are used up, in the order of its numbers for them."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="session")
def ledger(place: Path) -> Iterator[Ledger]:
    with Ledger.start(place / "ledger") as ledger:
        ledger.behave("charge", Mode(loses=1, fails=1))
        ledger.behave("remit", Mode(loses=1, honours_keys=False))
        ledger.behave("reserve", Mode(delay=0.04))
        for effect in ("take_seat", "free_seat"):
            ledger.behave(effect, Mode(loses=1))
        for effect in ("pay", "refund"):
            ledger.behave(effect, Mode(loses=1, honours_keys=False))
        ledger.behave("slow_look", Mode(delay=READ_SECONDS))
        ledger.behave("quick_look", Mode(delay=0.01))
        yield ledger


@pytest.fixture(scope="session")
def undisturbed(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    return Expected.of(Trial.new(place, ledger, nursery=nursery))


@pytest.fixture(scope="session")
def hooks(place: Path) -> Iterator[Hooks]:
    with Hooks.start(place / "hooks") as hooks:
        yield hooks


@pytest.fixture(scope="session")
def notified(place: Path, ledger: Ledger, hooks: Hooks, nursery: Nursery) -> Expected:
    return Expected.of(hooks.trial(place, ledger, nursery))


@pytest.fixture(scope="session")
def looping(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """A loop with checkpoints."""
    return Expected.of(Trial.new(place, ledger, "loop", nursery=nursery))


@pytest.fixture(scope="session")
def continued(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """A run that goes on with a fresh history, twice."""
    return Expected.of(Trial.new(place, ledger, "continued", nursery=nursery))


@pytest.fixture(scope="session")
def mending(place: Path, ledger: Ledger, nursery: Nursery, looping: Expected) -> "Counter[str]":
    """The points that a recovery passes which finds its newest checkpoint damaged."""
    trial = Trial.new(place, ledger, "loop", nursery=nursery)
    assert trial.run(at="checkpoint.recorded:6") == KILLED, trial.output()
    trial.damages = 1
    trial.run_to_the_end()
    passed = trial.passed()
    problems = trial.finish(looping)
    assert not problems, "\n".join(problems)
    return passed


@pytest.fixture(scope="session")
def undone(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """What is left of two runs that were undone, undisturbed."""
    return Expected.of(Trial.new(place, ledger, "saga", nursery=nursery), trip_1="failed", trip_2="cancelled")


@pytest.fixture(scope="session")
def carried(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """What is left of two runs that were undone after they had gone on with a fresh history, undisturbed."""
    return Expected.of(Trial.new(place, ledger, "carrying", nursery=nursery), far_1="failed", far_2="cancelled")


@pytest.fixture(scope="session")
def forked(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """A run, its fork, and that one's."""
    return Expected.of(Trial.new(place, ledger, "forking", nursery=nursery))


@pytest.fixture(scope="session")
def spending(place: Path, ledger: Ledger, nursery: Nursery) -> dict[str, Trial]:
    """Trees of runs that used up their budgets undisturbed, by what they do then."""
    trials = {then: Trial.new(place, ledger, "budget", count, nursery) for count, then in enumerate(THENS)}
    for trial in trials.values():
        assert trial.run() == 0, trial.output()
    return trials


@pytest.fixture(scope="session")
def exchanged(place: Path, ledger: Ledger, nursery: Nursery) -> Expected:
    """A run that is asked, and that writes a stream."""
    return Expected.of(Trial.new(place, ledger, "exchange", nursery=nursery))


@pytest.fixture(scope="session")
def scheduling(place: Path) -> "Counter[str]":
    """The points that a schedule passes, and whoever starts a run in a transaction of their own."""
    return points_passed(place / "scheduling")


@pytest.fixture(scope="session")
def moving(place: Path) -> "Counter[str]":
    """The points that a graph passes."""
    return graph_points_passed(place / "moving")


@pytest.fixture(scope="session")
def nursery(place: Path) -> Iterator[Nursery]:
    nursery = Nursery(place)
    yield nursery
    nursery.close()
