"""Crash tests of a user's own workflow: killed at every boundary there is, and compared with an undisturbed run.

    report = crash_everywhere(order, "lamp", files=("out/*.txt",))
    assert report.holds, report.text()

Each trial has real processes in a folder of its own: one is killed with SIGKILL at a boundary, another continues, and
in further trials that one is killed as well. What the trial leaves behind must be what an undisturbed run leaves
behind: the end, published values, declared files, effects in the ledger, and the history.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

from everstep.codec import Codec
from everstep.codec.kinds import kind_of
from everstep.codec.preview import harmless
from everstep.engine.code.start import start_arguments
from everstep.engine.code.workflow import Workflow, workflow_of
from everstep.errors import Misuse
from everstep.model.exchange_events import APPROVAL
from everstep.testing.causes import Causes
from everstep.testing.crash_boundaries import Boundary, chosen, is_durable_write, spread
from everstep.testing.crash_child import REQUEST
from everstep.testing.crash_nursery import Nursery
from everstep.testing.crash_trial import KILLED, Account, Setting, Trial
from everstep.testing.crash_verdict import Broken, Expected, Judge
from everstep.testing.ledger import Ledger

IN_ALL: Final = 300
"""The approximate number of boundaries that are tried by default."""
SECOND_KILLS: Final = 60
ORDERS: Final = 2
KILLS_IN_AN_ORDER: Final = 6
HASH_SEEDS: Final = (11, 12, 13)
"""Hash seeds of the first process of a trial, of the one that continues, and of the one after that."""


class Outcome(msgspec.Struct):
    """The result of one trial."""

    sort: str
    """`kill`, `second kill` or `order`."""
    boundary: Boundary
    verdict: str
    """`kept`, `held` (a person decides, as the contract says), `broken`, or `missed`: the boundary was not reached."""


class Report(msgspec.Struct):
    """The results of a crash test."""

    workflow: str
    file: str
    counted: int = 0
    """The boundaries that an undisturbed run passes."""
    writes: int = 0
    """The durable writes among them: transactions of the store, each of which ends with a sync of its log."""
    outcomes: list[Outcome] = []
    broken: list[Broken] = []
    """One for each broken promise and place, the first boundary first."""
    notes: list[str] = []
    seconds: float = 0.0
    model_calls: int = 0
    """How often an undisturbed run calls a model, as far as bodies tell the ledger."""
    models_again: int = 0
    """How many model calls were made again because they were under way when their process was killed."""

    @property
    def holds(self) -> bool:
        """Whether all promises hold."""
        return not self.broken

    def summary(self) -> str:
        """Return what was counted and tried."""
        kills = len(self.outcomes) - self.count("missed")
        held = f", {self.count('held')} of them held for a person" if self.count("held") else ""
        return f"{self.counted} boundaries around {self.writes} durable writes, {kills} trials{held}"

    def proof(self) -> str:
        """Return what was proved, in one line, where model calls are known."""
        killed = sum(1 for one in self.outcomes if one.sort == "kill" and one.verdict != "missed")
        tried = sum(1 for one in self.outcomes if one.sort == "kill")
        return (
            f"boundaries {tried} killed {killed} · model calls = undisturbed {self.model_calls} + under way "
            f"(in all trials {self.models_again}) · effects as contracted"
        )

    def count(self, verdict: str) -> int:
        """Return how many trials went so."""
        return sum(1 for one in self.outcomes if one.verdict == verdict)

    def steps(self) -> list[str]:
        """Return the steps that boundaries belong to, in their order; the empty one is the run itself."""
        found = dict.fromkeys(one.boundary.step.partition("#")[0] for one in self.outcomes)
        return sorted(found, key=lambda step: step != "")

    def cell(self, step: str, column: str) -> dict[str, int]:
        """Return how often each verdict was given for the boundaries of a step in a column of the matrix."""
        found: dict[str, int] = {}
        for one in self.outcomes:
            where = one.boundary.column if one.sort == "kill" else one.sort
            if where == column and one.boundary.step.partition("#")[0] == step and one.verdict != "missed":
                found[one.verdict] = found.get(one.verdict, 0) + 1
        return found

    def text(self) -> str:
        """Return the verdict in words: for each broken promise where, why, and what to do."""
        lines = [f"{self.workflow}: {self.summary()}, {self.seconds:.1f} s"]
        for one in self.broken:
            lines += ["", f"BROKEN: {one.promise}", f"  {one.place}: {one.why}", f"  remedy: {one.remedy}"]
            lines += [f"  killed: {boundary}" for boundary in one.boundaries]
            lines += [f"  found: {found}" for found in one.found]
            lines += ["  history:", *(f"    {event}" for event in one.history)]
        lines += [f"note: {note}" for note in self.notes]
        proved = [self.proof()] if self.model_calls else []
        return "\n".join(lines if self.broken else [*lines, "All promises hold.", *proved])


Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number of finished trials, and the planned number."""


