"""What the crash tests share: one ledger, and what undisturbed runs give."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, Mode
from tests.crash.nursery import Nursery
from tests.crash.trial import Expected, Trial

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
        ledger.behave("slow_look", Mode(delay=READ_SECONDS))
        ledger.behave("quick_look", Mode(delay=0.01))
        yield ledger


@pytest.fixture(scope="session")
def undisturbed(place: Path, ledger: Ledger) -> Expected:
    return Expected.of(Trial.new(place, ledger))


@pytest.fixture(scope="session")
def spending(place: Path, ledger: Ledger) -> dict[str, Trial]:
    """Trees of runs that used up their budgets undisturbed, by what they do then."""
    trials = {then: Trial.new(place, ledger, "budget", count) for count, then in enumerate(THENS)}
    for trial in trials.values():
        assert trial.run() == 0, trial.output()
    return trials


@pytest.fixture(scope="session")
def nursery(place: Path) -> Iterator[Nursery]:
    nursery = Nursery(place)
    yield nursery
    nursery.close()
