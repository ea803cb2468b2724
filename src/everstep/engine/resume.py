"""Taking up a claimed run, in the order that guarantees.md gives: verify the history, replay the code, settle, go on.

Whatever does not agree puts the run on hold, and nothing else is changed.
"""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.engine import later
from everstep.engine.acting import whereabouts
from everstep.engine.clock import microseconds
from everstep.engine.driver import Driver
from everstep.engine.execution import Execution
from everstep.engine.history import Recorded, load_verified, refs_of, without_collections
from everstep.engine.journal import Journal, restore_payload
from everstep.engine.loop import SpinningWorkflow
from everstep.engine.replayed import Replayed, first_run
from everstep.engine.restoring import may_lack, newest_note
from everstep.errors import Damaged, HoldConflict, NotDecodable, NotReadable
from everstep.model import events as ev
from everstep.model.budgets import Limits
from everstep.model.events import EventRow
from everstep.model.semantics import SUPPORTED
from everstep.model.status import Status, may_become
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy, briefly
from everstep.stores.protocol import Append, HoldRow, Post, RowChange, RunRow, Store
from everstep.stores.queues import DEFAULT_QUEUE

if TYPE_CHECKING:
    from everstep.engine.checkpoints import Checkpoint
    from everstep.engine.driving import Driving
    from everstep.engine.holding import HoldReport
    from everstep.engine.past import Past
    from everstep.engine.rollback import Account
    from everstep.engine.surrounding import Surrounding
    from everstep.engine.workflow import Workflow

log = logger("everstep.run")

STREAMED: Final = frozenset({"stream_appended", "stream_noted"})
DEATHS_MAX = 3
"""A run whose drivers died this often in a row without progress, the last time alone, is held as poisoned."""


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


def begin(app: "Surrounding", row: RunRow, workflow: "Workflow", started: Recorded) -> "Driver | HoldReport":
    """Bring a run that was started here to its first rest; or say why a person must look at it."""
    body = started.body
    journal = Journal(
        row.id, row.generation, row.head_seq, row.head_digest, started.at, app.store.chain.key(body.chain, row.id)
    )
    lookup = Payloads(app.store, row.id, journal.undurable)
    execution = Execution(workflow, run=row.id, generation=row.generation, codec=app.codec, lookup=lookup)
    if body.budget is not None:
        execution.books = later.books_of(body, started.at)
    try:
        replayed = first_run(execution, started)
    except NotDecodable as error:
        return later.undecodable_report(error)
    if replayed.spins:
        return _spins(replayed)
    driver = Driver(app, row, replayed, journal, started.at + microseconds(body.delay))
    driver.allotment = body.budget
    driver.stream_heads = {}
    return driver


async def take_up(
    app: "Driving", row: RunRow, workflow: "Workflow", whole: Sequence[EventRow] = ()
) -> "Driver | HoldReport":
    """Bring a claimed run to the point from which it goes on; or say why a person must look at it.

    whole: its history, if the claim has read it.
    """
    if row.deaths >= DEATHS_MAX:
        return later.poisoned_report(row.deaths, app.interrupted.cause(row.id))
    from everstep.engine.past import load_past  # a program that starts runs and takes none up does without

    try:
        past = await app.read(load_past, app.store, row, whole)
        replayed = await replay_history(app, row, workflow, past.events, past.checkpoint)
    except Damaged as error:
        return await app.read(later.damaged_report, error, app.store, row)
    except NotDecodable as error:
        return later.undecodable_report(error)
    if replayed.spins:
        return _spins(replayed)
    if replayed.differences:
        replayed.execution.evict()
        return later.diverged_report(replayed.differences)
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
        driver.stream_heads = await app.read(later.newest_entries, app.store, row.id, row.generation)
    note = newest_note(past.events if _has_notes(past) else past.events[:1], past.checkpoint)
    if await app.read(may_lack, app.store, app.life, row.id, row.generation, note):
        driver.note_restored(app.life)
    return driver


def _spins(replayed: Replayed) -> "HoldReport":
    replayed.execution.evict()
    return later.stuck_report(replayed.execution, SpinningWorkflow())


def _has_notes(past: "Past") -> bool:
    """Tell whether a history may say anything of restored backups beside its first event."""
    return past.checkpoint is not None or "run_restored" in past.kinds


async def would_go_on(app: "Driving", row: RunRow, workflow: "Workflow") -> bool:
    """Tell whether the code as it is now matches a run's history. Changes nothing."""
    from everstep.engine.past import load_past  # a program that starts runs and takes none up does without

    try:
        past = await app.read(load_past, app.store, row)
        replayed = await replay_history(app, row, workflow, past.events, past.checkpoint, quiet=True)
    except (Damaged, NotDecodable, NotReadable):
        return False
    replayed.execution.evict()
    return not replayed.differences


