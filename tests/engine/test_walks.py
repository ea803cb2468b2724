"""The way of a step, and of a checkpoint of LangGraph, is no longer than the page about the architecture says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.walks import WALKS

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
LINE = re.compile(r"^\| .+ \| (\d+) \| (\d+) \| `python -m tests.walks (\w+)` \|$", re.MULTILINE)
MOST = {"repeat": (55, 14), "put": (45, 14)}
"""What the page may say at most: calls, and files that they lead through."""


def claims() -> dict[str, tuple[int, int]]:
    """Return what the page says, by the name of the walk."""
    return {name: (int(calls), int(files)) for calls, files, name in LINE.findall(PAGE)}


def walked(name: str, folder: Path) -> list[str]:
    """Walk in a process of its own, where nothing else runs, and return the calls, each with its file."""
    command = [sys.executable, "-m", "tests.walks", name]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return done.stdout.splitlines()[:-1]


def shortest_walk(name: str, folder: Path, calls_max: int) -> list[str]:
    """Walk again if it took longer: on a busy machine a commit goes to a thread, or one of another event is seen."""
    lines = walked(name, folder)
    for _ in range(9):
        if len(lines) <= calls_max:
            break
        lines = min(lines, walked(name, folder), key=len)
    return lines


def test_the_page_has_a_line_for_each_walk_and_none_is_longer_than_it_may_be() -> None:
    found = claims()
    assert found.keys() == WALKS.keys()
    for name, (calls, files) in MOST.items():
        assert found[name][0] <= calls
        assert found[name][1] <= files


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there one call more is made to enter and to leave a loop")
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_as_long_as_the_page_says_or_shorter(name: str, tmp_path: Path) -> None:
    calls_max, files_max = claims()[name]
    lines = shortest_walk(name, tmp_path, calls_max)
    assert len(lines) <= calls_max, "\n".join(lines)
    assert len({line.split()[0] for line in lines}) <= files_max, "\n".join(lines)
    assert any("Writer.commit" in line for line in lines) or name == "read", "it leads to the disk"
