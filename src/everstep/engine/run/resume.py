"""Taking up a claimed run, in the order that guarantees.md gives: verify the history, replay the code, settle, go on.

Whatever does not agree puts the run on hold, and nothing else is changed.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from everstep.engine.code.budget import Books
from everstep.engine.code.checkpoints import Checkpoint
from everstep.engine.code.execution import Execution
from everstep.engine.code.loop import SpinningWorkflow
from everstep.engine.code.recovery_point import Past, load_past
from everstep.engine.code.replay import Replay, Replayed, first_run
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.clock import microseconds
from everstep.engine.history.damage import diagnose
from everstep.engine.history.journal import Journal, restore_payload
from everstep.engine.history.restored import Note, may_lack, newest_note
from everstep.engine.history.verify import Recorded, refs_of, without_collections
from everstep.engine.run.acting import whereabouts
from everstep.engine.run.driver import Driver
from everstep.engine.run.holds import HoldReport, damaged_report, diverged_report, poisoned_report, stuck_report
from everstep.engine.run.host import RunHost
from everstep.engine.run.streams import newest_entries
from everstep.errors import Damaged, NotDecodable, NotReadable
from everstep.model.events import EventRow
from everstep.model.semantics import SUPPORTED
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy, briefly
from everstep.stores.protocol import RunRow, Store

log = logger("everstep.run")

STREAMED: Final = frozenset({"stream_appended", "stream_noted"})
DEATHS_MAX = 3
"""Number of deaths of its drivers in a row, without progress and the last time alone, that hold a run as poisoned."""


class NotReadYet(Exception):
    """A replay needs a payload that the store does not give at once."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


class Payloads:
    """The payloads beside a run's history, by their digests: those that are stored, and the newest, which are not."""

    __slots__ = ("_run", "_store", "_undurable")

    def __init__(self, store: Store, run: str, undurable: Mapping[str, bytes]) -> None:
        self._store = store
        self._run = run
        self._undurable = undurable

    def __call__(self, digest: str) -> bytes:
        return self._undurable.get(digest) or restore_payload(self._store.payload(self._run, digest), digest)


class ReplayPayloads(Payloads):
    """The same for a replay, which the store must not keep waiting: `NotReadYet` is raised instead."""

    def __init__(self, store: Store, run: str, fetched: Mapping[str, bytes]) -> None:
        super().__init__(store, run, fetched)

    def __call__(self, digest: str) -> bytes:
        try:
            return briefly(super().__call__, digest)
        except Busy:
            raise NotReadYet(digest) from None


def begin(app: "RunHost", row: RunRow, workflow: "Workflow", started: Recorded) -> "Driver | HoldReport":
    """Bring a run that was started here to its first rest; or say why a person must look at it."""
    body = started.body
    journal = Journal(
        row.id, row.generation, row.head_seq, row.head_digest, started.at, app.store.chain.key(body.chain, row.id)
    )
    lookup = Payloads(app.store, row.id, journal.undurable)
    execution = Execution(workflow, run=row.id, generation=row.generation, codec=app.codec, lookup=lookup)
    if body.budget is not None:
        execution.books = Books(body, started.at)
    try:
        replayed = first_run(execution, started)
    except NotDecodable as error:
        return HoldReport("diverged", f"the arguments do not fit the code: {error}", without=["accept"])
    if replayed.spins:
        return _spins(replayed)
    driver = Driver(app, row, replayed, journal, started.at + microseconds(body.delay))
    driver.allotment = body.budget
    driver.stream_heads = {}
    return driver


