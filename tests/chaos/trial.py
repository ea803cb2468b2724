"""One chaos trial: a schema, a ledger, workers, whoever starts runs, and the verdict at the end."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everstep
from everstep.errors import Error, StoreError
from everstep.stores.postgres import PostgresStore
from everstep.testing.checker import RunHistory, Violation, check, export_histories
from everstep.testing.journals import ClientJournal, read_journal
from everstep.testing.ledger import LEDGER_SETTING, Ledger, Mode
from everstep.testing.ledger_process import digest_of, receipt
from tests.chaos.cluster import ROLE, ChaosServer
from tests.chaos.nursery import Nursery, WorkerProcess
from tests.chaos.proxy import LosingProxy
from tests.waiting import DEADLINE_SECONDS

PROGRAM = Path(__file__).with_name("program.py")
EFFECTS = ("charge", "pack", "remit", "stamp", "book", "keep")
"""What every order does once."""
READS = ("look",)
SLOW = {
    "look": Mode(delay=0.02),
    "charge": Mode(delay=0.1, loses=1),
    "pack": Mode(delay=0.05),
    "remit": Mode(delay=0.1, honours_keys=False),
    "stamp": Mode(delay=0.06),
}
QUICK = {effect: Mode(honours_keys=mode.honours_keys) for effect, mode in SLOW.items()}


@dataclass
class Kill:
    """A worker that was killed, and how many of its effects were open at that instant."""

    pid: int
    open_effects: int


@dataclass
class Verdict:
    """What is left when all is over."""

    ended: int
    lost: int
    doubled: int
    problems: list[str]
    histories: list[RunHistory] = field(default_factory=list)


class Trial:
    """Workers on one store, and the runs that are started on it."""

    def __init__(self, folder: Path, server: ChaosServer, nursery: Nursery, *, lease: float = 2.0) -> None:
        folder.mkdir()
        self.folder = folder
        self.server = server
        self.nursery = nursery
        self.schema = server.fresh_schema()
        self.shop = f"{self.schema}_shop"
        self.table = f"{self.shop}.applied"
        server.ask(f"CREATE SCHEMA {self.shop} AUTHORIZATION {ROLE}")
        at = "bigint DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        server.ask(f"CREATE TABLE {self.table} (effect text, key text, argument bigint, at {at})")
        server.ask(f"ALTER TABLE {self.table} OWNER TO {ROLE}")
        self.proxy = LosingProxy(server.socket_path())
        self.ledger = Ledger.start(folder / "ledger")
        self.url = server.worker_url(self.schema)
        self.lease = lease
        self.drain = 5.0
        self.workflow = "chaos_order"
        self.workers: list[WorkerProcess] = []
        self.kills: list[Kill] = []
        self.log: list[str] = []
        self.faults: list[str] = []
        self.holds_resolved = 0
        self.results: dict[str, Any] = {}
        self._journal = ClientJournal(folder / "journal.jsonl")
        self._begun = time.monotonic()
        self._places = 0
        self._store = PostgresStore(self.url)
        self._client = everstep.connect(self.url)
        self.client = self._client.__enter__()

    def note(self, what: str) -> None:
        """Write into the log of what was done."""
        self.log.append(f"{time.monotonic() - self._begun:7.2f} {what}")

    def behave(self, modes: dict[str, Mode]) -> None:
        for effect, mode in modes.items():
            self.ledger.behave(effect, mode)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self._client.__exit__(None, None, None)
        self._store.close()
        self.ledger.stop()
        self.proxy.close()
        for schema in (self.schema, self.shop):
            self.server.drop(schema)

    # -- workers ----------------------------------------------------------------------------------------------------
    def begin_worker(self, program: str = str(PROGRAM)) -> WorkerProcess:
        """Start a worker; every second one reaches the server through the proxy."""
        self._places += 1
        port = self.proxy.port if self._places % 2 and len(self.server.hosts) == 1 else None
        arguments = [program, f"--url={self.server.worker_url(self.schema, port)}"]
        arguments += [f"--lease={self.lease}", f"--drain={self.drain}", "--concurrency=40"]
        environment = {LEDGER_SETTING: self.ledger.url, "CHAOS_FOLDER": str(self.folder)}
        environment |= {"CHAOS_SHOP": self.server.worker_url(self.shop), "CHAOS_TABLE": self.table}
        output = self.folder / f"worker-{self._places}.txt"
        output.touch()
        worker = self.nursery.begin(arguments, environment, output)
        self.workers.append(worker)
        return worker

    def wait_for(self, condition: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
        """Wait for a condition."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.told([f"it takes too long: {self.statuses()}"])
            time.sleep(0.02)

    def wait_until_at_work(self, worker: WorkerProcess) -> None:
        """Wait until a worker is among those that others see."""
        asked = f'SELECT 1 FROM "{self.schema}".workers WHERE pid = %s'
        self.wait_for(lambda: bool(self.server.try_ask(asked, worker.pid)))

    def replace_ended(self) -> None:
        """Start another worker for each that has ended by itself, as a supervisor does."""
        for worker in list(self.workers):
            if worker.status() is not None:
                self.note(f"worker {worker.pid} ended with {worker.status()}, another one is started")
                self.workers.remove(worker)
                worker.end()
                self.begin_worker()

    def open_effects(self, worker: WorkerProcess) -> int:
        """Return how many effects of a worker have begun and are not over, by its marks."""
        path = self.folder / f"marks-{worker.pid}"
        marks = path.read_bytes() if path.exists() else b""
        return marks.count(b"+") - marks.count(b"-")

    def kill(self, worker: WorkerProcess) -> bool:
        """Kill a worker and start another one; not if that could be the third death in a row of one of its runs.

        Such a run is held as poisoned, and a person has to look at it: that is another promise.
        """
        worker.send(signal.SIGSTOP)  # so that what is found out is true at the instant of the kill
        asked = f"""
            SELECT count(*) FROM "{self.schema}".runs JOIN "{self.schema}".workers ON workers.id = owner
            WHERE pid = %s AND deaths >= 2 AND status NOT IN ('completed', 'failed', 'cancelled', 'held')
        """
        if self.server.try_ask(asked, worker.pid)[0][0]:
            worker.send(signal.SIGCONT)
            return False
        self.kills.append(Kill(worker.pid, self.open_effects(worker)))
        self.workers.remove(worker)
        worker.end()
        self.begin_worker()
        return True

    def stop_for(self, worker: WorkerProcess, seconds: float) -> None:
        """Stop a worker; it is woken by `wake_stopped`."""
        worker.send(signal.SIGSTOP)
        worker.stopped_until = time.monotonic() + seconds

    def wake_stopped(self, *, all_of_them: bool = False) -> None:
        """Wake those whose time has come."""
        for worker in self.workers:
            if worker.stopped_until and (all_of_them or time.monotonic() >= worker.stopped_until):
                worker.stopped_until = 0.0
                worker.send(signal.SIGCONT)
                self.note(f"worker {worker.pid} woken")

    # -- clients ----------------------------------------------------------------------------------------------------
    def ask(self, verb: str, run: str, do: Any, **facts: Any) -> None:
        """Ask for something until it is answered, and keep a journal of that."""
        while True:
            self._journal.note(verb, run, "asked", **facts)  # type: ignore[arg-type]
            try:
                do()
            except StoreError as error:
                self._journal.note(verb, run, "refused", error=type(error).__name__, **facts)  # type: ignore[arg-type]
                time.sleep(0.1)
            else:
                self._journal.note(verb, run, "acknowledged", **facts)  # type: ignore[arg-type]
                return

    def start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            run = f"order-{number}"
            self.ask("start", run, lambda run=run, number=number: self.client.start(self.workflow, number, id=run))

    def signal(self, numbers: Iterable[int]) -> None:
        """Send each run its word; one that has it already takes it once."""
        for number in numbers:
            run, id = f"order-{number}", f"word-{number}"
            send = lambda run=run, id=id, number=number: self.client.signal(run, "word", f"word {number}", id=id)  # noqa: E731
            self.ask("signal", run, send, id=id, name="word")

    def resolve_holds(self) -> None:
        """Be the person who looks after holds: the outside is asked once more, and nothing is decided by hand."""
        held = self.server.try_ask(f"SELECT id FROM \"{self.schema}\".runs WHERE status = 'held'")
        if not held:
            return
        with everstep.open(self.url) as app:
            for hold in app.holds():
                self.note(f"hold of {hold.run}: {hold.reason} {hold.summary}")
                if "probe" in hold.resolutions:
                    try:
                        app.resolve(hold.run, "probe", by="the trial")
                        self.holds_resolved += 1
                    except Error as error:
                        self.note(f"not resolved: {error}")

    def statuses(self) -> Counter[str]:
        asked = f'SELECT status, count(*) FROM "{self.schema}".runs GROUP BY status'
        return Counter(dict(self.server.try_ask(asked)))

    def wait_until_ended(self, count: int, seconds: float) -> bool:
        """Wait until all of so many orders and their children have ended; False if that takes too long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.replace_ended()
            self.resolve_holds()
            if self.statuses()["completed"] >= count:
                return True
            time.sleep(0.2)
        return False

    def read_results(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            run = f"order-{number}"
            try:
                value = self.client.get(run).result(timeout=60)
            except (Error, TimeoutError) as error:
                self.note(f"no result of {run}: {error}")
                continue
            self.results[run] = value
            self._journal.note("result", run, "acknowledged", value=value)

    def entered(self) -> list[dict[str, Any]]:
        """Return what atomic steps have written, as a ledger would have it."""
        rows = self.server.try_ask(f"SELECT effect, key, argument, at FROM {self.table}")
        entries = [{"effect": e, "key": k, "arguments": n, "digest": str(n), "at": at} for e, k, n, at in rows]
        return [{**entry, "kind": kind} for entry in entries for kind in ("request", "applied")]

    # -- the verdict ------------------------------------------------------------------------------------------------
    def judge(self, runs: int, expected: dict[str, Any], effects: Sequence[str] = EFFECTS) -> Verdict:
        """Compare the end with an undisturbed one, by the ledger, the journals and the histories."""
        histories = export_histories(self._store)
        entries = [*self.ledger.entries(), *self.entered()]
        accounts: dict[str, Any] = {"journal": read_journal(self.folder / "journal.jsonl"), "ledger": entries}
        broken: list[Violation] = check(histories, faults=self.faults, reads=READS, now=self._store.now(), **accounts)
        problems = [str(one) for one in broken]
        ended = sum(h.row.status == "completed" and h.row.workflow == self.workflow for h in histories)
        problems += [
            f"{h.row.id} is {h.row.status}: {last_events(h)}" for h in histories if h.row.status != "completed"
        ]
        applied = Counter((entry["effect"], entry["key"]) for entry in entries if entry["kind"] == "applied")
        twice = [name for name, count in applied.items() if count > 1]
        problems += [f"{effect} was applied {applied[effect, key]} times under {key}" for effect, key in twice]
        by_effect = Counter(effect for effect, _ in applied)
        missing = {effect: runs - by_effect[effect] for effect in effects if by_effect[effect] != runs}
        problems += [f"{effect}: {count} too few" for effect, count in missing.items()]
        others = [run for run, value in expected.items() if self.results.get(run) != value]
        problems += [f"{run} gave {self.results.get(run)}, undisturbed {expected[run]}" for run in others]
        lost = sum(one.rule[0] == "L" for one in broken) + sum(map(abs, missing.values())) + (runs - ended)
        doubled = sum(one.rule[0] == "D" for one in broken) + len(twice)
        return Verdict(ended, lost, doubled, problems, histories)

    def told(self, problems: list[str]) -> str:
        """Return what happened as the text of a failed assertion: what is wrong, and everything that was done."""
        return "\n".join([*problems[:30], "--- what was done", *self.log, f"--- {self.folder}"])


def undisturbed(folder: Path, server: ChaosServer, nursery: Nursery, count: int) -> dict[str, Any]:
    """Return the results of so many orders that nobody disturbs."""
    trial = Trial(folder, server, nursery, lease=30.0)
    try:
        trial.behave(QUICK)
        for _ in range(2):
            trial.begin_worker()
        trial.start(range(count))
        trial.signal(range(count))
        assert trial.wait_until_ended(2 * count, 60 + count / 10), trial.told([str(trial.statuses())])
        trial.read_results(range(count))
        verdict = trial.judge(count, {})
        assert not verdict.problems, trial.told(verdict.problems)
        return trial.results
    finally:
        trial.close()


def last_events(history: RunHistory) -> str:
    """Return what happened last in a run that has not ended."""
    return "; ".join(f"{event.at} {event.kind} {event.step} {event.body!r}" for event in history.events[-12:])


def result_of(number: int) -> dict[str, Any]:
    """Return what an undisturbed order gives: the ledger's receipts depend on what was sent and nothing else."""

    def sent(effect: str, argument: object) -> str:
        return receipt(effect, digest_of(argument))

    told = {"packed": "pack", "paid": "charge", "remitted": "remit"}
    given: dict[str, Any] = {name: sent(effect, number) for name, effect in told.items()}
    found = [sent("look", number), sent("look", number + 1)]
    given |= {"booked": f"book {number}", "kept": f"keep {number}"}
    return given | {"found": found, "stamped": sent("stamp", f"word {number}")}
