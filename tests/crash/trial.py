"""One trial: a folder, the workload's processes in it, and the verdict on what they left behind."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from everstep.errors import StoreUnusable
from everstep.stores.sqlite import SqliteStore
from everstep.testing.checker import RunHistory, Violation, check, export_histories
from everstep.testing.journals import read_journal
from everstep.testing.ledger import Ledger
from tests.crash.figures import FIGURES
from tests.crash.nursery import KILLED, Nursery
from tests.forked import Program
from tests.waiting import open_raw

T = TypeVar("T")

WORKLOAD = Path(__file__).with_name("workload.py")
READS = ("look_up", "slow_look", "quick_look")
SECONDS_MAX = 60
IN_PARALLEL = 2

_numbers = itertools.count(1)
_counting = threading.Lock()


@dataclass
class Trial:
    """The processes of a trial share its folder (store, journal) and its book of the ledger."""

    folder: Path
    book: Ledger
    kind: str = "reference"
    count: int = 0
    """How many runs a fleet has."""
    nursery: Nursery | None = None
    """Where its processes come from, if they need not be started one by one."""
    settings: dict[str, str] = field(default_factory=dict)
    """More of their environment."""
    damages: int = 0
    """How many checkpoints each process finds damaged."""
    faults: list[str] = field(default_factory=list)
    snapshots: list[list[RunHistory]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def new(
        cls, parent: Path, ledger: Ledger, kind: str = "reference", count: int = 0, nursery: Nursery | None = None
    ) -> "Trial":
        name = f"trial-{next(_numbers)}"
        folder = parent / name
        folder.mkdir()
        return cls(folder, ledger.book(name), kind, count, nursery)

    # -- processes ------------------------------------------------------------------------------------------------
    def spawn(self, *, at: str = "", lease: float = 30.0) -> Program:
        """Start a process of the workload, armed at a crash point if wanted."""
        command = [sys.executable, str(WORKLOAD), *self._arguments()]
        with open(self.folder / "output.txt", "ab") as output:
            environment = self._environment(at=at, lease=lease)
            return Program(command, env=environment, stdout=output, stderr=output)

    def run(self, *, at: str = "", traced_by: Sequence[str] = ()) -> int:
        """Let a process run to its end, whatever that is, and return its exit status. It may be traced."""
        environment = self._environment(at=at, traced_by=traced_by)
        if self.nursery is not None:
            status = self.nursery.run(self._arguments(), environment, self.folder / "output.txt", SECONDS_MAX)
        else:
            status = self._run_alone(environment)
        if status is None:
            self.problems.append(f"a process did not end in {SECONDS_MAX} s")
            return KILLED
        return status

    def _run_alone(self, environment: dict[str, str]) -> int | None:
        command = [sys.executable, str(WORKLOAD), *self._arguments()]
        with open(self.folder / "output.txt", "ab") as output:
            try:
                return subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=SECONDS_MAX
                ).returncode
            except subprocess.TimeoutExpired:
                return None

    def _arguments(self) -> list[str]:
        return [self.kind, str(self.folder), self.book.url, str(self.count)]

    def _environment(self, *, at: str, lease: float = 30.0, traced_by: Sequence[str] = ()) -> dict[str, str]:
        points = self.folder / "points"
        points.unlink(missing_ok=True)
        environment = {**os.environ, **self.settings, "WORKLOAD_LEASE": str(lease), "EVERSTEP_CRASH_COUNT": str(points)}
        if at:
            environment["EVERSTEP_CRASH_AT"] = at
        if self.damages:
            environment["WORKLOAD_DAMAGE"] = str(self.damages)
        if traced_by:
            environment["WORKLOAD_TRACED_BY"] = json.dumps(list(traced_by))
        return environment

    def run_to_the_end(self) -> None:
        """Start the workload again, as a person would, until it ends well."""
        status = self.run()
        if status != 0:
            self.problems.append(f"the restarted process ended with {status}: {self.output()[-2000:]}")

    def passed(self) -> Counter[str]:
        """Return the crash points that the newest process has passed."""
        points = self.folder / "points"
        return Counter(points.read_text().split()) if points.exists() else Counter()

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    # -- what is left behind --------------------------------------------------------------------------------------
    def histories(self, *, copied: bool = False) -> list[RunHistory]:
        """Return what the store has. A copy is read after a kill: reading the file itself would tidy it up."""
        if not (self.folder / "store.db").exists():
            return []
        if not copied:
            return read_histories(self.folder / "store.db")
        with TemporaryDirectory(dir=self.folder) as folder:
            for name in ("store.db", "store.db-wal", "store.db-journal"):
                if (self.folder / name).exists():
                    shutil.copy(self.folder / name, folder)
            return read_histories(Path(folder) / "store.db")

    def take_snapshot(self) -> None:
        """Keep and judge what a kill has left behind, before anybody goes on."""
        histories = self.histories(copied=True)
        self.judge(check(histories, journal=self.journal(), ledger=self.effects(), settled=False, reads=READS))
        self.snapshots.append(histories)

    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.folder / "journal.jsonl")

    def results(self) -> dict[str, Any]:
        """Return what the processes were given as results, by run."""
        return {line["run"]: (line["value"], line["published"]) for line in self.journal() if line["verb"] == "result"}

    def applied(self) -> Counter[str]:
        return Counter(entry["effect"] for entry in self.effects() if entry["kind"] == "applied")

    def effects(self) -> list[dict[str, Any]]:
        """Return the ledger's entries, and those that the databases of atomic steps have on themselves."""
        return [*self.book.entries(), *entries_in(self.folder)]

    # -- the verdict ----------------------------------------------------------------------------------------------
    def judge(self, violations: Iterable[Violation]) -> None:
        for violation in violations:
            self.problems.append(str(violation))
            with _counting:
                FIGURES.lost += violation.rule.startswith("L")
                FIGURES.doubled += violation.rule.startswith("D")

    def finish(self, expected: "Expected") -> list[str]:
        """Judge the end: every rule, the result and the effects of an undisturbed run. Returns what is wrong."""
        histories = self.histories()
        earlier = [history for snapshot in self.snapshots for history in snapshot]
        effects, results = self.effects(), self.results()
        accounts: dict[str, Any] = {"journal": self.journal(), "ledger": effects, "faults": self.faults}
        self.judge(check(histories, earlier=earlier, **accounts))
        self.problems += [
            f"{history.row.id} is {history.row.status}"
            for history in histories
            if history.row.status != expected.statuses.get(history.row.id, "completed")
        ]
        if results != expected.results:
            self.problems.append(f"the results are {results}, undisturbed they are {expected.results}")
        applied = Counter(entry["effect"] for entry in effects if entry["kind"] == "applied")
        if applied != expected.applied:
            self.problems.append(f"applied were {applied}, undisturbed {expected.applied}")
        with _counting:
            FIGURES.trials += 1
        if not self.problems:
            shutil.rmtree(self.folder)
        return [f"{self.folder.name} ({', '.join(self.faults)}): {problem}" for problem in self.problems]


