"""Write the golden files of a release: what it leaves behind, which later ones have to read and go on with.

python tests/golden/make.py COMMIT NAME      # into tests/golden/NAME

A release does so for its own commit, and `test_golden.py` then tests it. All files are text: the store as SQL.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.waiting import open_sqlite  # a program knows only its own folder

HERE = Path(__file__).parent
RUN = """
import runpy, socket, sys
socket.gethostname = lambda: "golden"  # nothing of the machine on which it is made
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def make(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    with tempfile.TemporaryDirectory(prefix="golden-") as made:
        place = Path(made)
        words = ["git", "archive", commit, "src"]
        archive = subprocess.run(words, cwd=HERE.parents[1], check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(place, filter="data")
        (place / "program.py").write_bytes((HERE / "program.py").read_bytes())
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for run in ("held", "half-done"):
            words = [sys.executable, "-c", RUN, "program.py", run, "sqlite:///runs.db", str(folder.resolve())]
            done = subprocess.run(words, cwd=place, env={**os.environ, "PYTHONPATH": str(place / "src")}, check=False)
            assert done.returncode == -signal.SIGKILL, f"it was to die in the body of {run}"
        (folder / "store.sql").write_text("\n".join(dumped(place / "runs.db")) + "\n")


def dumped(path: Path) -> list[str]:
    """Return the SQL that makes the same file."""
    with contextlib.closing(open_sqlite(path)) as connection:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        return [f"PRAGMA application_id = {application};", *connection.iterdump()]


if __name__ == "__main__":
    make(sys.argv[1], HERE / sys.argv[2])
