"""Programs start quickly: what a plain run does not use is not loaded for it.

Every process of every user pays for each module that is loaded, about a tenth of a millisecond even for a small one,
and the crash tests pay it thousands of times. Modules grow one import at a time, and nobody notices: so their numbers
are kept here. When one of these tests fails, look first whether the new import can stand in the function that needs it
(`engine/later.py` has those of the driver). If a plain run does need the module, raise the number.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import PACKAGE

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
NOT_NEEDED = ("dataclasses", "hmac", "http", "ipaddress", "pathlib", "sqlite3", "tempfile", "urllib", "zoneinfo")
"""Of the standard library: what was loaded once, and is not needed."""


def loaded_by(program: str, folder: Path) -> set[str]:
    """Return the modules that a program has loaded when it ends."""
    code = f"{program}\nimport sys\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded")[2].split())


def ours(loaded: set[str]) -> list[str]:
    """Return those of Everstep."""
    return sorted(name for name in loaded if name.split(".")[0] == "everstep")


@pytest.mark.parametrize(("program", "most"), [(IMPORTED, 28), (PLAIN_RUN, 130), (LISTED, 93)])
def test_a_program_loads_no_more_modules_than_it_did(program: str, most: int, tmp_path: Path) -> None:
    loaded_by(PLAIN_RUN, tmp_path)  # so that there is a store to look at
    loaded = ours(loaded_by(program, tmp_path))
    assert len(loaded) <= most, "\n".join(loaded)


def test_declaring_and_looking_load_neither_the_event_loop_nor_the_driver(tmp_path: Path) -> None:
    loaded_by(PLAIN_RUN, tmp_path)
    for program in (IMPORTED, LISTED):
        assert not loaded_by(program, tmp_path) & {"asyncio", "everstep.engine.driver", "everstep.engine.app"}


def test_a_plain_run_loads_nothing_heavy_that_it_does_not_use(tmp_path: Path) -> None:
    assert not loaded_by(PLAIN_RUN, tmp_path) & set(NOT_NEEDED)


def test_a_worker_loads_nothing_of_the_engine_later(tmp_path: Path) -> None:
    rooms = ("codec", "effects", "engine", "model", "stores/sql", "stores/sqlite")
    there = {
        f"everstep.{room.replace('/', '.')}.{path.stem}"
        for room in rooms
        for path in (PACKAGE / room).glob("*.py")
        if path.stem != "__init__"
    }
    # For atomic steps in SQLite files, and for who starts runs inside a transaction of their own: not for the engine.
    there -= {f"everstep.stores.sqlite.{name}" for name in ("guard", "marked", "outbox")}
    # For atomic steps in PostgreSQL, by libraries that need not be installed.
    there -= {f"everstep.effects.{name}" for name in ("postgres_database", "sqlalchemy_database")}
    # For adapters of frameworks.
    there -= {"everstep.engine.grounds", "everstep.engine.lending", "everstep.stores.sql.saved"}
    loaded = loaded_by(
        """
import asyncio
import everstep

async def main() -> None:
    async with everstep.open("sqlite:///worker.db", recover=True):
        pass

asyncio.run(main())
""",
        tmp_path,
    )
    assert there <= loaded, sorted(there - loaded)
