"""What all tests share: the last line of a test run says what was broken on purpose."""

from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.crash.figures import FIGURES, Figures

# A push is judged by the same examples everywhere, and nothing is traced: explaining a failure would make every example
# several times slower on Pythons before 3.12. `--hypothesis-profile=search` looks for new examples instead.
settings.register_profile("push", deadline=None, derandomize=True, phases=set(Phase) - {Phase.explain})
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("push")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In one of several processes: tell the one that sums up what was done here."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = FIGURES.told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what another process did."""
    FIGURES.add(getattr(node, "workeroutput", {}).get("figures", Figures().told()))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say at the very end how often the engine was killed, and what that lost or doubled, if the crash tests ran."""
    if FIGURES.effects:
        terminalreporter.section("effects")
        for row in FIGURES.table():
            terminalreporter.write_line(row)
    line = FIGURES.line()
    if line:
        healthy = not (FIGURES.lost or FIGURES.doubled)
        config.add_cleanup(lambda: terminalreporter.write_line(line, green=healthy, red=not healthy))
