"""What the tests of effects share: a ledger, and the table of what each contract did at each point of a kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, Mode
from tests.crash.figures import FIGURES


@pytest.fixture(scope="session")
def effects_table() -> dict[tuple[str, str], str]:
    """What happened, by contract and by the place where the process was killed."""
    return FIGURES.effects


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A receiver that forgets its keys: whatever is sent twice is applied twice, and seen."""
    folder: Path = tmp_path_factory.mktemp("effects")
    with Ledger.start(folder / "ledger") as ledger:
        for effect in ("pay_repeat", "pay_once", "pay_probed"):
            ledger.behave(effect, Mode(honours_keys=False))
        yield ledger
