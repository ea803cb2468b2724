"""What the tests of effects share: a ledger, and the table of what each contract did at each point of a kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.testing.ledger import Ledger, Mode

TABLE: dict[tuple[str, str], str] = {}
"""What happened, by contract and by the place where the process was killed."""


@pytest.fixture(scope="session")
def effects_table() -> dict[tuple[str, str], str]:
    return TABLE


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A receiver that forgets its keys: whatever is sent twice is applied twice, and seen."""
    folder: Path = tmp_path_factory.mktemp("effects")
    with Ledger.start(folder / "ledger") as ledger:
        for effect in ("pay_repeat", "pay_once", "pay_probed"):
            ledger.behave(effect, Mode(honours_keys=False))
        yield ledger


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how often the effect was applied, by contract and place of the kill."""
    if not TABLE:
        return
    contracts = list(dict.fromkeys(contract for contract, _ in TABLE))
    places = list(dict.fromkeys(place for _, place in TABLE))
    terminalreporter.section("effects")
    terminalreporter.write_line("killed" + " " * 40 + "".join(f"{contract:<24}" for contract in contracts))
    for place in places:
        cells = "".join(f"{TABLE.get((contract, place), '-'):<24}" for contract in contracts)
        terminalreporter.write_line(f"{place:<46}{cells}")
