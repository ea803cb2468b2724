"""Calling `everstep crashtest` as a person does, in an empty folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BROKEN = EXAMPLES / "broken"


def crashtest(folder: Path, *arguments: str, expect: int, traced_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a crash test and return its facts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
    command = [*traced_by, sys.executable, "-m", "everstep", "crashtest", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == expect, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def line_of_mistake(file: str) -> int:
    """Return the line that a planted mistake is on."""
    lines = (BROKEN / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "# the mistake" in line)
