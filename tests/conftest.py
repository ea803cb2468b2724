"""What all tests share: the last line of a test run says what was broken on purpose."""

import pytest

from tests.crash.figures import FIGURES


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say at the very end how often the engine was killed, and what that lost or doubled, if the crash tests ran."""
    line = FIGURES.line()
    if line:
        healthy = not (FIGURES.lost or FIGURES.doubled)
        config.add_cleanup(lambda: terminalreporter.write_line(line, green=healthy, red=not healthy))
