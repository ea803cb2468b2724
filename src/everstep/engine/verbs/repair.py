"""Repairing a damaged run: the good part is kept, the rest is archived, and nothing is guessed.

The history ends at its last good event; everything after it, and every payload that does not match its digest, goes
into the archive, whole. The run's row is rebuilt from what is left. All that is one transaction, which also fences the
worker that drove the run. Steps that must not happen twice may have been begun in the lost part: from here on they are
in doubt when the code asks for them.
"""

from typing import Any, Final

import msgspec

from everstep.engine.history.damage import Diagnosis, UnseenStep, diagnose, open_steps, steps_in
from everstep.engine.history.journal import Journal, restore_payload
from everstep.engine.history.verify import (
    Recorded,
    created_at,
    preview_text,
    public_events,
    published_by,
    refuse_deleted,
    unknown_run,
)
from everstep.engine.process.host import Host
from everstep.engine.process.leases import wait_for_lapse
from everstep.engine.run.holds import report_of
from everstep.errors import Damaged, RunActive
from everstep.model.accounts import standing_at
from everstep.model.events import ENDS, EventRow, RunRepaired
from everstep.model.ids import checked_run_id
from everstep.model.status import STATUSES, Status
from everstep.stores.protocol import Accepted, HoldRow, RepairRun, RunRow, Store

NAMED_MAX = 100
"""The maximum number of steps begun in the archived part that the event names."""

TAKEN: Final = frozenset(
    {
        "signal_received",
        "signal_rejected",
        "request_received",
        "child_ended",
        "cancel_requested",
        "rollback_requested",
        "run_held",
    }
)
"""Events with the number of a delivery."""


class Repair(msgspec.Struct):
    """The result of `app.repair()`."""

    run: str
    problem: str
    """What was damaged; empty if the run is sound, and then nothing was done."""
    last_good: int
    archived: int = 0
    """How many events were archived."""
    status: str = ""
    unseen: list[UnseenStep] = []
    """Steps begun in the archived part, as far as it could be read: it is unknown whether they happened."""
    unreadable: int = 0
    """The number of archived events that could not be read: what was begun there is completely unknown."""
    open: list[UnseenStep] = []
    """Steps of the good part that were begun and have no outcome there; their contracts settle them."""


async def repair(app: Host, run: str, *, note: str, by: str, dry_run: bool = False) -> Repair:
    """Repair a damaged run, and report what is lost. A sound one is left alone."""
    row = await app.read(app.store.run, checked_run_id(run))
    if row is None:
        raise unknown_run(app.store, run)
    await app.read(refuse_deleted, app.store, row)
    found = await app.read(diagnose, app.store, row)
    note_lost_tail(found, damaged_hold(await app.read(app.store.holds, run=run)))
    report = _report(found, run)
    if not found.problem:
        return report
    if not found.is_repairable:
        raise Damaged(
            f"The run {run} cannot be repaired: nothing of its history is good ({found.problem}) Start it again with "
            "on_existing='restart' (`everstep run … --on-existing restart`), or restore a backup of the store.",
            0,
        )
    if run in app.drivers:
        raise RunActive(f"The run {run} is being driven by this process; it is held when its damage is found.")
    await app.become_worker()
    operation = await app.read(_operation, app, row, found, note=note, by=by)
    report.status = operation.row.status
    if dry_run:
        return report
    await wait_for_lapse(app, row.owner)
    if not isinstance(await app.committer.submit(operation), Accepted):
        raise RunActive(f"The run {run} is driven by a process that is alive, or was changed just now; look again.")
    app.untakeable.discard(run)
    app.watchers.look_again(run)
    return report


def note_lost_tail(found: Diagnosis, hold: HoldRow | None) -> None:
    """Repair a sound history whose hold reports a lost tail as well: with a caution, and nothing archived."""
    if found.problem or hold is None:
        return
    facts = report_of(hold)
    if "seen" in facts:
        found.problem, found.lost = hold.summary, True
        found.unseen, found.unseen_by = list(facts.get("begun", ())), list(facts.get("workers", ()))


def _report(found: Diagnosis, run: str) -> Repair:
    unseen, _, unreadable = steps_in(found)
    return Repair(
        run=run,
        problem=found.problem,
        last_good=found.last_good,
        archived=len(found.rest),
        unseen=unseen,
        unreadable=unreadable,
        open=open_steps(found.good),
    )


