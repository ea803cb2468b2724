"""What every measurement has in common: it is a process of its own, and prints its figures as one line of JSON.

`python with_everstep.py w1-repeat FOLDER` is such a process. The parent gives it an empty folder on a real disk.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

STEPS = 1_000
"""W1: the steps of one long run."""
RUNS = 2_000
RUN_STEPS = 5
AT_A_TIME = 100
"""W2: many short runs in one process."""
W2_SECONDS_MAX = 12.0
"""W2: no run begins later than this, so that slow systems do not take minutes; the rate is that of the runs done."""
LARGE_STEPS = 200
LARGE_BYTES = 100_000
"""W3: one run whose steps return large texts."""
HALF_RUNS = 1_000
HALF_RUN_STEPS = 10
"""W4: runs whose process is killed when half of all their steps are done."""
TURNS = 500
TURN_BYTES = 2_000
"""A conversation that grows, and is the argument of every step."""
HISTORY_STEPS = 10_000
"""W5: the steps that are finished when the process is killed."""

Figures = dict[str, Any]
Measurement = Callable[[Path], Figures]


class Failed(Exception):
    """A measurement could not be made, or its result was wrong."""


def main(measurements: Mapping[str, Measurement]) -> None:
    """Make the measurement that the command line names, and print its figures."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    figures = measurements[name](folder)
    print(json.dumps({**figures, "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}))


def measure(script: str, name: str, folder: Path, *, seconds_max: float = 60.0, **more: str) -> Figures:
    """Make one measurement in a process of its own, with `more` in its environment, and return its figures."""
    command = [sys.executable, str(HERE / script), name, str(folder)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds_max,
            cwd=folder,
            env=environment(**more),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{script} {name} took longer than {seconds_max:.0f} s") from None
    if ended.returncode:
        raise Failed(f"{script} {name} failed:\n{ended.stderr[-2000:]}")
    figures: Figures = json.loads(ended.stdout.splitlines()[-1])
    return figures


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a measurement: nobody's settings, and nothing that sends reports anywhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DBOS", "LANG", "EVERSTEP"))}
    return {**kept, "PYTHONHASHSEED": "0", "LANGSMITH_TRACING": "false", **more}


@contextmanager
def quick_folder() -> Iterator[Path]:
    """Give an empty folder for what is only prepared and not measured: in memory, where there is such a place."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        with empty_folder() as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bench-", dir=memory, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def empty_folder() -> Iterator[Path]:
    """Give an empty folder on the project's own disk: a folder for temporary files may lie in memory."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "build", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Stopwatch:
    """Measures wall time and the process's own CPU time: `with Stopwatch() as watch: …`."""

    seconds = 0.0
    cpu_seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        self._began, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = time.process_time() - self._cpu

    def rate(self, count: int) -> Figures:
        """Return the figures of a measurement of throughput."""
        return {"rate": count / self.seconds, "cpu_microseconds": 1e6 * self.cpu_seconds / count}


class ManyRuns:
    """W2: the runs of one measurement, counted, until there are enough or the time is over."""

    def __init__(self) -> None:
        self.done = 0
        self._began = time.perf_counter()

    def may_begin(self) -> bool:
        """Tell whether another run may begin."""
        return time.perf_counter() - self._began < W2_SECONDS_MAX

    def count(self, result: int) -> None:
        """Count a run that has ended."""
        expect(result, RUN_STEPS, "the result of a run")
        self.done += 1

    def figures(self, watch: Stopwatch) -> Figures:
        """Return the throughput of the runs that were done."""
        return {**watch.rate(self.done * RUN_STEPS), "runs": self.done}


def large_texts() -> list[str]:
    """W3: what the steps return, made before the clock starts. Words, as models and tools write them."""
    words = [f"{chr(97 + number % 26)}{number:x}" for number in range(2_000)]
    chance = random.Random(1)
    return [" ".join(chance.choices(words, k=LARGE_BYTES // 4))[:LARGE_BYTES] for _ in range(LARGE_STEPS)]


def bytes_in(folder: Path) -> int:
    """Return what a system keeps on the disk when it is closed."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def expect(found: object, wanted: object, what: str) -> None:
    """A system that did not do its work has no figures."""
    if found != wanted:
        raise Failed(f"{what}: {found!r} instead of {wanted!r}")
