"""The tests of the adapters with the oldest versions of the frameworks that they declare: `make oldest`.

python tests/oldest.py [pytest's arguments]

What is installed for it is in build/oldest, one folder for each extra of pyproject.toml.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("langgraph", "strands")


def oldest(extra: str) -> list[str]:
    """Return the oldest versions that an extra takes, as pip is told them: `langgraph==1.2`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+),<\d+", one) for one in project["optional-dependencies"][extra]]
    assert all(found), f"{extra}: each requirement has an oldest version, and a next one that is not taken"
    return [f"{one[1]}=={one[2]}" for one in found if one]


def run(extra: str, arguments: list[str]) -> int:
    """Install them beside the environment, and run the adapter's tests with them."""
    folder = ROOT / "build" / "oldest" / extra
    wanted = oldest(extra)
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text().split() != wanted:
        command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder), *wanted]
        subprocess.run(command, check=True)
        installed.write_text("\n".join(wanted))
    print(f"== {' '.join(wanted)}", flush=True)
    tests = sorted(str(one) for one in (ROOT / "tests" / "integrations").glob(f"test_{extra}*.py"))
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    command = [sys.executable, "-m", "pytest", "-q", *tests, *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


if __name__ == "__main__":
    sys.exit(max([run(extra, sys.argv[1:]) for extra in EXTRAS]))
