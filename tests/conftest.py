"""What all tests share: how they run, and the last line of a test run, which says what was broken on purpose."""

import asyncio
import inspect
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

from everstep.engine.code.workflow import DECLARED, Workflow
from tests.crash.figures import FIGURES, Figures
from tests.engine.resume_helpers import Machine
from tests.memory import memory_folder
from tests.worlds.ledger import clear_ledger

TESTS = str(Path(__file__).parent)
EVERYTHING: dict[str, dict[str, Workflow]] = {}
"""All workflows that any test has declared, by name and file."""
BUSY = (
    *("test_system_calls.py", "test_crash_points.py", "crash/test_checkpoints.py", "test_differential.py"),
    *("crash/test_budget.py", "crash/test_sagas.py", "crash/test_notifications.py", "test_fleet.py", "test_carried.py"),
    *("crash/test_forks.py", "tests/crash/", "tests/crashtest/", "test_pasting.py", "test_snippets.py"),
    *("test_sweep.py", "test_files.py", "test_typing.py", "test_plugin.py", "test_desync.py", "tests/house/"),
    *("test_checkpoints_property.py", "test_recovery.py", "test_conformance.py", "test_langgraph_graphs.py"),
)
WAITING = (
    *("test_stop_and_close.py", "test_chaos.py", "test_clocks_apart.py", "test_failover.py", "test_hosts.py"),
    *("test_liveness.py", "test_sqlstates.py", "test_stumbling.py", "test_still_acting.py", "test_schedule_kills.py"),
    *("test_atomic_kills.py", "notify/test_notifications.py", "test_signals_to_processes.py", "test_background.py"),
    *("test_clocks.py", "test_clock.py", "test_moving.py", "test_worker_processes.py", "tests/postgres/"),
    *(
        "test_file_fences.py",
        "tests/chaos/",
        "_kills.py",
        "test_demo.py",
        "test_restored.py",
        "test_langgraph_example.py",
    ),
)
LONG = [word for pair in zip_longest(BUSY, WAITING) for word in pair if word is not None]
"""The files that take long, those that take longest first: those that keep a core busy and those that mostly wait for
something, in turn, so that no core is ever without work."""
TRIALS: Counter[str] = Counter()
"""How often each test function broke something on purpose; or how many cases of it there are."""
TRIALS_FILE = Path(TESTS).parent / "build" / "trials.json"
"""What `docs/make_trials.py` puts into the page of guarantees."""
SEEN_BY: list[pytest.Module | None] = [None]
"""The module whose tests are run."""

# A push is judged by the same examples everywhere, and nothing is traced: explaining a failure would make every example
# several times slower on Pythons before 3.12. `--hypothesis-profile=search` looks for new examples instead.
settings.register_profile("push", deadline=None, derandomize=True, phases=set(Phase) - {Phase.explain})
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("push")


def pytest_configure() -> None:
    """Keep the folders of tests in memory, unless a person has said where they belong; and let Ctrl-C be heard.

    What a shell starts in the background ignores it, and so would the programs that tests start and interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (folder := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no process is left with one of them when the others are done."""
    items.sort(key=lambda item: next((n for n, word in enumerate(LONG) if word in item.nodeid), len(LONG)))


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
    for told in FIGURES.lines:
        terminalreporter.write_line(told)
    if TRIALS:
        known = json.loads(TRIALS_FILE.read_text()) if TRIALS_FILE.exists() else {}
        TRIALS_FILE.parent.mkdir(exist_ok=True)
        TRIALS_FILE.write_text(json.dumps({**known, **TRIALS}, indent=0, sort_keys=True))
    line = FIGURES.line()
    if line:
        healthy = not (FIGURES.lost or FIGURES.doubled)
        config.add_cleanup(lambda: terminalreporter.write_line(line, green=healthy, red=not healthy))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count what a test breaks."""
    before = FIGURES.trials + FIGURES.losses
    yield
    item.user_properties.append(("trials", FIGURES.trials + FIGURES.losses - before))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of each kind that several processes can use, which is not there yet."""
    if request.param == "sqlite":
        yield str(tmp_path / "runs.db")
        return
    from tests.postgres.server import server  # a run of tests without PostgreSQL does not need its driver

    schema = server().fresh_schema()
    yield server().url(schema)
    server().drop(schema)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One file, one clock, and the apps on it, which are stopped when the test has ended."""
    return Machine(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def test_…` on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run_test() -> None:
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            for machine in arguments.values():
                if isinstance(machine, Machine):
                    await machine.shut()

    asyncio.run(run_test())
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the count of a test that has passed, also from another process."""
    if report.when == "call" and report.passed:
        TRIALS[report.nodeid.partition("[")[0]] += dict(report.user_properties).get("trials") or 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test finds nothing in the ledger; a module of tests sees no workflows of others.

    Two modules may use one name for a workflow, whichever process runs both.
    """
    clear_ledger()
    module = item.getparent(pytest.Module)
    if module is None or SEEN_BY[-1] is module:
        return
    SEEN_BY[-1] = module
    for name, found in DECLARED._by_name.items():
        EVERYTHING.setdefault(name, {}).update(found)
    mine = files_behind(module.obj)
    conftest = sys.modules.get(f"{module.obj.__package__}.conftest")
    mine |= files_behind(conftest) if conftest is not None else set()
    DECLARED._by_name = {
        name: {file: one for file, one in found.items() if file in mine or not file.startswith(TESTS)}
        for name, found in EVERYTHING.items()
    }


def files_behind(module: ModuleType) -> set[str]:
    """Return the files of a module and of all modules of the tests that it imports from."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        file = getattr(one, "__file__", None) or ""
        if file in seen or not file.startswith(TESTS):
            continue
        seen.add(file)
        for value in list(vars(one).values()):
            source = value.function if isinstance(value, Workflow) else value
            name = value.__name__ if isinstance(value, ModuleType) else str(getattr(source, "__module__", ""))
            if name in sys.modules:
                waiting.append(sys.modules[name])
    return seen
