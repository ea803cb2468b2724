"""One run of everything on one database. The systems take turns, so that a noisy minute hits all of them."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import halving
import resuming
from judging import Findings
from measuring import HISTORY_STEPS, Failed, Figures, empty_folder, environment, measure, quick_folder
from plan import IMPORTS, SMALL_STEPS, Plan

ROUNDS = 3
IMPORT_TIMES = 10
IMPORT = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


class Bench:
    """One run of everything, on SQLite."""

    def __init__(self, plan: Plan, quick: bool) -> None:
        self.plan = plan
        self.quick = quick
        self.findings = Findings()
        self.began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        if self.quick:
            self.throughput("W1", 1)
            return
        with empty_folder() as folder:
            self.imports()
            self.kill_all(folder)
            self.kill_half_way(folder)
            self.idle_worker(folder)
            self.conversation()
            self.rounds(folder)

    def rounds(self, folder: Path) -> None:
        for number in range(1, ROUNDS + 1):
            self.throughput("W1", number)
            self.resumes(folder, number)
            self.throughput("W2", number)
            self.throughput("W3", number)
            self.halves(folder, number)

    def measured(self, script: str, measurement: str) -> Figures:
        """Make a measurement in an empty place."""
        with empty_folder() as folder:
            return measure(script, measurement, folder)

    def throughput(self, workload: str, number: int) -> None:
        for row in self.plan.rows:
            is_wanted = row.workload == workload and (number == 1 or not row.is_once)
            if is_wanted and self.has_time(f"{row.key}, round {number}"):
                with self.noted(row.key):
                    found = self.measured(row.script, row.measurement)
                    self.findings.add_rate(row.key, row.system, found)
                    self.say(
                        f"round {number}  {row.workload} {row.system}, {row.variant}: {found['rate']:,.0f} steps/s"
                    )

    def imports(self) -> None:
        """Time imports in fresh processes, after one that warms the disk's cache."""
        for number in range(IMPORT_TIMES + 1):
            for system, modules in IMPORTS.items():
                if system == "Everstep" or number <= ROUNDS:
                    command = [sys.executable, "-c", IMPORT.format(modules)]
                    said = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stdout
                    if number:
                        self.findings.add(f"import {system}", float(said))
        self.say(f"import everstep: {1000 * (self.findings.figure('import Everstep') or 0):.0f} ms")

    def kill_all(self, folder: Path) -> None:
        """Make what the resumes begin with: runs that were killed in a step."""
        for system, script in self.plan.resumes.items():
            for steps in (SMALL_STEPS, HISTORY_STEPS):
                with self.noted(f"{script} with {steps} steps"):
                    self.kill_in_last_step(script, folder / f"{system}-{steps}", steps)
                    self.say(f"{system} was killed in the step after {steps}")

    def resumes(self, folder: Path, number: int) -> None:
        for what, steps in (("resume", SMALL_STEPS), ("W5", HISTORY_STEPS)):
            for system, script in self.plan.resumes.items():
                killed = folder / f"{system}-{steps}"
                if killed.exists() and self.has_time(f"{what} {system}, round {number}"):
                    with self.noted(f"{what} {system}"):
                        again = self.seconds_to_next_body(script, killed, steps, folder / "again")
                        self.findings.add(f"{what} {system}", again)
                        self.say(f"round {number}  {what} {system}, after {steps} steps: {again:.3f} s")

    def kill_half_way(self, folder: Path) -> None:
        """Make what W4 begins with: many runs that were killed in the middle."""
        for system, (script, *more) in self.plan.halves.items():
            with self.noted(f"{script} half-way"):
                self.kill_in_the_middle(script, folder / f"{system}-half", *more)
                self.say(f"{system} was killed half-way")

    def halves(self, folder: Path, number: int) -> None:
        for system, (script, *more) in self.plan.halves.items():
            killed = folder / f"{system}-half"
            is_wanted = number == 1 or system not in self.plan.halves_once
            if killed.exists() and is_wanted and self.has_time(f"W4 {system}, round {number}"):
                with self.noted(f"W4 {system}"):
                    seconds = self.seconds_until_done(script, killed, folder / "again", *more)
                    self.findings.add(f"W4 {system}", seconds)
                    self.say(f"round {number}  W4 {system}, until all runs are done: {seconds:.2f} s")

    # -- where stores lie, which is different on another database ------------------------------------------------------
    def kill_in_last_step(self, script: str, killed: Path, steps: int) -> None:
        resuming.kill_in_last_step(script, killed, steps)

    def seconds_to_next_body(self, script: str, killed: Path, steps: int, again: Path) -> float:
        return resuming.seconds_to_next_body(script, killed, steps, again)

    def kill_in_the_middle(self, script: str, killed: Path, *more: str) -> None:
        halving.kill_half_way(script, killed, *more)

    def seconds_until_done(self, script: str, killed: Path, again: Path, *more: str) -> float:
        return halving.seconds_until_done(script, killed, again, *more)

    # -- what is measured once -----------------------------------------------------------------------------------------
    def conversation(self) -> None:
        """See what a long conversation takes on the disk."""
        with empty_folder() as folder, self.noted("conversation"):
            found = measure("with_everstep.py", "conversation", folder)
            self.findings.add("conversation", found["megabytes"])
            self.findings.add("conversation growth", found["megabytes"] / found["half_megabytes"])
            self.say(f"a conversation of 500 turns: {found['megabytes']:.1f} MB")

    def idle_worker(self, folder: Path) -> None:
        """Compare a worker in a store full of waiting runs with one in an empty store."""
        with self.noted("idle worker"):
            found = {}
            for name in ("empty", "full"):
                if name == "full":
                    self.fill(folder / name)
                else:
                    (folder / name).mkdir()
                found[name] = measure("idle_worker.py", "idle", folder / name)
                self.findings.add(f"{name} megabytes", found[name]["megabytes"])
                self.findings.add(f"{name} cpu", found[name]["cpu_seconds"])
            more = found["full"]["megabytes"] - found["empty"]["megabytes"]
            self.findings.add("idle bytes", more * 1e6 / found["full"]["waiting"])
            self.findings.add("idle cpu", found["full"]["cpu_seconds"])
            self.say(f"idle worker with {found['full']['waiting']:,} waiting runs: {more:+.1f} MB")

    def fill(self, folder: Path) -> None:
        with quick_folder() as quick:
            seconds = measure("idle_worker.py", "fill", quick, seconds_max=150.0)["seconds"]
            self.say(f"a store full of waiting runs was made in {seconds:.0f} s")
            shutil.copytree(quick, folder)

    def has_time(self, what: str) -> bool:
        if self.seconds() < self.plan.seconds_max:
            return True
        self.findings.notes.append(f"no time was left for {what}.")
        return False

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """A measurement that fails is noted in the report, and the others go on."""
        try:
            yield
        except Failed as error:
            self.findings.notes.append(f"{what}: {error}")
            self.say(f"{what}: {error}")

    def say(self, text: str) -> None:
        print(f"{self.seconds():5.0f} s  {text}", file=sys.stderr, flush=True)