async def take_up(
    app: RunHost, row: RunRow, workflow: "Workflow", whole: Sequence[EventRow] = ()
) -> "Driver | HoldReport":
    """Bring a claimed run to the point from which it goes on; or say why a person must look at it.

    whole: its history, if the claim has read it.
    """
    if row.deaths >= DEATHS_MAX:
        return poisoned_report(row.deaths, app.interrupted.cause(row.id))

    try:
        past = await app.read(load_past, app.store, row, whole)
        replayed = await replay_history(app, row, workflow, past.events, past.checkpoint)
    except Damaged as error:
        return damaged_report(error, await app.read(diagnose, app.store, row))
    except NotDecodable as error:
        return HoldReport("diverged", f"the arguments do not fit the code: {error}", without=["accept"])
    if replayed.spins:
        return _spins(replayed)
    if replayed.differences:
        replayed.execution.evict()
        return diverged_report(replayed.differences)
    key = app.store.chain.key(past.events[0].body.chain, row.id)
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, past.events[-1].at, key)
    replayed.execution.lookup = Payloads(app.store, row.id, journal.undurable)
    driver = Driver(app, row, replayed, journal, _clock_started_at(past))
    driver.damaged_checkpoints = past.damaged
    driver.allotment = past.events[0].body.budget
    if first := replayed.first_checkpoint:
        (event,) = await app.read(app.store.events, row.id, row.generation, first, first)
        driver.first_checkpoint = (first, event.digest)
    if replayed.attempts:
        begun_by = {attempts.by for attempts in replayed.attempts.values()} - {""}
        others = begun_by | replayed.execution.unseen_workers
        driver.whereabouts = await app.read(whereabouts, app.store, others)
    if STREAMED & past.kinds or past.checkpoint is not None or replayed.attempts:  # else it probably has none
        driver.stream_heads = await app.read(newest_entries, app.store, row.id, row.generation)
    kept = past.checkpoint and Note(past.checkpoint.seq, past.checkpoint.part.life, past.checkpoint.part.restores)
    note = newest_note(past.events if _has_notes(past) else past.events[:1], kept)
    if await app.read(may_lack, app.store, app.life, row.id, row.generation, note):
        driver.note_restored(app.life)
    return driver


def _spins(replayed: Replayed) -> "HoldReport":
    replayed.execution.evict()
    return stuck_report(replayed.execution, SpinningWorkflow())


def _has_notes(past: "Past") -> bool:
    """Tell whether a history may say anything of restored backups beside its first event."""
    return past.checkpoint is not None or "run_restored" in past.kinds


async def would_go_on(app: RunHost, row: RunRow, workflow: "Workflow") -> bool:
    """Tell whether the code as it is now matches a run's history. Changes nothing."""
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
    """Replay a run's code. If the store is slow, its payloads are read on a thread, and the code is replayed again."""
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

    fetched: payloads that were read before. With it the store is not waited for: `NotReadYet` is raised instead.

    To look up the line of each call takes as long as the rest of it, and only a report on a difference needs them all:
    then the code is replayed once more.
    """

    def new_execution() -> Execution:
        lookup = Payloads(store, row.id, {}) if fetched is None else ReplayPayloads(store, row.id, fetched)
        execution = Execution(workflow, run=row.id, generation=row.generation, codec=codec, lookup=lookup)
        if history[0].body.budget is not None:
            execution.books = Books(history[0].body, history[0].at)
        return execution

    execution = new_execution()
    if len(history) == 1 and not quiet:
        return first_run(execution, history[0])

    execution.wants_places = False
    with without_collections(len(history)):
        try:
            replayed = Replay(execution, history, checkpoint).go(quiet=quiet)
        except BaseException:  # it was stopped: the code must not come to life again when it is dropped
            execution.evict()
            raise
        if not replayed.differences:
            return replayed
        again = Replay(new_execution(), history, checkpoint).go(quiet=True)
    unused = replayed if again.differences else again  # code that is not deterministic may do something else now
    unused.execution.evict()
    return again if again.differences else replayed


def _clock_started_at(past: "Past") -> int:
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


def is_supported(row: RunRow) -> bool:
    """Tell whether this release can drive a run; one of a newer release is left for that release."""
    return row.semantics in SUPPORTED
