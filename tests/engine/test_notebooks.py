"""Everstep in IPython and Jupyter: top-level `await`, repeated cells, redefined workflows, an app across cells."""

import asyncio
import atexit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

DECLARE = """
import asyncio, everstep
from everstep import step, workflow

CALLED = []

@step(effect="read")
async def ask(question: str) -> str:
    CALLED.append(question)
    return f"about {question}"

@workflow
async def report(topic: str) -> str:
    await asyncio.sleep(0.01)
    return await ask(topic)
"""
AGAIN = """
@workflow
async def report(topic: str) -> str:
    return "again " + await ask(topic)
"""


class Notebook:
    """A notebook whose cells run one after the other, on one event loop as in Jupyter."""

    def __init__(self) -> None:
        self.shell = InteractiveShell()
        self.shell.history_manager.enabled = False
        self.loop = asyncio.new_event_loop()

    def cell(self, code: str) -> Any:
        """Run a cell and return the value of its last line."""
        result = self.loop.run_until_complete(self.shell.run_cell_async(code, transformed_cell=code))
        result.raise_error()
        return result.result


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    found = Notebook()
    yield found
    found.loop.close()
    atexit.unregister(found.shell.atexit_operations)


def test_an_app_lives_across_cells_and_cells_may_run_again(notebook: Notebook) -> None:
    notebook.cell(DECLARE)
    notebook.cell('app = await everstep.open("runs.db")')
    assert notebook.cell('await app.run(report, "tides", id="r1")') == "about tides"
    assert notebook.cell('await app.run(report, "tides", id="r1")') == "about tides"
    assert notebook.cell("CALLED") == ["tides"], "the second cell attached to the first one's run"
    notebook.cell(DECLARE)
    assert notebook.cell('await app.run(report, "moons", id="r2")') == "about moons"
    notebook.cell("await app.close()")


def test_a_workflow_may_be_defined_again_in_another_cell(notebook: Notebook) -> None:
    notebook.cell(DECLARE)
    notebook.cell('app = await everstep.open("runs.db")')
    notebook.cell('await app.run(report, "tides", id="r1")')
    notebook.cell(AGAIN)
    assert notebook.cell('await app.run(report, "tides", id="r2")') == "again about tides"
    assert notebook.cell('await app.run(report, "tides", id="r1")') == "about tides", "an ended run keeps its result"
    notebook.cell("await app.close()")


def test_a_cell_with_a_block_of_its_own_works_too(notebook: Notebook) -> None:
    notebook.cell(DECLARE)
    assert (
        notebook.cell(
            'async with everstep.open("runs.db") as app:\n    answer = await app.run(report, "tides")\nanswer'
        )
        == "about tides"
    )
