"""From the start of a process until the next step's body runs, after a kill."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from measuring import HERE, Failed, environment, quick_folder

FILL_SECONDS_MAX = 120.0
RESUME_SECONDS_MAX = 60.0


def kill_in_last_step(script: str, folder: Path, steps: int) -> None:
    """Run a script until it is in the body of its last step, then kill it, and keep its store in the folder."""
    with quick_folder() as quick:
        store = quick / "store"
        store.mkdir()
        run_until_mark(script, store, quick / "killed", FILL_SECONDS_MAX, str(steps))
        shutil.copytree(store, folder)


def seconds_to_next_body(script: str, killed: Path, steps: int, folder: Path) -> float:
    """Start the script again on a copy of what the kill has left, and return the seconds until its step's body runs."""
    shutil.copytree(killed, folder)
    began, reached = run_until_mark(script, folder, folder.with_suffix(".resumed"), RESUME_SECONDS_MAX, str(steps))
    shutil.rmtree(folder)
    return (reached - began) / 1e9


def run_until_mark(
    script: str, folder: Path, mark: Path, seconds_max: float, *more: str, **variables: str
) -> tuple[int, int]:
    """Return when the process was started and when it wrote its mark, both in nanoseconds; then kill it."""
    command = [sys.executable, str(HERE / script), str(folder), str(mark), *more]
    complaints = folder.with_suffix(".stderr")
    with complaints.open("wb") as stderr:
        began = time.time_ns()
        process = subprocess.Popen(
            command, cwd=folder, env=environment(**variables), stdout=subprocess.DEVNULL, stderr=stderr
        )
        try:
            while not (mark.exists() and mark.read_text()):
                if process.poll() is not None or time.time_ns() - began > seconds_max * 1e9:
                    raise Failed(f"{script} did not come to its mark:\n{complaints.read_text()[-2000:]}")
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    reached = int(mark.read_text())
    mark.unlink()
    return began, reached
