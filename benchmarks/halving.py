"""W4: many runs whose process is killed when each has done half of its steps, until all of them have ended."""

import asyncio
import shutil
import threading
import time
from pathlib import Path

from measuring import HALF_RUN_STEPS, HALF_RUNS, quick_folder
from place import is_empty, looking_into
from resuming import run_until_mark

HALF_SECONDS_MAX = 120.0
DONE_SECONDS_MAX = 120.0
LOOK_SECONDS = 0.05


class HalfWay:
    """In the first process the bodies of the middle steps wait, for the kill that comes when all runs are there."""

    def __init__(self, folder: Path, mark: Path) -> None:
        self._left = HALF_RUNS
        self._is_first = is_empty(folder)
        self._mark = mark
        self._lock = threading.Lock()

    def is_here(self, x: int) -> bool:
        """Tell a body whether it has to wait. In a process that was started after the kill none does."""
        if not self._is_first or x != HALF_RUN_STEPS // 2:
            return False
        with self._lock:
            self._left -= 1
        if self._left == 0:
            self._mark.write_text(str(time.time_ns()))
        return True


async def all_are_done(folder: Path, name: str, query: str, mark: Path) -> None:
    """Note the moment at which another connection sees that all runs are completed."""
    with looking_into(folder, name) as look:
        while look(query) != (HALF_RUNS,):
            await asyncio.sleep(LOOK_SECONDS)
    mark.write_text(str(time.time_ns()))
    await asyncio.sleep(600)


def kill_half_way(script: str, folder: Path, *more: str) -> None:
    """Start all runs, kill their process when each has done half of its steps, and keep its store in the folder."""
    with quick_folder() as quick:
        store = quick / "store"
        store.mkdir()
        run_until_mark(script, store, quick / "killed", HALF_SECONDS_MAX, *more)
        shutil.copytree(store, folder)


def seconds_until_done(script: str, killed: Path, folder: Path, *more: str) -> float:
    """Start the script again on a copy of what the kill has left; return the seconds until all runs are completed."""
    shutil.copytree(killed, folder)
    began, reached = run_until_mark(script, folder, folder.with_suffix(".done"), DONE_SECONDS_MAX, *more)
    shutil.rmtree(folder)
    return (reached - began) / 1e9
