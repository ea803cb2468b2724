"""Graphs that are killed and go on: what they did, compared with an undisturbed run."""

import json
import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import everstep
from everstep.engine.history.verify import Event
from everstep.testing.checker import check, export_histories
from tests.crash.figures import FIGURES
from tests.forked import Program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILLED = -signal.SIGKILL


@dataclass
class Trial:
    """One run of one case, in as many processes as it takes."""

    case: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    output: str = ""

    def live(self, **settings: str) -> int:
        """Let the run live in a process of its own, until it ends; return that process's exit status."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**kept, "PYTHONPATH": path, **self.settings, **settings}
        command = [sys.executable, str(HERE / "programs.py"), self.case, str(self.folder)]
        process = Program(command, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
        self.output, _ = process.communicate(timeout=60)
        return process.returncode

    @property
    def notes(self) -> list[str]:
        """The bodies that were begun: visit and input."""
        path = self.folder / "notes.txt"
        return path.read_text().splitlines() if path.exists() else []

    def visits(self) -> list[str]:
        """Return the visits whose bodies were begun, in their order."""
        return [json.loads(line)[0] for line in self.notes]

    def result(self) -> Any:
        """Return what the last process printed."""
        return json.loads(self.output.splitlines()[-1])

    def histories(self) -> dict[str, list[Event]]:
        """Return the histories of the run and of its children, verified."""
        file = self.folder / "everstep.db"
        if "STORE_URL" not in self.settings and not file.exists():
            return {}
        with everstep.open(self.settings.get("STORE_URL") or str(file)) as app:
            rows = app.list()
            assert all(app.get(row.id).verify().sound for row in rows)
            assert not (broken := check(export_histories(app.inner.store), settled=False)), broken
            return {row.id: app.get(row.id).history() for row in rows}

    def told(self) -> tuple[set[str], set[str]]:
        """Return what is durable: the visits that have their outcomes, and those that moves have let begin."""
        events = [event for history in self.histories().values() for event in history]
        done = {event.step for event in events if event.kind == "step_completed"}
        return done, {one for event in events if event.kind == "graph_moved" for one in event.body.get("begins", [])}


@dataclass
class Expected:
    """What an undisturbed run did."""

    result: Any
    notes: set[str]
    points: Counter[str]


def undisturbed(case: str, folder: Path) -> Expected:
    """Let a case run without a crash."""
    folder.mkdir()
    trial = Trial(case, folder)
    counted = folder / "points.txt"
    assert trial.live(EVERSTEP_CRASH_COUNT=str(counted)) == 0, trial.output
    return Expected(trial.result(), set(trial.notes), Counter(counted.read_text().splitlines()))


def points_passed(folder: Path) -> "Counter[str]":
    """Return the crash points that a graph passes."""
    return undisturbed("skipping", folder).points


def killed_and_resumed(trial: Trial, expected: Expected, **kill: str) -> list[str]:
    """Kill a run, let another process go on with it, and return what is not as in an undisturbed run."""
    status = trial.live(**kill)
    if status == 0:
        return [] if "EVERSTEP_CRASH_AT" in kill else [f"it was not killed: {trial.output}"]
    if status != KILLED:
        return [f"the armed process ended with {status}: {trial.output[-2000:]}"]
    FIGURES.trials += 1
    (done, let_begin), before = trial.told(), Counter(trial.visits())
    if unknown := set(before) - let_begin:
        return [f"begun before the move that leads there was durable: {sorted(unknown)}"]
    if trial.live() != 0:
        return [f"the run did not go on: {trial.output[-2000:]}"]
    problems = []
    after = Counter(trial.visits())
    if trial.result() != expected.result:
        problems.append(f"result {trial.result()} instead of {expected.result}")
    if set(trial.notes) != expected.notes:
        problems.append(f"executions and inputs differ by {sorted(set(trial.notes) ^ expected.notes)}")
    if again := sorted(visit for visit in done if after[visit] != before[visit]):
        FIGURES.doubled += len(again)
        problems.append(f"done again: {again}")
    trial.histories()
    return problems


def spread(passes: int, most: int) -> list[int]:
    """Return so many of the passes of a point: the one in the middle, or the first, the last and some in between."""
    if most == 1:
        return [(passes + 1) // 2]
    return (
        sorted({1 + round(n * (passes - 1) / (most - 1)) for n in range(most)})
        if passes > most
        else [*range(1, passes + 1)]
    )


def kill_at_boundaries(case: str, place: Path, expected: Expected, most: int) -> tuple[int, list[str]]:
    """Kill a case at its boundaries, so many of each kind; return how many kills there were, and the problems."""
    wanted = [
        f"{name}:{count}"
        for name, passes in sorted(expected.points.items())
        for count in spread(passes, most)
        if name.startswith("store.commit") or not name.startswith("store.")  # the others are no business of graphs
    ]

    def one(at: str) -> list[str]:
        folder = place / at.replace(":", "-")
        folder.mkdir()
        problems = killed_and_resumed(Trial(case, folder), expected, EVERSTEP_CRASH_AT=at)
        FIGURES.fired.add(at.partition(":")[0])
        return [f"{case}, killed at {at}: {problem}" for problem in problems]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one, wanted))
    return len(wanted), [problem for problems in found for problem in problems]