def crash_everywhere(
    workflow: Any,
    /,
    *args: Any,
    files: Sequence[str] = (),
    signals: Mapping[str, Any] | None = None,
    approvals: Mapping[str, Any] | None = None,
    requests: Mapping[str, Sequence[Any]] | None = None,
    given: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    most: int | None = None,
    orders: int = ORDERS,
    pace: float = 10.0,
    seconds: float = 60.0,
    processes: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Kill a workflow at every boundary, go on in a new process, and compare with an undisturbed run.

    workflow: a declared workflow of a file that can be imported; args: its arguments.
    files: patterns, such as `"out/*.txt"`, of the files that must be the same. Each trial has a folder of its own.
    signals: values by name; each is delivered whenever the run waits for it.
    approvals: answers, by what is to be approved (`everstep.approval`).
    requests: what is asked, by name: a list of values, each asked when the run waits for the next request
        (`everstep.requests`). The answers must be those of an undisturbed run.
    given: a folder whose content each trial begins with.
    environment: settings of the processes.
    most: the maximum number of boundaries of each kind to kill at (default: all, up to some hundred).
    orders: the number of other orders to try in which concurrent steps complete.
    pace: sleeping in step bodies takes this part of its time. Timers of the workflow take none.
    seconds: how long one process may take.
    processes: how many live at the same time.
    """
    target = workflow_of(workflow)
    file = target.function.__code__.co_filename
    if "<locals>" in target.function.__qualname__ or not os.path.isfile(file):
        raise Misuse(f"{target.name} cannot be imported from a file: a crash test starts it in other processes.")
    if given is not None and not os.path.isdir(given):
        raise Misuse(f"given={str(given)!r} is not a folder.")
    if pace < 1 or processes < 1 or orders < 0 or (most is not None and most < 1):
        raise Misuse("pace=, processes= and most= are at least 1, orders= at least 0.")
    setting = Setting(
        target=f"{os.path.abspath(file)}:{target.name}",
        file=file,
        arguments=_payload(target, args),
        signals=_plain(signals or {}),
        approvals=_plain(approvals or {}),
        requests={name: list(values) for name, values in _plain(requests or {}).items()},
        files=tuple(files),
        given=os.path.abspath(given) if given is not None else "",
        environment=dict(environment or {}),
        pace=pace,
        seconds=seconds,
    )
    began = time.monotonic()
    with (
        TemporaryDirectory(prefix="crashtest-", dir=_quick_folder()) as folder,
        _nurseries(Path(folder), _ahead(target)) as nurseries,
        Ledger.start(Path(folder) / "ledger") as ledger,
    ):
        test = CrashTest(target, setting, Path(folder), ledger, nurseries, progress or (lambda *told: None))
        report = test.run(most, orders, processes)
    report.seconds = time.monotonic() - began
    return report


def _quick_folder() -> str | None:
    """Return a folder in memory, if there is one: processes are killed here, but no power is lost."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON can say them. They are sent in other processes, where the code's types are declared."""
    try:
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given, enc_hook=_taken_apart))
    except TypeError as error:
        raise Misuse(f"What is to be sent cannot be written as JSON: {error}.") from None
    return found


def _taken_apart(value: Any) -> Any:
    kind = kind_of(type(value))
    if kind is None:
        raise TypeError(f"there is a {type(value).__name__} in it")
    return kind.plain(value)


def _payload(workflow: Workflow, args: tuple[Any, ...]) -> str:
    return start_arguments(Codec(), workflow, args).payload.decode()


def _ahead(workflow: Workflow) -> tuple[str, ...]:
    """A workflow in a file of tests imports pytest, and that takes longer than all the rest of a trial.

    So do the frameworks that it works with.
    """
    names = workflow.function.__globals__
    modules = {str(getattr(one, "__module__", None)) for one in names.values()}
    adapters = {".".join(one.split(".")[:3]) for one in modules if one.startswith("everstep.integrations.")}
    return (*(["pytest"] if "pytest" in names else []), *sorted(adapters))


@contextmanager
def _nurseries(folder: Path, ahead: tuple[str, ...]) -> Iterator[list[Nursery]]:
    found: list[Nursery] = []
    try:
        for seed in HASH_SEEDS:
            found.append(Nursery(folder, seed, ahead))  # noqa: PERF401  # those that have started are closed if another does not
        yield found
    finally:
        for one in found:
            one.close()


