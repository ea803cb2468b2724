"""What the crash tests share: one ledger, and what undisturbed runs give."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, Mode
from tests.crash.nursery import Nursery
from tests.crash.trial import Expected, Trial

READ_SECONDS = 0.2


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="session")
def ledger(place: Path) -> Iterator[Ledger]:
    with Ledger.start(place / "ledger") as ledger:
        ledger.behave("charge", Mode(loses=1, fails=1))
        ledger.behave("remit", Mode(loses=1, honours_keys=False))
        for effect in ("take_seat", "free_seat"):
            ledger.behave(effect, Mode(loses=1))
        for effect in ("pay", "refund"):
            ledger.behave(effect, Mode(loses=1, honours_keys=False))
        ledger.behave("slow_look", Mode(delay=READ_SECONDS))
        ledger.behave("quick_look", Mode(delay=0.01))
        yield ledger


@pytest.fixture(scope="session")
def undisturbed(place: Path, ledger: Ledger) -> Expected:
    return Expected.of(Trial.new(place, ledger))


@pytest.fixture(scope="session")
def undone(place: Path, ledger: Ledger) -> Expected:
    """What is left of two runs that were undone, undisturbed."""
    return Expected.of(Trial.new(place, ledger, "saga"), trip_1="failed", trip_2="cancelled")


@pytest.fixture(scope="session")
def nursery(place: Path) -> Iterator[Nursery]:
    nursery = Nursery(place)
    yield nursery
    nursery.close()