async def replay_history(
    app: "Driving",
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
            fetched |= await app.elsewhere.call(partial(_fetch, app.store, row.id, wanted))


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
            execution.books = later.books_of(history[0].body, history[0].at)
        return execution

    execution = new_execution()
    if len(history) == 1 and not quiet:
        return first_run(execution, history[0])
    from everstep.engine.replay import Replay

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


def hold_unit(app: "Surrounding", row: RunRow, report: "HoldReport") -> Append:
    """Return the unit that puts a claimed run on hold. A damaged history gets no event: nothing is added to it."""
    from everstep.engine.compensating import offering_rollback
    from everstep.engine.rollback import Account

    journal = _silent_journal(row, max(app.clock.now(), row.updated_at))
    if report.reason != "damaged":
        try:
            journal, history = journal_of(app, row)
            journal.at = max(journal.at, row.updated_at)
            account = Account(history)
            if account.is_undone:
                report = report.but_not("rollback")
            else:
                left = partial(_all_that_stays, app, row.id, account)
                report = offering_rollback(report, row.id, account.undoable, left)
        except Damaged as error:
            report = later.damaged_report(error, app.store, row)
    hold = report.row(row.id, journal.at, app.randomness)
    if report.reason != "damaged":
        journal.record("run_held", hold.step, ev.RunHeld(hold.id, hold.reason, hold.summary), journal.at)
    unit = bare_unit(row, journal, RowChange("held", journal.at, None, row.current_step), hold=hold)
    unit.notifications = app.notifier.rows(hold)
    return unit


def _all_that_stays(app: "Surrounding", run: str, account: "Account") -> list[str]:
    from everstep.engine.rollback import left_by_children

    return account.uncompensated or left_by_children(app.store, run)


def _silent_journal(row: RunRow, at: int) -> Journal:
    """Return a journal for a unit without events: nothing is added to a damaged history."""
    return Journal(row.id, row.generation, row.head_seq, row.head_digest, at, b"")


def bare_unit(
    row: RunRow, journal: Journal, change: RowChange, *, hold: HoldRow | None = None, consumed: Sequence[int] = ()
) -> Append:
    """Return a unit written without running any code, which gives the run back."""
    assert may_become(row.status, change.status), f"{row.status} does not lead to {change.status}"
    unit = Append(
        run=row.id,
        generation=row.generation,
        epoch=row.epoch,
        expected_seq=row.head_seq,
        expected_digest=row.head_digest,
        events=journal.unsaved,
        row=change,
        hold=hold,
        release=True,
    )
    if journal.more is not None:
        journal.more.put_into(unit)
    unit.consumed = consumed
    return unit


def resolve_unit(
    app: "Surrounding",
    row: RunRow,
    hold: HoldRow,
    resolution: str,
    payload: bytes = b"",
    *,
    note: str,
    by: str,
    uncompensated: bool = False,
) -> Append:
    """Return the unit that resolves a hold. A damaged history gets no event; one found damaged here is an error."""
    from everstep.engine.holding import report_facts

    journal = _silent_journal(row, app.clock.now())
    history: list[Recorded] = []
    if hold.reason != "damaged":
        journal, history = journal_of(app, row)
    facts = report_facts(hold)
    status: Status = "queued"
    if hold.reason != "damaged":
        accepted = {int(seq): digest for seq, digest in facts.get("accepted", {}).items()}
        if resolution == "accept" and hold.reason == "diverged":
            _refuse_unfinished(hold, facts, history, accepted.keys())
        body = ev.RunResolved(hold.id, resolution, by, note, accepted if resolution == "accept" else {})
        body.call = int(facts.get("call", 0))
        if resolution == "accept" and hold.reason == "drift":
            body.facts = {one: msgspec.Raw(msgspec.json.encode(fact)) for one, fact in facts["facts"].items()}
        if resolution == "accept" and hold.reason == "budget":
            body.granted, body.part = msgspec.convert(facts["grant"], Limits), int(facts["part"])
        journal.record("run_resolved", hold.step, body, journal.at)
    if resolution in ("skip", "done"):
        raw, ref = journal.pack(payload)
        # Early: there may be outcomes before it that the code has not seen, and commands that follow from those.
        outcome = ev.StepCompleted(int(facts["call"]), raw, ref, int(facts["attempts"]), early=True, adopted=True)
        outcome.secret = _is_secret(history, outcome.call)
        outcome.skipped = resolution == "skip"
        _change_keys(app, journal, history, outcome.call, payload if resolution == "done" else None)
        journal.record("step_completed", hold.step, outcome, journal.at)
    elif resolution == "cancel":
        _record_cancelled(row.id, journal, history)
        status = "cancelled"
    elif resolution == "rollback":
        from everstep.engine.rollback import Account, note_rollback, refuse_what_is_left

        account = Account(history)
        refuse_what_is_left(app.store, row, account, allowed=uncompensated)
        note_rollback(journal, account)
        request = ev.RollbackRequested(by=by, note=note, uncompensated=uncompensated, early=True)
        journal.record("rollback_requested", "", request, journal.at)
    resolved = msgspec.structs.replace(hold, resolved_at=journal.at, resolution=resolution, by=by, note=note)
    change = RowChange(status, journal.at, None, row.current_step, budget=standing_after(history, journal))
    return bare_unit(row, journal, change, hold=resolved)


def _refuse_unfinished(hold: HoldRow, facts: Mapping[str, Any], history: Sequence[Recorded], asked: Set[int]) -> None:
    """Refuse to accept other arguments of an unfinished step: a hold of an older release may still offer it."""
    if "unfinished" in facts:
        return
    from everstep.engine.holding import cannot_accept
    from everstep.engine.recorded import finished_calls

    retried = [one for one in history if one.kind == "run_retried"]
    void = {n for one in retried for n in range(one.body.voids, one.seq)}
    finished = finished_calls(history, void)
    open_ones = [one for one in history if one.seq in asked and one.body.call not in finished]
    if unfinished := [f"{one.step} (event {one.seq})" for one in open_ones if one.kind != "request_answered"]:
        raise HoldConflict(f"'accept' does not resolve hold {hold.id} ({hold.reason}). {cannot_accept(unfinished)}")


def _change_keys(
    app: "Surrounding", journal: Journal, history: Sequence[Recorded], call: int, payload: bytes | None
) -> None:
    """If a step that a person settled has a key: what was done is shared from now on; what was skipped frees it.

    If it undoes a step with a key: what is undone frees that one, and what is skipped leaves it as it was.
    """
    started = next((one for one in reversed(history) if one.kind == "step_started" and one.body.call == call), None)
    if started is None:
        return
    from everstep.engine.rollback import Account, change_key

    account = Account(history)
    if started.body.key:
        from everstep.engine.keys import key_end

        journal.key_changes().ends.append(key_end(app.store.chain, started, payload))
        if payload is not None and started.body.compensate and account.is_undone:
            change_key(journal, call, started.body.key, "begun", None)
    if started.body.compensates in account.keyed:
        key, carried = account.keyed[started.body.compensates]
        change_key(journal, started.body.compensates, key, "undone" if payload is not None else "kept", carried)


def _is_secret(history: Sequence[Recorded], call: int) -> bool:
    """Tell whether a step is one whose outcome is never shown."""
    asking = ("step_started", "key_taken", "call_withheld")
    return any(event.kind in asking and event.body.call == call and event.body.secret for event in history)


def cancelled_unit(
    app: "Surrounding", row: RunRow, request: ev.CancelRequested, consumed: Sequence[int] = ()
) -> Append:
    """Return the unit with which a claimed run ends as cancelled, without its code."""
    journal, history = journal_of(app, row)
    journal.record("cancel_requested", "", request, journal.at)
    _record_cancelled(row.id, journal, history)
    change = RowChange("cancelled", journal.at, budget=standing_after(history, journal))
    return bare_unit(row, journal, change, consumed=consumed)


def _record_cancelled(run: str, journal: Journal, history: Sequence[Recorded]) -> None:
    """Children that should not outlive the run are asked to stop, in the same transaction."""
    from everstep.engine.children import outlives_not
    from everstep.engine.rollback import Account, note_no_rollback

    account = Account(history)
    if account.is_undone:
        note_no_rollback(journal, account)
    ended = {event.body.call for event in history if event.kind == "child_ended"}
    request = ev.encode_body(ev.CancelRequested(reason=f"its parent {run} was cancelled", by=run))
    for event in history:
        is_open = event.kind == "child_started" and event.body.call not in ended
        if is_open and outlives_not(event.body.on_parent_end, is_cancelled=True):
            journal.and_more().posts.append(Post(event.body.run, "cancel", value=request, at=journal.at))
    journal.record("run_cancelled", "", ev.RunCancelled(forced=True), journal.at)


def standing_after(history: Sequence[Recorded], journal: Journal) -> bytes | None:
    """Return how the budget of a run stands after what is recorded here without its code; None if it has none."""
    from everstep.model.accounts import standing_at

    new = [
        Recorded(seq, kind, step, at, ev.decode_body(kind, body)) for seq, kind, step, at, body, _ in journal.unsaved
    ]
    return standing_at([*history, *new]) if history else None


def journal_of(app: "Surrounding", row: RunRow) -> tuple[Journal, list[Recorded]]:
    """Return the growing end of a claimed run's verified history, for a unit that is written without its code."""
    history = load_verified(app.store, row)
    at = max(app.clock.now(), history[-1].at)
    key = app.store.chain.key(history[0].body.chain, row.id)
    return Journal(row.id, row.generation, row.head_seq, row.head_digest, at, key), history


def is_delayed(row: RunRow, at: int) -> bool:
    """Tell whether a run was started with a delay and has not begun: nothing but its time makes it begin."""
    return row.status == "waiting" and row.head_seq == 1 and row.wake_at is not None and row.wake_at > at


def is_unbegun(row: RunRow) -> bool:
    """Tell whether a run waits in its queue and has never begun."""
    return row.status == "queued" and row.head_seq == 1 and row.queue != DEFAULT_QUEUE and row.owner is None
