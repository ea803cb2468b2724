"""Units that are written about a run without its code: holds, resolutions, cancels, repairs."""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import msgspec

from everstep.engine.history.calls import Calls
from everstep.engine.history.damage import diagnose
from everstep.engine.history.effects import (
    change_key,
    left_by_children,
    note_no_rollback,
    note_rollback,
    refuse_what_is_left,
)
from everstep.engine.history.journal import Journal
from everstep.engine.history.verify import Recorded, load_verified
from everstep.engine.run.children import outlives_not
from everstep.engine.run.compensation import offering_rollback
from everstep.engine.run.holds import HoldReport, cannot_accept, damaged_report, report_facts
from everstep.engine.run.host import RunHost
from everstep.engine.run.keys import key_end
from everstep.errors import Damaged, HoldConflict
from everstep.model import events as ev
from everstep.model.accounts import standing_at
from everstep.model.budgets import Limits
from everstep.model.status import Status, may_become
from everstep.stores.protocol import Append, HoldRow, Post, RowChange, RunRow
from everstep.stores.rows.queues import DEFAULT_QUEUE


def hold_unit(app: "RunHost", row: RunRow, report: "HoldReport") -> Append:
    """Return the unit that puts a claimed run on hold. A damaged history gets no event, because nothing is added to
    it.
    """
    journal = _silent_journal(row, max(app.clock.now(), row.updated_at))
    if report.reason != "damaged":
        try:
            journal, history = journal_of(app, row)
            journal.at = max(journal.at, row.updated_at)
            calls = Calls(history)
            if calls.is_undone:
                report = report.but_not("rollback")
            else:
                left = partial(_all_that_stays, app, row.id, calls)
                report = offering_rollback(report, row.id, calls.undoable, left)
        except Damaged as error:
            report = damaged_report(error, diagnose(app.store, row))
    hold = report.row(row.id, journal.at, app.randomness)
    if report.reason != "damaged":
        journal.record("run_held", hold.step, ev.RunHeld(hold.id, hold.reason, hold.summary), journal.at)
    unit = bare_unit(row, journal, RowChange("held", journal.at, None, row.current_step), hold=hold)
    unit.notifications = app.notifier.rows(hold)
    return unit


def _all_that_stays(app: "RunHost", run: str, calls: Calls) -> list[str]:
    return calls.uncompensated or left_by_children(app.store, run)


def _silent_journal(row: RunRow, at: int) -> Journal:
    """Return a journal for a unit without events, because nothing is added to a damaged history."""
    return Journal(row.id, row.generation, row.head_seq, row.head_digest, at, b"")


def bare_unit(
    row: RunRow, journal: Journal, change: RowChange, *, hold: HoldRow | None = None, consumed: Sequence[int] = ()
) -> Append:
    """Return a unit that gives the run back, without running any code."""
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
    if journal.attached is not None:
        journal.attached.put_into(unit)
    unit.consumed = consumed
    return unit