class CrashTest:
    """A running crash test of one workflow."""

    def __init__(
        self,
        workflow: Workflow,
        setting: Setting,
        folder: Path,
        ledger: Ledger,
        nurseries: list[Nursery],
        progress: Progress,
    ) -> None:
        self._setting, self._folder, self._ledger = setting, folder, ledger
        self._nurseries, self._progress = nurseries, progress
        self._judge: Judge
        self._report = Report(workflow.name, setting.file)
        self._qualname = workflow.function.__qualname__
        self._resumes: dict[str, list[Boundary]] = {}
        """The boundaries passed by the process that continued after a kill, by the boundary of that kill."""
        self._over = itertools.count(1)
        self._planned = 0

    def run(self, most: int | None, orders: int, processes: int) -> Report:
        """Run undisturbed, then kill, then kill twice, then try other orders."""
        report = self._report
        self._progress("undisturbed runs", 0, 0)
        accounts, passed, differences = self._undisturbed(orders)
        expected = Expected(accounts)
        self._judge = Judge(Causes(self._setting.file, self._qualname), expected)
        for account in accounts:
            if (broken := self._judge.undisturbed(account)) is not None:
                report.broken = [broken]
                return report
        report.notes = [*unused(self._setting, expected.first), *_notes(expected)]
        report.model_calls = expected.first.model_calls
        report.counted, report.writes = len(passed), sum(is_durable_write(one) for one in passed)
        kills = chosen(passed, most, IN_ALL)
        second = spread(kills, SECOND_KILLS if most is None else min(SECOND_KILLS, 4 * most))
        in_orders = [
            (order, boundary)
            for order in range(1, orders + 1)
            for boundary in spread([one for one in kills if one.column != "store"], KILLS_IN_AN_ORDER)
        ]
        self._planned = len(kills) + len(second) + len(in_orders)
        with ThreadPoolExecutor(processes) as pool:  # each thread waits for one process
            found = [*pool.map(self._kill, kills)]
            found += pool.map(self._kill_again, second, range(len(second)))
            found += pool.map(lambda one: self._kill(one[1], order=one[0]), in_orders)
        self._conclude(found)
        if differences and not report.broken:  # no kill came between, because its steps are fast: one day one will
            report.broken = [self._judge.diverged(differences)]
            report.broken[0].found.append("no kill has shown it; the whole history was replayed in another process")
        return report

    def _undisturbed(self, orders: int) -> tuple[list[Account], list[Boundary], list[dict[str, Any]]]:
        """Run undisturbed twice, and once in each other order.

        Returns their accounts, what the first passed, and how the code differs when the first is replayed.
        """
        accounts: list[Account] = []
        first: list[Boundary] = []
        differences: list[dict[str, Any]] = []
        for order in (0, 0, *range(1, orders + 1)):
            trial = Trial(self._folder, self._setting, self._ledger, order)
            status, passed = trial.live(self._nurseries[0])
            account = trial.account()
            self._refuse(trial, status, account)
            accounts.append(account)
            if not first:
                first, differences = passed, trial.replayed(self._nurseries[1])
            trial.remove()
        return accounts, first, differences

    def _refuse(self, trial: Trial, status: int | None, account: Account) -> None:
        """Refuse a workflow that does not end by itself, because it cannot be judged."""
        if status is None:
            raise Misuse(f"The workflow did not come to its end within {self._setting.seconds:g} s, undisturbed.")
        if account.awaited:
            raise Misuse(_missing(account.awaited))
        if status != 0 or account.status in ("not started", "waiting", "running", "queued"):
            said = trial.output()[-2000:].strip()
            kind, _, message = said.partition(": ")
            if kind in ("Misuse", "WrongType"):
                raise Misuse(message)
            raise Misuse(f"The workflow does not run, undisturbed ({account.status}):\n{said}")

    # -- trials -----------------------------------------------------------------------------------------------------
    def _kill(self, boundary: Boundary, order: int = 0) -> tuple[Outcome, Broken | None]:
        """Kill at a boundary and continue."""
        trial = Trial(self._folder, self._setting, self._ledger, order)
        status, _ = trial.live(self._nurseries[0], boundary)
        if status == KILLED:
            ended, passed = trial.live(self._nurseries[1])
            if not order:
                self._resumes[boundary.id] = passed
        else:
            ended = status
        return self._settle(trial, "order" if order else "kill", [boundary], status, ended)

    def _kill_again(self, boundary: Boundary, number: int) -> tuple[Outcome, Broken | None]:
        """Kill at a boundary, and kill the process that continues as well, at one of its own boundaries."""
        later = self._resumes.get(boundary.id) or []
        trial = Trial(self._folder, self._setting, self._ledger)
        second = later[(number * 7) % len(later)] if later else None
        if second is None:
            trial.remove()
            return Outcome("second kill", boundary, "missed"), None
        status, _ = trial.live(self._nurseries[0], boundary)
        if status == KILLED:
            status, _ = trial.live(self._nurseries[1], second)
        ended = trial.live(self._nurseries[2])[0] if status == KILLED else status
        return self._settle(trial, "second kill", [boundary, second], status, ended)

    def _settle(
        self, trial: Trial, sort: str, killed: list[Boundary], status: int | None, ended: int | None
    ) -> tuple[Outcome, Broken | None]:
        """Judge what a trial has left behind."""
        self._progress(str(killed[-1]), next(self._over), self._planned)
        outcome = Outcome(sort, killed[-1], "kept")
        account = trial.account()
        broken: Broken | None = None
        if ended is None or (ended != 0 and ended != KILLED):
            how = f"took longer than {self._setting.seconds:g} s" if ended is None else f"ended with {ended}"
            broken = Broken("the run continues by itself", found=[f"a process {how}", *_last_lines(trial.output())])
            broken.history = account.history
        elif status != KILLED:
            outcome.verdict = "missed"
        if broken is None:
            broken = self._judge.judge(account, killed)
        self._report.models_again += max(0, account.model_calls - self._report.model_calls)
        if broken is not None:
            outcome.verdict = "broken"
            broken.boundaries = [str(one) for one in killed]
        elif outcome.verdict == "kept" and account.status == "held":
            outcome.verdict = "held"
        trial.remove()
        return outcome, broken

    def _conclude(self, found: Iterable[tuple[Outcome, Broken | None]]) -> None:
        """Record all trials, and each broken promise once for each place in the code."""
        first: dict[tuple[str, str], Broken] = {}
        for outcome, broken in found:
            self._report.outcomes.append(outcome)
            if broken is not None:
                first.setdefault((broken.promise, broken.place), broken)
        self._report.broken = list(first.values())


