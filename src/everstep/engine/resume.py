"""Taking up a claimed run, in the order that guarantees.md gives: verify the history, replay the code, settle, go on.

Whatever does not agree puts the run on hold, and nothing else is changed.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.engine.books import Books
from everstep.engine.children import outlives_not
from everstep.engine.clock import microseconds
from everstep.engine.driver import Driver, Surrounding
from everstep.engine.execution import Execution
from everstep.engine.history import Recorded, load_verified, without_collections
from everstep.engine.holding import HoldReport, damaged_report, diverged_report, poisoned_report, stuck_report
from everstep.engine.journal import Journal, restore_payload
from everstep.engine.loop import SpinningWorkflow
from everstep.engine.replay import Replay, Replayed, first_run
from everstep.engine.workflow import Workflow
from everstep.errors import Damaged, NotDecodable
from everstep.model import events as ev
from everstep.model.accounts import accounts_of
from everstep.model.budgets import Amounts, Limits
from everstep.model.semantics import SUPPORTED
from everstep.model.status import ENDED, Status, may_become
from everstep.stores.protocol import Append, HoldRow, Post, RowChange, RunRow, Store

log = logging.getLogger("everstep.run")

DEATHS_MAX = 3
"""A run whose drivers died this often in a row without progress, the last time alone, is held as poisoned."""


def take_up(
    app: Surrounding, row: RunRow, workflow: Workflow, events: list[Recorded] | None = None
) -> Driver | HoldReport:
    """Bring a claimed run to the point from which it goes on; or say why a person must look at it."""
    if row.deaths >= DEATHS_MAX:
        return poisoned_report(row.deaths)
    try:
        history = events if events is not None else load_verified(app.store, row)
        replayed = replay(app.store, app.codec, row, workflow, history)
    except Damaged as error:
        return damaged_report(error)
    except NotDecodable as error:
        return HoldReport("diverged", f"the arguments no longer decode: {error}", without=["accept"])
    if replayed.spins:
        replayed.execution.evict()
        return stuck_report(replayed.execution, SpinningWorkflow())
    if replayed.differences:
        replayed.execution.evict()
        return diverged_report(replayed.differences)
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, history[-1].at)
    stored = replayed.execution.lookup
    replayed.execution.lookup = lambda digest: journal.undurable.get(digest) or stored(digest)
    return Driver(app, row, replayed, journal, _clock_started_at(history))


def would_go_on(app: Surrounding, row: RunRow, workflow: Workflow) -> bool:
    """Tell whether the code as it is now matches a run's history. Changes nothing."""
    try:
        replayed = replay(app.store, app.codec, row, workflow, load_verified(app.store, row), quiet=True)
    except (Damaged, NotDecodable):
        return False
    replayed.execution.evict()
    return not replayed.differences


def replay(
    store: Store, codec: Any, row: RunRow, workflow: Workflow, history: list[Recorded], *, quiet: bool = False
) -> Replayed:
    """Replay a run's code against its history."""

    def lookup(digest: str) -> bytes:
        return restore_payload(store.payload(row.id, digest), digest)

    execution = Execution(workflow, run=row.id, generation=row.generation, codec=codec, lookup=lookup)
    if history[0].body.budget is not None:
        execution.books = Books(history[0].body, history[0].at)
    if len(history) == 1 and not quiet:
        return first_run(execution, history[0])
    with without_collections(len(history)):
        return Replay(execution, history).go(quiet=quiet)


def _clock_started_at(history: list[Recorded]) -> int:
    """Return when the run's time began: at its start and after its delay, or at its newest retry."""
    for event in reversed(history):
        if event.kind == "run_retried":
            return int(event.at)
    return int(history[0].at) + microseconds(history[0].body.delay)


def is_supported(row: RunRow) -> bool:
    """Tell whether this release can drive a run; one of a newer release is left for that release."""
    return row.semantics in SUPPORTED


def hold_unit(app: Surrounding, row: RunRow, report: HoldReport) -> Append:
    """Return the unit that puts a claimed run on hold. A damaged history gets no event: nothing is added to it."""
    at = max(app.clock.now(), row.updated_at)
    if report.reason != "damaged":
        try:
            at = max(at, load_verified(app.store, row)[-1].at)
        except Damaged as error:
            report = damaged_report(error)
    hold = report.row(row.id, at, app.randomness)
    return held(row, hold, at, damaged=report.reason == "damaged")


