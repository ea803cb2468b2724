"""Everstep's hot path alone, beside the floor, in less than 20 seconds: did a change make it worse?

python benchmarks/hot_path.py                   the figures: the best and the median of three, each in its own process
python benchmarks/hot_path.py --profile w1-read where the time goes, by function
python benchmarks/hot_path.py --against v0.1.0  the same figures of another commit, measured in turn with this one
"""

import argparse
import cProfile
import io
import pstats
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import with_everstep
from measuring import ROOT, Figures, empty_folder, measure

ROUNDS = 3
SECONDS_MAX = 18.0
ROWS = (
    ("floor: a commit for each step", "with_sqlite.py", "w1"),
    ("floor: a commit for 100 steps", "with_sqlite.py", "w2"),
    ("W1 repeat", "with_everstep.py", "w1-repeat"),
    ("W1 repeat, def", "with_everstep.py", "w1-repeat-def"),
    ("W1 read", "with_everstep.py", "w1-read"),
    ("W2 async def", "with_everstep.py", "w2-async"),
    ("W2 def", "with_everstep.py", "w2-def"),
    ("replay of 10,000 steps", "with_everstep.py", "replay"),
)
FLOOR_OF = {"w1-repeat": "w1", "w1-repeat-def": "w1", "w2-async": "w2", "w2-def": "w2"}


def figures() -> None:
    """Measure each row a few times, all rows in each round, so that a noisy moment hits all of them."""
    began = time.monotonic()
    found: dict[str, list[Figures]] = {name: [] for _, _, name in ROWS}
    for number in range(ROUNDS):
        for _, script, name in ROWS:
            if number == 0 or time.monotonic() - began < SECONDS_MAX:
                with empty_folder() as folder:
                    found[name].append(measure(script, name, folder))
    print(f"{'':32}{'best':>10}{'median':>10}  steps/s {'CPU, µs/step':>14}{'of the floor':>14}")
    medians = {name: statistics.median(one["rate"] for one in many) for name, many in found.items()}
    for label, _, name in ROWS:
        best = max(one["rate"] for one in found[name])
        cpu = statistics.median(one["cpu_microseconds"] for one in found[name])
        share = f"{medians[name] / medians[FLOOR_OF[name]]:14.0%}" if name in FLOOR_OF else ""
        print(f"{label:32}{best:10,.0f}{medians[name]:10,.0f}          {cpu:14.1f}{share}")
    print(f"{time.monotonic() - began:.1f} s")


def against(commit: str) -> None:
    """Measure another commit and this one in turn, in the same minutes: a busy moment hits both."""
    with worktree(commit) as other:
        sources = {"then": str(other / "src"), "now": str(ROOT / "src")}
        found: dict[tuple[str, str], list[Figures]] = {}
        for _ in range(2 * ROUNDS + 1):
            for _, script, name in ROWS:
                for when, source in sources.items() if script == "with_everstep.py" else ():
                    with empty_folder() as folder:
                        figures = measure(script, name, folder, PYTHONPATH=source)
                    found.setdefault((name, when), []).append(figures)
    print(f"{'CPU, µs/step, the best of ' + str(2 * ROUNDS + 1):32}{'then':>10}{'now':>10}{'':>10}")
    for label, script, name in ROWS:
        if script == "with_everstep.py":
            then, now = (min(one["cpu_microseconds"] for one in found[name, when]) for when in sources)
            print(f"{label:32}{then:10.1f}{now:10.1f}{now / then - 1:10.1%}")


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check another commit out beside this one, and take it away again."""
    with empty_folder() as folder:
        path = folder / "then"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def profile(name: str, lines: int) -> None:
    """Make one measurement in this process under the profiler. Its own cost makes small functions look larger."""
    profiler = cProfile.Profile()
    with empty_folder() as folder:
        profiler.enable()
        with_everstep.MEASUREMENTS[name](folder)
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(lines)
    print(text.getvalue())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="MEASUREMENT", choices=sorted(with_everstep.MEASUREMENTS))
    parser.add_argument("--lines", type=int, default=40, help="functions in the profile")
    parser.add_argument("--against", metavar="COMMIT", help="measure another commit in turn with this one")
    options = parser.parse_args()
    if options.profile:
        profile(options.profile, options.lines)
    elif options.against:
        against(options.against)
    else:
        figures()
