"""Which crash points schedules and the outbox pass, undisturbed."""

import os
import sys
from collections import Counter
from pathlib import Path

from tests import forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def points_passed(folder: Path) -> "Counter[str]":
    """Let a schedule and a caller start runs, and delete them; return the points passed."""
    folder.mkdir()
    counted = folder / "points.txt"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "EVERSTEP_CRASH_COUNT": str(counted)}
    for words in (
        ["programs.py", "define", str(folder)],
        ["programs.py", "finish", str(folder)],
        ["outbox_programs.py", str(folder), "0"],
    ):
        command = [sys.executable, str(HERE / words[0]), *words[1:]]
        forked.run(command, env=environment, check=True, capture_output=True, timeout=60)
    collect = [sys.executable, "-m", "everstep", "gc", "--older-than", "0s", "--url", f"sqlite:///{folder}/store.db"]
    forked.run(collect, env=environment, check=True, capture_output=True, timeout=60)
    return Counter(counted.read_text().splitlines())
