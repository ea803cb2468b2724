"""The pytest plugin: fixtures for durable programs, and the marker `crash_everywhere`. pytest loads it automatically.

The engine is not imported before a test needs it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from everstep.errors import Misuse

if TYPE_CHECKING:  # start-up: pytest loads this plugin in every run, and not the engine
    from everstep.testing.clock import FakeClock
    from everstep.testing.ledger import Ledger
    from everstep.testing.skipping import SkippingApp

MARKER = (
    "crash_everywhere(*arguments, workflow=…, **options): before the test, kill a run of it at every boundary "
    "there is, with everstep.testing.crash_everywhere. The test can ask for `everstep_crash_report`."
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def everstep_clock() -> "FakeClock":
    """The clock of `everstep_app`: it stands still until it is told to move, or a result is waited for."""
    from everstep.testing.clock import FakeClock  # start-up: see above

    return FakeClock()


@pytest.fixture
def everstep_app(everstep_clock: "FakeClock") -> "Iterator[SkippingApp]":
    """An app with a store in memory, for `def` tests. Waiting for a result skips the time that runs would wait."""
    from everstep.testing.skipping import skipping_app  # start-up: see above

    with skipping_app(clock=everstep_clock) as app:
        yield app


@pytest.fixture
def everstep_store(tmp_path: Path) -> str:
    """The URL of a SQLite store in the test's own folder, for `everstep.open(everstep_store)`."""
    return f"sqlite:///{tmp_path / 'everstep.db'}"


@pytest.fixture
def everstep_ledger(tmp_path: Path) -> "Iterator[Ledger]":
    """A ledger in a process of its own: the outside world, which knows what was really asked for and done."""
    from everstep.testing.ledger import Ledger  # start-up: see above

    with Ledger.start(tmp_path / "ledger") as ledger:
        yield ledger


@pytest.fixture
def everstep_crash_report(request: pytest.FixtureRequest) -> Any:
    """The report of the crash test of a test's `crash_everywhere` marker."""
    report = getattr(request.node, "_everstep_crash_report", None)
    if report is None:
        pytest.fail("everstep_crash_report is for tests with @pytest.mark.crash_everywhere(workflow=…).")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run the crash test of a marked test. A broken promise fails the test."""
    marker = item.get_closest_marker("crash_everywhere")
    if marker is None:
        return
    options = dict(marker.kwargs)
    workflow = options.pop("workflow", None)
    if workflow is None:  # pytest would apply a marker with a function as its only argument to that function
        pytest.fail("Say which workflow: @pytest.mark.crash_everywhere(workflow=…).", pytrace=False)
    from everstep.testing.crashtest import crash_everywhere  # start-up: see above

    try:
        report = crash_everywhere(workflow, *marker.args, **options)
    except Misuse as mistake:  # nothing was tested, so the test does not pass
        pytest.fail(f"The crash test could not be done: {mistake}", pytrace=False)
    item._everstep_crash_report = report  # type: ignore[attr-defined]
    if not report.holds:
        pytest.fail(report.text(), pytrace=False)