def held(row: RunRow, hold: HoldRow, at: int, *, damaged: bool) -> Append:
    """Return the unit with which a run is held."""
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, at)
    if not damaged:
        journal.record("run_held", hold.step, ev.RunHeld(hold.id, hold.reason, hold.summary), at)
    return bare_unit(row, journal, RowChange("held", at, None, row.current_step), hold=hold)


def bare_unit(
    row: RunRow, journal: Journal, change: RowChange, *, hold: HoldRow | None = None, consumed: Sequence[int] = ()
) -> Append:
    """Return a unit written without running any code, which gives the run back."""
    assert may_become(row.status, change.status), f"{row.status} does not lead to {change.status}"
    return Append(
        run=row.id,
        generation=row.generation,
        epoch=row.epoch,
        expected_seq=row.head_seq,
        expected_digest=row.head_digest,
        events=journal.unsaved,
        row=change,
        payloads=journal.payloads,
        consumed=consumed,
        posts=journal.posts,
        hold=hold,
        release=True,
    )


def resolve_unit(
    app: Surrounding, row: RunRow, hold: HoldRow, resolution: str, payload: bytes = b"", *, note: str, by: str
) -> Append:
    """Return the unit that resolves a hold. A damaged history gets no event; one found damaged here is an error."""
    journal = Journal(row.id, row.generation, row.head_seq, row.head_digest, app.clock.now())
    history: list[Recorded] = []
    if hold.reason != "damaged":
        journal, history = journal_of(app, row)
    facts = msgspec.json.decode(hold.report)
    status: Status = "queued"
    if hold.reason != "damaged":
        accepted = {int(seq): digest for seq, digest in facts.get("accepted", {}).items()}
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
        outcome = ev.StepCompleted(int(facts["call"]), raw, ref, int(facts["attempts"]), early=True)
        journal.record("step_completed", hold.step, outcome, journal.at)
    elif resolution == "cancel":
        _record_cancelled(row.id, journal, history)
        status = "cancelled"
    resolved = msgspec.structs.replace(hold, resolved_at=journal.at, resolution=resolution, by=by, note=note)
    change = RowChange(status, journal.at, None, row.current_step, budget=_budget_at_end(status, history))
    return bare_unit(row, journal, change, hold=resolved)


def cancelled_unit(app: Surrounding, row: RunRow, request: ev.CancelRequested, consumed: Sequence[int] = ()) -> Append:
    """Return the unit with which a claimed run ends as cancelled, without its code."""
    journal, history = journal_of(app, row)
    journal.record("cancel_requested", "", request, journal.at)
    _record_cancelled(row.id, journal, history)
    change = RowChange("cancelled", journal.at, budget=_budget_at_end("cancelled", history))
    return bare_unit(row, journal, change, consumed=consumed)


def _budget_at_end(status: Status, history: Sequence[Recorded]) -> bytes | None:
    """Return what the row of a run that ends without its code says about its budget, and so what its parent is told."""
    if status not in ENDED or not history or history[0].body.budget is None:
        return None
    accounts = accounts_of(history[0].body, history[0].at)
    for event in history:
        accounts.take(event.kind, event.step, event.body, event.at)
    standing = accounts.standing()
    standing.used, standing.reserved = accounts.total(), Amounts()
    return msgspec.json.encode(standing)


def _record_cancelled(run: str, journal: Journal, history: Sequence[Recorded]) -> None:
    """Children that should not outlive the run are asked to stop, in the same transaction."""
    ended = {event.body.call for event in history if event.kind == "child_ended"}
    request = ev.encode_body(ev.CancelRequested(reason=f"its parent {run} was cancelled", by=run))
    for event in history:
        is_open = event.kind == "child_started" and event.body.call not in ended
        if is_open and outlives_not(event.body.on_parent_end, is_cancelled=True):
            journal.posts.append(Post(event.body.run, "cancel", value=request, at=journal.at))
    journal.record("run_cancelled", "", ev.RunCancelled(forced=True), journal.at)


def journal_of(app: Surrounding, row: RunRow) -> tuple[Journal, list[Recorded]]:
    """Return the growing end of a claimed run's verified history, for a unit that is written without its code."""
    history = load_verified(app.store, row)
    at = max(app.clock.now(), history[-1].at)
    return Journal(row.id, row.generation, row.head_seq, row.head_digest, at), history


def is_delayed(row: RunRow, at: int) -> bool:
    """Tell whether a run was started with a delay and has not begun: nothing but its time makes it begin."""
    return row.status == "waiting" and row.head_seq == 1 and row.wake_at is not None and row.wake_at > at