def entries_in(folder: Path) -> list[dict[str, Any]]:
    """Return what atomic steps have written, as a ledger would have it. Copies are read: nothing is tidied up."""
    entries: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=folder) as copies:
        for name in ("shop.db", "store.db"):
            for file in (name, f"{name}-wal", f"{name}-journal"):
                if (folder / file).exists():
                    shutil.copy(folder / file, copies)
            if not (Path(copies) / name).exists():
                continue
            connection = open_raw(Path(copies) / name)
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'applied'").fetchall():
                for effect, key, argument, at in connection.execute("SELECT * FROM applied"):
                    entry = {"effect": effect, "key": key, "arguments": argument, "digest": str(argument), "at": at}
                    entries += [{**entry, "kind": "request"}, {**entry, "kind": "applied"}]
            connection.close()
    return entries


def read_histories(path: Path) -> list[RunHistory]:
    try:
        store = SqliteStore(path, create=False)
    except StoreUnusable:
        return []  # it was killed before there was a store in it
    try:
        return export_histories(store)
    finally:
        store.close()


@dataclass(frozen=True)
class Expected:
    """What an undisturbed run gives and does."""

    results: dict[str, Any]
    applied: Counter[str]
    points: Counter[str]
    statuses: dict[str, str] = field(default_factory=dict)
    """How runs end that do not complete."""

    @classmethod
    def of(cls, trial: Trial, **statuses: str) -> "Expected":
        """Run a workload undisturbed."""
        status = trial.run()
        assert status == 0, trial.output()
        assert trial.results(), "the undisturbed workload has no results"
        expected = cls(
            trial.results(),
            trial.applied(),
            trial.passed(),
            {run.replace("_", "-"): status for run, status in statuses.items()},
        )
        problems = trial.finish(expected)
        assert not problems, "\n".join(problems)
        return expected


def all_of(function: Callable[..., list[str]], cases: Iterable[Any], in_parallel: int = IN_PARALLEL) -> list[str]:
    """Try every case, several at a time, and return all problems."""
    with ThreadPoolExecutor(in_parallel) as pool:
        return [problem for problems in pool.map(function, cases) for problem in problems]


def told(problems: Sequence[str]) -> str:
    """Return problems as the text of a failed assertion."""
    return f"{len(problems)} problems:\n" + "\n".join(problems[:40])
