"""One trial of a crash test: a folder, the processes that run in it in turn, and what they leave behind."""

import hashlib
import itertools
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.codec.preview import harmless
from everstep.errors import StoreUnusable
from everstep.model.events import decode_body
from everstep.stores.opening import open_store
from everstep.stores.protocol import HoldRow, RunRow
from everstep.testing.checker import RunHistory, check, export_histories
from everstep.testing.crash_boundaries import Boundary, read_passes
from everstep.testing.crash_child import DIFFERENCES, LAST_LINES, RUN, STORE, Ask
from everstep.testing.crash_nursery import OUTPUT, Nursery
from everstep.testing.ledger import LEDGER_SETTING, MODEL, Ledger

KILLED: Final = -signal.SIGKILL
SHAPE: Final = frozenset(
    {"step_started", "step_completed", "step_failed", "step_shared", "signal_received", "child_started", "child_ended"}
    | {"value_published", "run_completed", "run_failed", "run_cancelled", "compensation_started", "timer_fired"}
    | {"request_received", "request_answered"}
)
"""The kinds of events of which an undisturbed run and a killed one have equally many."""
FILE_BYTES_SHOWN: Final = 2000


class Setting(msgspec.Struct):
    """The options that all trials share."""

    target: str
    file: str
    arguments: str
    signals: dict[str, Any] = {}
    approvals: dict[str, Any] = {}
    requests: dict[str, list[Any]] = {}
    files: tuple[str, ...] = ()
    given: str = ""
    environment: dict[str, str] = {}
    pace: float = 10.0
    seconds: float = 60.0


class Account(msgspec.Struct):
    """What a trial has left behind, in the store and outside."""

    status: str = "not started"
    result: str = ""
    error: str = ""
    published: str = ""
    files: dict[str, str] = {}
    matched: set[str] = set()
    """The patterns of declared files that matched a file."""
    effects: dict[tuple[str, str], int] = {}
    """How often each effect was applied, by its name and arguments."""
    entries: list[dict[str, Any]] = []
    shape: dict[tuple[str, str], int] = {}
    holds: list[HoldRow] = []
    history: list[str] = []
    violations: list[str] = []
    awaited: list[str] = []
    answers: dict[str, str] = {}
    """The answers, by the ids of requests."""
    taken: list[str] = []
    """What the runs received from outside, in the form of options: `--signal approved`."""
    repeated: dict[str, str] = {}
    """Steps that were begun again after a crash, and their contracts."""
    contracts: dict[str, str] = {}
    keyless: list[str] = []
    """Steps whose body never asked for its key."""
    model_calls: int = 0
    """The number of model calls that bodies reported to the ledger."""
    models_at_once: int = 0
    """The maximum number of steps with a model call in progress at the same time."""

    @property
    def end(self) -> tuple[str, str, str]:
        """How the run ended."""
        return self.status, self.result, self.error


