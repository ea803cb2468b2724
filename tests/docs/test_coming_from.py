"""The programs of other systems on the page about them: each is Python, and LangGraph's does what the page says."""

import ast
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_snippets import run

PAGE = ROOT / "docs" / "coming-from.md"
PROGRAMS = {
    text.partition(" import")[0].split()[-1].split(".")[0]: text
    for text in (block.text for block in blocks(PAGE.read_text("utf-8")) if block.language == "text")
}


def test_each_system_of_the_title_has_its_program() -> None:
    imported = {
        line.split()[1].split(".")[0]
        for text in PROGRAMS.values()
        for line in text.splitlines()
        if line.startswith(("from ", "import "))
    }
    assert {"temporalio", "dbos", "langgraph", "celery"} <= imported


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_another_system_is_python(name: str) -> None:
    ast.parse(PROGRAMS[name])


def test_the_program_of_langgraph_runs(tmp_path: Path) -> None:
    (source,) = [text for text in PROGRAMS.values() if "from langgraph" in text]
    done = run(source, tmp_path)
    assert (done.stdout, done.returncode) == ("receipt for o-1\n", 0), done.stderr
