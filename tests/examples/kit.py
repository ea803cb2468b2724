"""Running an example as a user would: as a process of its own, in an empty folder, killed at a chosen moment."""

import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import everstep
from everstep.engine.history.verify import Event
from tests.forked import Program

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 30.0


def environment(**settings: str) -> dict[str, str]:
    """Return the environment of an example: this package, and no setting of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **settings}


def begin(name: str, folder: Path, *arguments: str, **settings: str) -> Program:
    """Start an example and return its process."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    return Program(command, cwd=folder, env=environment(**settings), stdout=PIPE, stderr=PIPE, text=True)


def run(name: str, folder: Path, *arguments: str, **settings: str) -> str:
    """Run an example to its end and return what it printed."""
    process = begin(name, folder, *arguments, **settings)
    printed, complaints = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, complaints
    assert not complaints, complaints
    return printed


def run_into_crash(name: str, folder: Path, *arguments: str, at: str) -> str:
    """Run an example that dies by SIGKILL at a crash point, and return what it had printed by then."""
    process = begin(name, folder, *arguments, EVERSTEP_CRASH_AT=at)
    printed, complaints = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL, f"it did not die at {at}: {printed}{complaints}"
    return printed


def kill(process: Program) -> str:
    """Kill a process with SIGKILL and return what it had printed."""
    process.kill()
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return printed


def lines(path: Path) -> list[str]:
    """Return the lines of a file, none if there is no file."""
    return path.read_text("utf-8").splitlines() if path.exists() else []


def history(folder: Path, id: str) -> list[Event]:
    """Return the history of a run in an example's store."""
    with everstep.open(str(folder / "everstep.db")) as app:
        assert app.get(id).verify().sound
        return app.get(id).history()
