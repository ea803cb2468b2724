"""The tests with the oldest versions that pyproject.toml takes: `make oldest`.

python tests/oldest.py [pytest's arguments]

One round with the oldest of everything that the package itself is built on or works with, and one for each framework.
What is installed for a round is in build/oldest; the newest versions are those that all other tests run with.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("langgraph", "strands")
BESIDE = ("asyncpg", "pydantic", "sqlalchemy")
"""What users may have beside the package, and it then works with: declared in the extra `dev` only."""
CORE = (
    *("codec", "lint", "stores", "schedules/test_ticks.py", "schedules/test_schedules.py", "graphs/test_graphs.py"),
    *("engine/test_steps.py", "engine/test_library_use.py", "engine/test_loop.py", "engine/test_recovery.py"),
    *(
        "effects/test_atomic.py",
        "effects/test_keys.py",
        "cli/test_looking.py",
        "cli/test_help.py",
        "cli/test_acting.py",
    ),
    *(
        "postgres/test_arrays.py",
        "postgres/test_direct.py",
        "postgres/test_opening.py",
        "postgres/test_lost_sessions.py",
    ),
    *(
        "postgres/test_transactions.py",
        "postgres/test_sqlstates.py",
        "postgres/test_pooler.py",
        "postgres/test_loop.py",
    ),
    *("postgres/test_liveness.py", "postgres/test_programs.py"),
)
"""The tests of the first round: values, files and servers, code on greenlets, ticks, what the command line prints."""


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return what pyproject.toml requires, and the same of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def oldest(extra: str) -> list[str]:
    """Return the oldest versions that an extra takes, as pip is told them: `langgraph==1.2`."""
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+),<\d+", one) for one in requirements()[1][extra]]
    assert all(found), f"{extra}: each requirement has an oldest version, and a next one that is not taken"
    return [f"{one[1]}=={one[2]}" for one in found if one]


def oldest_of_the_core() -> list[str]:
    """Return the oldest of what the package is built on, of the driver for PostgreSQL, and of what is beside."""
    always, extras = requirements()
    asked = [*always, *extras["postgres"], *(one for one in extras["dev"] if re.split("[>=]", one)[0] in BESIDE)]
    found = [re.fullmatch(r"([\w\[\]-]+)>=([\d.]+)", one.partition(";")[0]) for one in asked if "win32" not in one]
    assert all(found), "each requirement has an oldest version"
    return [f"{one[1]}=={one[2]}" for one in found if one]


def run(name: str, wanted: list[str], tests: list[str], arguments: list[str]) -> int:
    """Install versions beside the environment, and run tests with them."""
    folder = ROOT / "build" / "oldest" / name
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text().split() != wanted:
        command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder), *wanted]
        subprocess.run(command, check=True)
        installed.write_text("\n".join(wanted))
    print(f"== {' '.join(wanted)}", flush=True)
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    command = [sys.executable, "-m", "pytest", "-q", *tests, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def run_all(arguments: list[str]) -> int:
    """Do all rounds, also if one of them fails."""
    status = run("core", oldest_of_the_core(), [f"tests/{one}" for one in CORE], arguments)
    for extra in EXTRAS:
        tests = sorted(str(one) for one in (ROOT / "tests" / "integrations").glob(f"test_{extra}*.py"))
        status = max(status, run(extra, oldest(extra), tests, arguments))
    return status


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
