"""Signatures of steps and workflows are unchanged for type checkers, and starting a run is checked."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RIGHT, WRONG = HERE / "typed_right.py", HERE / "typed_wrong.py"


def refused_lines() -> set[int]:
    """Return the lines that a checker must refuse."""
    return {number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# refused")}


def lines_with_errors(output: str, path: Path) -> set[int]:
    """Return the lines for which a checker reports an error."""
    return {int(number) for number in re.findall(rf"{path.name}:(\d+)(?::\d+)?(?: -)?:? error", output)}


def test_mypy_accepts_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"),
            f"--cache-dir={ROOT / '.mypy_cache' / 'tests'}",
            *(str(RIGHT), str(WRONG)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert lines_with_errors(done.stdout, RIGHT) == set(), done.stdout
    assert lines_with_errors(done.stdout, WRONG) == refused_lines(), done.stdout
    assert len(refused_lines()) >= 28


def test_pyright_accepts_what_is_right_and_refuses_what_is_wrong() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "basedpyright", "--level", "error"),
            *("--pythonpath", sys.executable, str(RIGHT), str(WRONG)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert lines_with_errors(done.stdout, RIGHT) == set(), done.stdout
    assert lines_with_errors(done.stdout, WRONG) == refused_lines(), done.stdout


def test_ty_accepts_what_is_right_but_for_methods_that_are_assigned() -> None:
    """Steps, workflows, handles, `to_thread`, children and tools have the same types under ty.

    It does not bind a `Callable` that a class has as an attribute, as mypy and pyright do: the methods of the blocking
    classes that are made of the async ones. Those lines say so, and the test fails when ty has learned it.
    """
    command = [sys.executable, "-m", "ty", "check", "--output-format", "concise", "--python", sys.prefix, str(RIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    excepted = {n for n, line in enumerate(RIGHT.read_text().splitlines(), 1) if line.endswith("# not ty")}
    assert {int(n) for n in re.findall(rf"{RIGHT.name}:(\d+):\d+: error", done.stdout)} == excepted, done.stdout
