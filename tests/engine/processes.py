"""Starting the programs of `programs.py`, and reading what they left behind."""

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import Program

PROGRAMS = Path(__file__).with_name("programs.py")


def start(name: str, folder: Path, **environment: str) -> Program:
    """Start a program in a process of its own."""
    return Program(
        [sys.executable, str(PROGRAMS), name, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(name: str, folder: Path, **environment: str) -> tuple[int, str]:
    """Let a program go to its end; return its exit status and its output."""
    process = start(name, folder, **environment)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def notes(folder: Path) -> list[str]:
    """Return the lines that programs have left in a folder."""
    path = folder / "notes.txt"
    return path.read_text().splitlines() if path.exists() else []
