"""Programs start quickly: nothing heavy is loaded that a plain run does not use.

How many milliseconds a start takes is measured by `make bench`, which has a bar for it.
"""

import subprocess
import sys
from pathlib import Path

IMPORTED = "import everstep"
PLAIN_RUN = """
import everstep

@everstep.step
async def act(x: int) -> int:
    return x + 1

@everstep.workflow
async def flow() -> int:
    return await act(1)

everstep.run(flow, url="sqlite:///plain.db")
"""
LISTED = """
from everstep.cli import main

try:
    main(["ls", "--url", "sqlite:///plain.db"])
except SystemExit as end:
    assert not end.code
"""
NOT_NEEDED = ("http", "multiprocessing", "sqlite3", "tempfile", "zoneinfo", "psycopg", "rich", "sqlalchemy")
"""What takes long to load, and what a plain run on SQLite does not use."""


def loaded_by(program: str, folder: Path) -> set[str]:
    """Return the modules that a program has loaded when it ends."""
    code = f"{program}\nimport sys\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded")[2].split())


def test_declaring_and_looking_load_neither_the_event_loop_nor_the_driver(tmp_path: Path) -> None:
    loaded_by(PLAIN_RUN, tmp_path)
    for program in (IMPORTED, LISTED):
        assert not loaded_by(program, tmp_path) & {"asyncio", "everstep.engine.run.driver", "everstep.engine.app.app"}


def test_a_plain_run_loads_nothing_heavy_that_it_does_not_use(tmp_path: Path) -> None:
    assert not loaded_by(PLAIN_RUN, tmp_path) & set(NOT_NEEDED)
