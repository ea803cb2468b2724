"""The pytest plugin, in a pytest of its own."""

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

from everstep.lint.linting import lint_file
from tests.house.sources import ROOT

PROGRAM = """\
import asyncio
import everstep
import pytest
from everstep import step, workflow

@workflow
async def reminder(days: int) -> str:
    begun = everstep.now()
    await asyncio.sleep(days * 86400)
    return f"after {(everstep.now() - begun).days} days"

@workflow
async def patient() -> str:
    try:
        return await everstep.receive("word", str, timeout=86400)
    except TimeoutError:
        return "nobody"

@workflow
async def for_ever() -> str:
    return await everstep.receive("word", str)
"""


def installed(folder: Path) -> Path:
    """Make what an installation leaves behind: so pytest finds the plugin by itself, as a user's does."""
    facts = folder / "everstep_as_installed-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: everstep-as-installed\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    lines = ["[pytest11]", *(f"{name} = {target}" for name, target in points.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def pytest_in(folder: Path, tests: str, *words: str) -> tuple[int, str]:
    """Run tests of a user's, with the plugin."""
    (folder / "test_mine.py").write_text(PROGRAM + textwrap.dedent(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", "--strict-markers", "--basetemp", str(folder / "base"), *words, "test_mine.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(installed(folder / "installed"))])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def test_everstep_app_skips_what_runs_only_wait_for(tmp_path: Path) -> None:
    status, out = pytest_in(
        tmp_path,
        """
        def test_a_month(everstep_app):
            assert everstep_app.run(reminder, 30) == "after 30 days"

        def test_a_timeout(everstep_app):
            assert everstep_app.run(patient) == "nobody"

        def test_time_stands_still_until_a_result_is_wanted(everstep_app, everstep_clock):
            run = everstep_app.start(patient, id="p")
            everstep_app.start(reminder, 1, id="r")
            everstep_app.rest()
            assert run.status() == "waiting"
            everstep_clock.advance(3600)
            run.signal("word", "hello")
            assert run.result() == "hello"
        """,
    )
    assert status == 0, out
    assert "3 passed" in out


def test_a_run_that_waits_for_the_test_itself_does_not_hang_it(tmp_path: Path) -> None:
    status, out = pytest_in(
        tmp_path,
        """
        import everstep.testing.skipping

        def test_it(everstep_app, monkeypatch):
            monkeypatch.setattr(everstep.testing.skipping, "PATIENCE_SECONDS", 0.1)
            with pytest.raises(everstep.errors.RunActive, match="only the test can do"):
                everstep_app.run(for_ever)
        """,
    )
    assert status == 0, out


def test_each_test_has_a_store_and_a_ledger_of_its_own(tmp_path: Path) -> None:
    status, out = pytest_in(
        tmp_path,
        """
        from everstep.testing.ledger import apply

        @step
        def pay(url: str) -> str:
            return apply(url, "pay", everstep.key(), {"amount": 5})

        @workflow
        def order(url: str) -> str:
            return pay(url)

        @pytest.mark.parametrize("again", [False, True])
        def test_it(everstep_store, everstep_ledger, again):
            with everstep.open(everstep_store) as app:
                app.run(order, everstep_ledger.url, id="order-1")
            assert [one["kind"] for one in everstep_ledger.entries()] == ["request", "applied"]
        """,
    )
    assert status == 0, out
    assert "2 passed" in out


CRASHES = """
    import time
    from everstep.testing import ledger

    @step
    def charge(customer: str) -> str:
        return ledger.apply(ledger.offered(), "charge", everstep.key(), customer)

    @step(effect="read")
    def look_up(at: float) -> str:
        return "found"

    @workflow
    def right(customer: str) -> str:
        return charge(customer)

    @workflow
    def wrong() -> str:
        return look_up(time.time())

    """
KEPT = """
    @pytest.mark.crash_everywhere("ann", workflow=right, most=1, orders=0)
    def test_kept(everstep_crash_report):
        assert everstep_crash_report.holds
        assert everstep_crash_report.count("kept") > 10

    """
BROKEN = """
    @pytest.mark.crash_everywhere(workflow=wrong, most=1, orders=0)
    def test_broken():
        raise AssertionError("is not reached")
    """


def test_the_marker_kills_a_workflow_everywhere_before_the_test(tmp_path: Path) -> None:
    status, out = pytest_in(tmp_path, CRASHES + KEPT)
    assert status == 0, out
    assert "1 passed" in out


def test_the_marker_fails_the_test_of_a_broken_workflow_with_what_lint_says_of_it(tmp_path: Path) -> None:
    status, out = pytest_in(tmp_path, CRASHES + BROKEN)
    assert status == 1, out
    assert "1 error" in out
    assert "raise AssertionError" not in out
    (found,) = lint_file(str(tmp_path / "test_mine.py"))
    assert "BROKEN: replayed code asks for the same as before" in out
    assert f"test_mine.py:{found.line}: {found.what}" in out
    assert f"remedy: {found.remedy}" in out


def test_a_marked_test_never_passes_without_a_crash_test(tmp_path: Path) -> None:
    status, out = pytest_in(
        tmp_path,
        """
        @pytest.mark.crash_everywhere
        def test_of_no_workflow(): ...

        @pytest.mark.crash_everywhere(workflow=len)
        def test_of_a_plain_function(): ...

        @pytest.mark.crash_everywhere(workflow=for_ever, most=0)
        def test_of_no_boundary(): ...

        def test_without_a_marker(everstep_crash_report): ...
        """,
    )
    assert status == 1
    assert "4 errors" in out
    assert "Say which workflow" in out
    assert "The crash test could not be done" in out
    assert "is for tests with @pytest.mark.crash_everywhere" in out


def test_the_plugin_loads_no_engine_until_a_test_asks(tmp_path: Path) -> None:
    code = "import sys, everstep.testing.plugin; print([m for m in sys.modules if m.startswith('everstep.engine.app')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