def _operation(app: Host, row: RunRow, found: Diagnosis, *, note: str, by: str) -> RepairRun:
    at = max(app.clock.now(), found.good[-1].at)
    holds = app.store.holds(run=row.id)
    damaged = damaged_hold(holds)
    resolved = None
    if damaged is not None:
        resolved = msgspec.structs.replace(damaged, resolved_at=at, resolution="repair", by=by, note=note)
    others = [hold for hold in holds if hold is not damaged]
    new = _row_of(app.store, row, found, is_held=bool(others))
    key = app.store.chain.key(found.good[0].body.chain, row.id)
    event = _event(new, found, at, key, note=note, by=by)
    if event is not None:
        new.head_seq, new.head_digest, new.updated_at = event.seq, event.digest, event.at
    return RepairRun(
        epoch=row.epoch,
        worker=app.worker,
        at=at,
        row=new,
        keep=found.last_good,
        event=event,
        payloads=found.payloads,
        pending=_unconsumed(app.store, row.id, found),
        hold=resolved,
        why=found.problem,
    )


def _event(new: RunRow, found: Diagnosis, at: int, key: bytes, *, note: str, by: str) -> EventRow | None:
    """Return the event that records the repair. A history that has ended gets none."""
    if found.good[-1].kind in ENDS:
        return None
    steps, workers, _ = steps_in(found)
    body = RunRepaired(
        archived=len(found.rest),
        since=found.last_good + 1,
        lost=found.lost,
        why=found.problem,
        steps=[*(f"{step.step} ({step.effect})" for step in steps), *found.unseen][:NAMED_MAX],
        workers=sorted({*workers, *found.unseen_by}),
        status=new.status,
        by=by,
        note=note,
    )
    journal = Journal(new.id, new.generation, found.last_good, found.digest, found.good[-1].at, key)
    journal.record("run_repaired", "", body, at)
    return journal.unsaved[0]


def _row_of(store: Store, row: RunRow, found: Diagnosis, *, is_held: bool) -> RunRow:
    """Return the row according to the good part of the history. Other columns are kept where they can be read."""
    first, last = found.good[0], found.good[-1]
    ended = last.kind.removeprefix("run_") if last.kind in ENDS else ""
    status: Status = "held" if is_held else "queued"
    if ended:
        status = next(one for one in STATUSES if one == ended)
    started = first.body
    return RunRow(
        id=row.id,
        workflow=started.workflow,
        version=started.version,
        semantics=started.semantics,
        status=status,
        generation=found.generation,
        head_seq=last.seq,
        head_digest=found.digest,
        queue=row.queue if not row.damage else "default",
        priority=row.priority,
        tags=row.tags,
        parent=started.parent or None,
        arguments=started.digest,
        preview=preview_text(_payload(store, row.id, started.arguments, started.arguments_ref)),
        outcome=_outcome(store, row.id, last),
        published=_published(store, row.id, found.good),
        budget=standing_at(found.good),
        created_at=created_at(first),
        updated_at=last.at,
        ended_at=last.at if ended else None,
    )


def _payload(store: Store, run: str, value: Any, ref: str) -> bytes:
    return restore_payload(store.payload(run, ref), ref) if ref else bytes(value)


def _outcome(store: Store, run: str, last: Recorded) -> bytes | None:
    if last.kind not in ("run_completed", "run_failed"):
        return None
    return _payload(store, run, last.body.value if last.kind == "run_completed" else last.body.error, last.body.ref)


def _published(store: Store, run: str, good: list[Recorded]) -> bytes | None:
    values = published_by(good)
    if not values:
        return None
    return msgspec.json.encode(
        {name: msgspec.Raw(_payload(store, run, body.value, body.ref)) for name, body in values.items()}
    )


def _unconsumed(store: Store, run: str, found: Diagnosis) -> list[int]:
    """Return the deliveries that no remaining event has taken: they become pending again.

    So do signals and requests that were undelivered because of an end which is no longer in the history.
    """
    taken = {event.body.number for event in found.good if event.kind in TAKEN}
    for generation in store.generations(run):
        if generation < found.generation:
            taken |= _numbers(store, run, generation)
    known = store.signals(run)
    news = [one.number for one in known if one.state == "consumed" and one.kind != "hold" and one.number not in taken]
    if found.good[-1].kind not in ENDS:
        news += [one.number for one in known if one.state == "undelivered" and one.kind in ("signal", "request")]
    return news


def _numbers(store: Store, run: str, generation: int) -> set[int]:
    """Return the numbers of deliveries that an earlier generation took, as far as it can be read."""
    events = public_events(store.events(run, generation))
    return {event.body.get("number", 0) for event in events if event.kind in TAKEN}


def damaged_hold(holds: list[HoldRow]) -> HoldRow | None:
    """Return the hold of a run whose history is damaged, if it has one."""
    return next((hold for hold in holds if hold.reason == "damaged"), None)