def _last_lines(text: str) -> list[str]:
    return text.strip().splitlines()[-5:]


def _missing(awaited: list[str]) -> str:
    """Say what the workflow waits for, and which option gives it."""
    first = awaited[0]
    if first.startswith(APPROVAL):
        what = first.removeprefix(APPROVAL)
        how = f"--approve {what}=JSON, or approvals= in Python"
        return f"The workflow waits for the approval {what}. Give its answer: {how}."
    if first.startswith(REQUEST):
        name = first.removeprefix(REQUEST)
        return (
            f"The workflow waits for a request {name}, and there is none left. Give what is asked, in its order, up to "
            f"what makes the workflow end: --ask {name}=JSON, several times if need be, or requests= in Python."
        )
    names = " and ".join(name for name in awaited if not name.startswith((APPROVAL, REQUEST)))
    return f"The workflow waits for the signal {names}. Give its value: --signal {first}=JSON, or signals= in Python."


def unused(setting: Setting, first: Account) -> list[str]:
    """Say which options were never used, because a name may be misspelt, and how the run ends if not with a result."""
    given = [f"--signal {name}" for name in setting.signals] + [f"--approve {what}" for what in setting.approvals]
    given += [f"--ask {name}" for name in setting.requests]
    notes = [f"Never wanted, undisturbed: {one}. Is the name right?" for one in given if one not in first.taken]
    notes += [f"No file matches --files {one}, undisturbed." for one in setting.files if one not in first.matched]
    if first.status != "completed":
        how = f"{first.status}, {first.error}" if first.error else first.status
        reasons = ", ".join(f"{hold.reason}: {hold.summary}" for hold in first.holds)
        notes.append(
            f"Undisturbed, the run ends as {how}{reasons and f' ({reasons})'}; that is what was compared with."
        )
    return [harmless(note) for note in notes]


def _notes(expected: Expected) -> list[str]:
    """Say what is not judged, because it differs between undisturbed runs."""
    named = {
        "end": "the result",
        "answers": "answers to requests",
        "published": "published values",
        "files": "declared files",
        "effects": "effects in the ledger",
        "shape": "the steps in the history",
    }
    return [
        f"Not judged: {what}. Undisturbed runs differ in it: by chance, time, or the order of concurrent steps."
        for name, what in named.items()
        if expected.differs(name)
    ]