class Trial:
    """A folder in which processes run and are killed."""

    _numbers = itertools.count(1)

    def __init__(self, parent: Path, setting: Setting, ledger: Ledger, order: int = 0) -> None:
        name = f"trial-{next(Trial._numbers)}"
        self.folder = parent / name
        self.order = order
        self._setting = setting
        self._book = ledger.book(name)
        self._lives = 0
        self._work = self.folder / "work"
        if setting.given:
            shutil.copytree(setting.given, self._work)
        else:
            self._work.mkdir(parents=True)

    def replayed(self, nursery: Nursery) -> list[dict[str, Any]]:
        """Replay the runs from their beginning, in a separate process. Returns the differences."""
        self.live(nursery, replay=True)
        path = self.folder / DIFFERENCES
        differences: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes()) if path.exists() else []
        return differences

    def live(
        self, nursery: Nursery, at: Boundary | None = None, *, replay: bool = False
    ) -> tuple[int | None, list[Boundary]]:
        """Run one process, to its end or to a boundary. Returns its exit status, and the boundaries that it passed."""
        self._lives += 1
        notes = self.folder / f"passed-{self._lives}"
        setting = self._setting
        ask = Ask(
            target=setting.target,
            file=setting.file,
            arguments=setting.arguments,
            folder=str(self._work),
            notes=str(notes),
            environment={**setting.environment, LEDGER_SETTING: self._book.url},
            at=at.id if at is not None else "",
            signals=setting.signals,
            approvals=setting.approvals,
            requests=setting.requests,
            replay=replay,
            order=self.order,
            pace=setting.pace,
            seconds=setting.seconds,
        )
        return nursery.run(ask), read_passes(notes)

    def output(self) -> str:
        """Return what the processes have printed."""
        path = self.folder / OUTPUT
        return path.read_text(errors="replace") if path.exists() else ""

    def account(self) -> Account:
        """Return what the trial has left behind so far."""
        account = Account(entries=self._book.entries())
        account.files, account.matched = self._files()
        applied = [entry for entry in account.entries if entry["kind"] == "applied"]
        account.effects = dict(Counter((entry["effect"], entry["digest"]) for entry in applied))
        account.model_calls = sum(1 for one in account.entries if (one["kind"], one["effect"]) == ("request", MODEL))
        end = self.folder / LAST_LINES
        if end.exists():
            account.awaited = msgspec.json.decode(end.read_bytes())["awaited"]
        try:
            store = open_store(str(self.folder / STORE), create=False)
        except StoreUnusable:
            return account
        try:
            histories = export_histories(store)
            account.holds = list(store.holds())
        finally:
            store.close()
        account.violations = [str(violation) for violation in check(histories)]
        for history in histories:
            self._take_history(account, history)
        return account

    def _files(self) -> tuple[dict[str, str], set[str]]:
        """Return the beginning of each declared file's text with a digest of the whole, and the patterns that
        matched.
        """
        found, matched = {}, set()
        for pattern in self._setting.files:
            for path in sorted(self._work.glob(pattern)):
                if path.is_file():
                    content = path.read_bytes()
                    shown = content[:FILE_BYTES_SHOWN].decode(errors="replace")
                    found[str(path.relative_to(self._work))] = f"{hashlib.sha256(content).hexdigest()[:12]} {shown}"
                    matched.add(pattern)
        return found, matched

    @staticmethod
    def _take_history(account: Account, history: RunHistory) -> None:
        row = history.row
        if row.id == RUN:
            _take_end(account, row)
        shape = Counter(account.shape)
        asking: set[int] = set()
        for event in history.events:
            body = decode_body(event.kind, event.body)
            if event.kind == "step_started" and body.effect == "read":
                asking.add(body.call)
                account.models_at_once = max(account.models_at_once, len(asking))
            elif event.kind in ("step_completed", "step_failed"):
                asking.discard(body.call)
            if event.kind == "step_started":
                account.contracts[event.step] = body.effect
                if body.because == "crash":
                    account.repeated[event.step] = body.effect
            if event.kind in ("request_answered", "signal_received", "approval_asked"):
                _take_exchange(account, event.kind, body)
            if event.kind == "step_completed" and body.key_unused:
                account.keyless.append(event.step)
            if event.kind in SHAPE and not (event.kind == "step_started" and body.attempt > 1):
                shape[event.kind, event.step] += 1
            because = f"  ({body.because})" if getattr(body, "because", "") else ""
            attempt = f" attempt {body.attempt}" if getattr(body, "attempt", 1) > 1 else ""
            run = "" if row.id == RUN else f"  [{row.id}]"
            account.history.append(f"{event.seq:4} {event.kind:20} {harmless(event.step)}{attempt}{because}{run}")
        account.shape = dict(shape)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _take_exchange(account: Account, kind: str, body: Any) -> None:
    """Record what a run received from outside, and what it has answered."""
    if kind == "request_answered":
        text = error_text(msgspec.json.decode(bytes(body.error))[0]) if body.refused else bytes(body.value).decode()
        account.answers[body.id] = f"refused: {text}" if body.refused else body.ref or text
        account.taken.append(f"--ask {body.name}")
    else:
        account.taken.append(f"--signal {body.name}" if kind == "signal_received" else f"--approve {body.what}")


def _take_end(account: Account, row: RunRow) -> None:
    account.status = row.status
    account.published = (row.published or b"{}").decode()
    outcome = (row.outcome or b"").decode()
    if row.status == "failed":
        error = msgspec.json.decode(outcome or "[{}]")[0]
        account.error = error_text(error)
    else:
        account.result = outcome


def error_text(error: Any) -> str:
    """Return the type and message of a stored error. The rest may differ from run to run."""
    if isinstance(error, dict) and len(error) == 1:  # tagged by its kind
        error = next(iter(error.values()))
    if not isinstance(error, dict):
        return harmless(str(error))
    return f"{error.get('type', '')}: {error.get('message', '')}"
