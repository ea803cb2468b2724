"""Bringing a run back to where it was: its code is replayed against its history, and gets a driver."""

from collections.abc import Mapping, Set
from typing import Any

from everstep.engine.code.budget import Books
from everstep.engine.code.checkpoints import Checkpoint
from everstep.engine.code.execution import Execution
from everstep.engine.code.recovery_point import Past, load_past
from everstep.engine.code.replay import Replay, Replayed, first_run
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.engine.history.clock import microseconds
from everstep.engine.history.journal import Journal, restore_payload
from everstep.engine.history.restored import Note, may_lack, newest_note
from everstep.engine.history.verify import Recorded, refs_of, without_collections
from everstep.engine.run.acting import whereabouts
from everstep.engine.run.driver import Beside, Driver
from everstep.engine.run.host import RunHost
from everstep.engine.run.streams import newest_entries
from everstep.errors import Damaged, Misuse, NotDecodable, NotReadable, UnknownWorkflow
from everstep.model.semantics import SUPPORTED
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy, briefly
from everstep.stores.protocol import RunRow, Store

log = logger("everstep.run")


class NotReadYet(Exception):
    """A replay needs a payload that the store does not return at once."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


class Payloads:
    """The payloads outside of a run's history, by their digests: stored ones, and the newest, which are not stored
    yet.
    """

    __slots__ = ("_run", "_store", "_undurable")

    def __init__(self, store: Store, run: str, undurable: Mapping[str, bytes]) -> None:
        self._store = store
        self._run = run
        self._undurable = undurable

    def __call__(self, digest: str) -> bytes:
        return self._undurable.get(digest) or restore_payload(self._store.payload(self._run, digest), digest)


class ReplayPayloads(Payloads):
    """The same for a replay, which must not wait for the store: `NotReadYet` is raised instead."""

    def __init__(self, store: Store, run: str, fetched: Mapping[str, bytes]) -> None:
        super().__init__(store, run, fetched)

    def __call__(self, digest: str) -> bytes:
        try:
            return briefly(super().__call__, digest)
        except Busy:
            raise NotReadYet(digest) from None


def books_of(started: Recorded) -> Books | None:
    """Return the accounts of a run that was started with a budget."""
    return Books(started.body, started.at) if started.body.budget is not None else None


async def would_go_on(app: RunHost, row: RunRow, workflow: "Workflow") -> bool:
    """Return True if the present code matches a run's history. Changes nothing."""
    try:
        past = await app.read(load_past, app.store, row)
        replayed = await replay_history(app, row, workflow, past.events, past.checkpoint, quiet=True)
    except (Damaged, NotDecodable, NotReadable):
        return False
    replayed.execution.evict()
    return not replayed.differences


async def replay_history(
    app: RunHost,
    row: RunRow,
    workflow: "Workflow",
    history: list[Recorded],
    checkpoint: "Checkpoint | None" = None,
    *,
    quiet: bool = False,
) -> Replayed:
    """Replay a run's code. If the store is slow, payloads are read on a thread, and the code is replayed again."""
    fetched: dict[str, bytes] = {}
    while True:
        try:
            return replay(app.store, app.codec, row, workflow, history, checkpoint, quiet=quiet, fetched=fetched)
        except NotReadYet as missing:
            wanted = {missing.digest, *(ref for event in history for ref in refs_of(event.body))} - fetched.keys()
            fetched |= await app.read(_fetch, app.store, row.id, wanted)


def _fetch(store: Store, run: str, digests: Set[str]) -> dict[str, bytes]:
    return {digest: restore_payload(store.payload(run, digest), digest) for digest in digests}


