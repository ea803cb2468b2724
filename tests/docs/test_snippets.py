"""Every Python block of the README and the docs runs, in the order of its page, in an empty folder."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, name_of, pages, script

EXCERPTS = ["docs/desync.md"]
"""Pages whose blocks are parts of programs that run as a whole, see test_desync.py."""
WITH_CODE = [page for page in pages() if script(page.read_text("utf-8")) and name_of(page) not in EXCERPTS]


def run(source: str, folder: Path, name: str = "page", **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a page's blocks as a script of its own."""
    path = folder / f"{name}.py"
    path.write_text(source, "utf-8")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EVERSTEP_")}
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(path)],
        cwd=folder,
        env={**kept, "PYTHONUNBUFFERED": "1", **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    done = run(script(page.read_text("utf-8")), tmp_path)
    assert done.returncode == 0, f"{name_of(page)} (the lines are those of the page):\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    known = {"python", "text"}
    assert {block.language for block in blocks(page.read_text("utf-8"))} <= known


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_no_block_hides_an_unused_outcome(page: Path) -> None:
    """A line that only compares proves nothing: whoever writes `x == 1` in a page means `assert x == 1`."""
    tree = ast.parse(script(page.read_text("utf-8")))
    idle = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare)
    ]
    assert not idle


@pytest.mark.parametrize("at", ["body.after:2", "body.after:4"])
def test_the_readme_s_program_goes_on_after_it_was_killed(tmp_path: Path, at: str) -> None:
    source = script((ROOT / "README.md").read_text("utf-8"))
    assert run(source, tmp_path, "report", EVERSTEP_CRASH_AT=at).returncode == -9
    second = run(source, tmp_path, "report")
    assert second.returncode == 0, second.stderr
    (report,) = tmp_path.glob("report-*.txt")
    assert second.stdout == f"{report.name}\n"
    assert len(report.read_text().splitlines()) == 3
    assert run(source, tmp_path, "report").stdout == second.stdout


def test_the_readme_s_program_is_as_short_as_it_says() -> None:
    lines = script((ROOT / "README.md").read_text("utf-8")).strip().splitlines()
    assert len([line for line in lines if line.strip()]) <= 20 + 1


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    page = "# A page\n\n```python\nx = 1\n```\n\nand\n\n```python\nassert x == 2\n```\n"
    done = run(script(page), tmp_path)
    assert done.returncode == 1
    assert "line 10" in done.stderr


def test_text_does_not_run() -> None:
    assert script("```text\nraise SystemExit\n```\n") == ""