def resolve_unit(
    app: "RunHost",
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
        calls = Calls(history)
        refuse_what_is_left(app.store, row, calls, allowed=uncompensated)
        note_rollback(journal, calls)
        request = ev.RollbackRequested(by=by, note=note, uncompensated=uncompensated, early=True)
        journal.record("rollback_requested", "", request, journal.at)
    resolved = msgspec.structs.replace(hold, resolved_at=journal.at, resolution=resolution, by=by, note=note)
    change = RowChange(status, journal.at, None, row.current_step, budget=standing_after(history, journal))
    return bare_unit(row, journal, change, hold=resolved)


def _refuse_unfinished(hold: HoldRow, facts: Mapping[str, Any], history: Sequence[Recorded], asked: Set[int]) -> None:
    """Refuse to accept other arguments of an unfinished step: a hold of an older release may still offer it."""
    if "unfinished" in facts:
        return
    finished = Calls(history).finished()
    open_ones = [one for one in history if one.seq in asked and one.body.call not in finished]
    if unfinished := [f"{one.step} (event {one.seq})" for one in open_ones if one.kind != "request_answered"]:
        raise HoldConflict(f"'accept' does not resolve hold {hold.id} ({hold.reason}). {cannot_accept(unfinished)}")


def _change_keys(
    app: "RunHost", journal: Journal, history: Sequence[Recorded], call: int, payload: bytes | None
) -> None:
    """Change the key of a step that a person settled: an outcome is shared from now on; a skip frees the key.

    If it compensates a step with a key: a completed compensation frees that key, and a skip leaves it as it was.
    """
    calls = Calls(history)
    settled = calls.current.get(call)
    if settled is None or (started := settled.started) is None:
        return
    if started.body.key:
        journal.key_changes().ends.append(key_end(app.store.chain, started, payload))
        if payload is not None and started.body.compensate and calls.is_undone:
            change_key(journal, call, started.body.key, "begun", None)
    if started.body.compensates in calls.keyed:
        key, carried = calls.keyed[started.body.compensates]
        change_key(journal, started.body.compensates, key, "undone" if payload is not None else "kept", carried)


def _is_secret(history: Sequence[Recorded], call: int) -> bool:
    """Return True if the outcome of a step is never shown."""
    asking = ("step_started", "key_taken", "call_withheld")
    return any(event.kind in asking and event.body.call == call and event.body.secret for event in history)


def cancelled_unit(app: "RunHost", row: RunRow, request: ev.CancelRequested, consumed: Sequence[int] = ()) -> Append:
    """Return the unit with which a claimed run ends as cancelled, without its code."""
    journal, history = journal_of(app, row)
    journal.record("cancel_requested", "", request, journal.at)
    _record_cancelled(row.id, journal, history)
    change = RowChange("cancelled", journal.at, budget=standing_after(history, journal))
    return bare_unit(row, journal, change, consumed=consumed)


def _record_cancelled(run: str, journal: Journal, history: Sequence[Recorded]) -> None:
    """Children that should not outlive the run are asked to stop, in the same transaction."""
    calls = Calls(history)
    if calls.is_undone:
        note_no_rollback(journal, calls)
    request = ev.encode_body(ev.CancelRequested(reason=f"its parent {run} was cancelled", by=run))
    for child in (call.started.body for call in calls.children() if call.started and call.outcome is None):
        if outlives_not(child.on_parent_end, is_cancelled=True):
            journal.attachments().posts.append(Post(child.run, "cancel", value=request, at=journal.at))
    journal.record("run_cancelled", "", ev.RunCancelled(forced=True), journal.at)


def standing_after(history: Sequence[Recorded], journal: Journal) -> bytes | None:
    """Return the budget of a run after what is recorded here without its code; None without a budget."""
    new = [
        Recorded(seq, kind, step, at, ev.decode_body(kind, body)) for seq, kind, step, at, body, _ in journal.unsaved
    ]
    return standing_at([*history, *new]) if history else None


def journal_of(app: "RunHost", row: RunRow) -> tuple[Journal, list[Recorded]]:
    """Return the journal of a claimed run's verified history, for a unit that is written without its code."""
    history = load_verified(app.store, row)
    at = max(app.clock.now(), history[-1].at)
    key = app.store.chain.key(history[0].body.chain, row.id)
    return Journal(row.id, row.generation, row.head_seq, row.head_digest, at, key), history


def is_delayed(row: RunRow, at: int) -> bool:
    """Return True if a run was started with a delay and has not begun: only its time makes it begin."""
    return row.status == "waiting" and row.head_seq == 1 and row.wake_at is not None and row.wake_at > at


def is_unbegun(row: RunRow) -> bool:
    """Return True if a run waits in its queue and has never begun."""
    return row.status == "queued" and row.head_seq == 1 and row.queue != DEFAULT_QUEUE and row.owner is None