def replay(
    store: Store,
    codec: Any,
    row: RunRow,
    workflow: "Workflow",
    history: list[Recorded],
    checkpoint: "Checkpoint | None" = None,
    *,
    quiet: bool = False,
    fetched: Mapping[str, bytes] | None = None,
) -> Replayed:
    """Replay a run's code against its history; with a checkpoint, against the parts of it that `load_past` returns.

    fetched: payloads that were read before. With it a slow store raises `NotReadYet` instead.

    Looking up the line of each call takes as long as the rest of the replay, and only a report on a difference needs
    the lines: then the code is replayed once more.
    """

    def new_execution() -> Execution:
        lookup = Payloads(store, row.id, {}) if fetched is None else ReplayPayloads(store, row.id, fetched)
        return Execution(
            workflow,
            run=row.id,
            generation=row.generation,
            codec=codec,
            lookup=lookup,
            books=books_of(history[0]),
        )

    execution = new_execution()
    if len(history) == 1 and not quiet:
        return first_run(execution, history[0])

    execution.set_wants_places(False)
    with without_collections(len(history)):
        try:
            replayed = Replay(execution, history, checkpoint).go(quiet=quiet)
        except BaseException:  # it was stopped: the code must not run again when it is dropped
            execution.evict()
            raise
        if not replayed.differences:
            return replayed
        again = Replay(new_execution(), history, checkpoint).go(quiet=True)
    unused = replayed if again.differences else again  # code that is not deterministic may do something else now
    unused.execution.evict()
    return again if again.differences else replayed


def is_supported(row: RunRow) -> bool:
    """Tell whether this release can drive a run; one of a newer release is left for that release."""
    return row.semantics in SUPPORTED


def code_of(row: RunRow) -> Workflow | None:
    """Return the code of a run, if this process has it and this release can drive it."""
    try:
        workflow = DECLARED.named(row.workflow)
    except (UnknownWorkflow, Misuse) as error:
        log.warning("Run %s is left for a worker that knows it: %s", row.id, error)
        return None
    if not is_supported(row):
        log.warning("Run %s was made by a newer release (semantics %d); it is left alone.", row.id, row.semantics)
        return None
    return workflow


async def driver_of(host: RunHost, row: RunRow, past: Past, replayed: Replayed) -> Driver:
    """Return what drives a run from where its replay has come to, with all that has to be known beside its events."""
    key = host.store.chain.key(past.events[0].body.chain, row.id)
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, past.events[-1].at, key)
    replayed.execution.read_payloads_with(Payloads(host.store, row.id, journal.undurable))
    beside = await _read_beside(host, row, past, replayed)
    driver = Driver(host, row, replayed, journal, _clock_started_at(past), beside)
    if await host.read(may_lack, host.store, host.life, row.id, row.generation, _newest_note(past)):
        driver.note_restored(host.life)
    return driver


async def _read_beside(host: RunHost, row: RunRow, past: Past, replayed: Replayed) -> Beside:
    """Read what the driver has to know of a run besides its events."""
    beside = Beside(past.events[0].body.budget, damaged_checkpoints=past.damaged)
    if first := replayed.first_checkpoint:
        (event,) = await host.read(host.store.events, row.id, row.generation, first, first)
        beside.first_checkpoint = (first, event.digest)
    if replayed.attempts:
        begun_by = {attempts.by for attempts in replayed.attempts.values()} - {""}
        others = begun_by | replayed.execution.unseen_workers
        beside.whereabouts = await host.read(whereabouts, host.store, others)
    # Also of a run whose events name no stream: its first entry must not have to ask the store on the loop.
    beside.stream_heads = await host.read(newest_entries, host.store, row.id, row.generation)
    return beside


def _newest_note(past: Past) -> Note:
    """Return what a history says of restored backups; beside its first event only few say anything."""
    kept = past.checkpoint and Note(past.checkpoint.seq, past.checkpoint.part.life, past.checkpoint.part.restores)
    has_notes = past.checkpoint is not None or "run_restored" in past.kinds
    return newest_note(past.events if has_notes else past.events[:1], kept)


def _clock_started_at(past: Past) -> int:
    """Return when the run's time began: at its start and after its delay, or at its newest retry."""
    is_later = past.checkpoint is not None or "run_retried" in past.kinds
    for event in reversed(past.events if is_later else ()):
        if event.kind == "run_retried":
            return int(event.at)
        if past.checkpoint is not None and event.seq == past.checkpoint.seq:
            return past.checkpoint.part.clock_started
    if (forked := past.events[0].body.forked) is not None:
        return int(forked.at)
    if (carried := past.events[0].body.carried) is not None:
        return int(carried.clock_started)
    return int(past.events[0].at) + microseconds(past.events[0].body.delay)
