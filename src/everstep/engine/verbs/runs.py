"""Operations of a person or a program on a run from outside: signal, cancel, retry, hold, resolve, roll back.

None of them runs workflow code. Signals, cancels and rollbacks of unfinished runs go into the run's inbox. The others
claim the run, which fences the worker that drove it, append an event with the author and the request, and give the run
back.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.codec import PLAIN, is_same
from everstep.engine.code.replay import refuse_copied
from everstep.engine.history.calls import Calls
from everstep.engine.history.effects import (
    Relied,
    effects_since,
    lost_child,
    note_rollback,
    refuse_crossing,
    refuse_retry,
    refuse_rollback,
)
from everstep.engine.history.verify import (
    load_now,
    load_verified,
    refuse_deleted,
    refuse_no_status,
    refuse_unreadable,
    refuse_without_key,
    unknown_run,
)
from everstep.engine.process.host import Host
from everstep.engine.process.leases import wait_for_lapse
from everstep.engine.run.holds import asked_report, cannot_accept, consequence_of, report_of
from everstep.engine.run.inbox import ROLLBACK
from everstep.engine.run.units import (
    bare_unit,
    hold_unit,
    is_delayed,
    is_unbegun,
    journal_of,
    resolve_unit,
    standing_after,
)
from everstep.engine.verbs.repair import repair
from everstep.engine.verbs.wanted import refuse_wrong_type
from everstep.errors import Damaged, HoldConflict, IdConflict, Misuse, RunActive, RunEnded, RunHeld
from everstep.model import events as ev
from everstep.model.crash_points import crash_point
from everstep.model.digests import derived_key
from everstep.model.durations import Duration
from everstep.model.ids import checked_delivery_id, checked_name, checked_run_id
from everstep.model.options import checked_seconds
from everstep.model.status import ENDED, Status
from everstep.stores.protocol import (
    Claim,
    Claimed,
    Failed,
    HoldRow,
    NotPosted,
    Post,
    Posted,
    Refused,
    Release,
    RowChange,
    RunRow,
    Verdict,
)
from everstep.stores.rows.keys import KeyChanges


async def signal(app: Host, run: str, name: str, value: Any, id: str | None) -> bool:
    """Put a signal into a run's inbox. Returns True if it was not there before."""
    post = signal_post(app, run, name, value, id)
    await refuse_wrong_type(app, post)
    return await _post(app, post, "signalled")


def signal_post(app: Host, run: str, name: str, value: Any, id: str | None) -> Post:
    """Return a signal for a run's inbox."""
    name = checked_name(name, "signal")
    payload = app.codec.encode(value, PLAIN, f"the signal {name!r}")
    return Post(checked_run_id(run), "signal", name, checked_delivery_id(id, "signal", 500), payload, app.clock.now())


async def _post(app: Host, post: Post, verb: str) -> bool:
    verdict = await app.committer.submit(post)
    is_new = await app.read(told_of_post, app, post, verdict, verb)
    crash_point("delivery.posted")
    app.wake(post.run)
    return is_new


def told_of_post(app: Host, post: Post, verdict: Verdict, verb: str) -> bool:
    """Return True if a delivery is new in the inbox. Raises if it could not be delivered."""
    if isinstance(verdict, Failed):
        raise verdict.error
    if isinstance(verdict, NotPosted):
        if verdict.status is None:
            raise unknown_run(app.store, post.run)
        refuse_no_status(post.run, verdict.status)
        why = f"The run {post.run} has ended ({verdict.status}), so it cannot be {verb}."
        raise RunEnded(why + _what_became_of(app, post, verdict.status), verdict.status)
    assert isinstance(verdict, Posted)
    if verdict.duplicate and post.kind == "signal":
        there = next((one for one in app.store.signals(post.run) if one.number == verdict.number), None)
        if there is not None and not (there.name == post.name and is_same(there.value, post.value)):
            raise IdConflict(
                f"The id {post.id!r} belongs to another signal to the run {post.run} ({there.name}), or to one with "
                "another value. That one counts; this one was not sent. Use another id."
            )
    return not verdict.duplicate


def _what_became_of(app: Host, post: Post, status: Status) -> str:
    """Return the fate of a signal that was sent before, with the same id, to a run that has ended."""
    sent = (one for one in app.store.signals(post.run) if one.kind == post.kind and one.id == post.id != "")
    if not any(one.state == "undelivered" for one in sent):
        return ""
    then = f" If it is retried (`everstep retry {post.run}`), it gets it." if status == "failed" else ""
    return f" It was sent this signal before, and ended without taking it.{then}"


async def cancel(app: Host, run: str, reason: str, *, grace: Duration, now: bool, by: str) -> None:
    """Ask a run to stop. A held run, or with `now` one that no worker drives, ends right here, without its code."""
    row = await app.read(readable_row, app, run)
    grace = checked_seconds("grace", grace)
    if row.status == "held":
        await resolve(app, run, "cancel", hold=None, value=None, note=reason, by=by)
        return
    unbegun = is_delayed(row, app.clock.now()) or is_unbegun(row)
    now = now or unbegun  # a run that has not begun has nothing to clean up
    if now and run not in app.drivers and row.status not in ENDED and await _end_here(app, row, reason, by):
        return
    request = ev.CancelRequested(reason=reason, by=by, grace=grace, now=now)
    post = Post(run, "cancel", value=ev.encode_body(request), at=app.clock.now())
    await _post(app, post, "cancelled")


async def _end_here(app: Host, row: RunRow, reason: str, by: str) -> bool:
    with app.setting_aside(row.id):
        claimed = await _claim(app, row.id, ("queued", "running", "waiting"))
        if claimed is None:
            return False  # a worker drives it, and reads the inbox
        inbox = await app.read(app.store.inbox, row.id)
        if any(one.kind == "cancel" and one.name == ROLLBACK for one in inbox):
            await app.returns.give_back(Release(row.id, claimed.epoch, claimed.status))
            return False  # the other came first, and the worker that resumes the run sees both in order
        if await app.read(_is_unsettled, app, claimed):
            await app.returns.give_back(Release(row.id, claimed.epoch, claimed.status))
            return False  # whoever takes the run up settles that before it ends
        return await app.holding.end_claimed(claimed, ev.CancelRequested(reason=reason, by=by, now=True))


def _is_unsettled(app: Host, row: RunRow) -> bool:
    try:
        return bool(Calls(load_verified(app.store, row)).unsettled)
    except Damaged:
        return False  # the damage is reported where the run is ended


async def retry(app: Host, run: str, by: str, *, across_once: bool = False) -> None:
    """Continue a failed run from what failed. If that was a child run, the child is retried first."""
    row = await app.read(readable_row, app, run)
    if row.status != "failed":
        raise RunActive(f"The run {run} is {row.status}; only a failed run can be retried.")
    row, history = await app.read(load_now, app.store, row)
    if row.status != "failed":
        raise RunActive(f"The run {run} was retried by somebody else just now.")
    calls = Calls(history)
    refuse_retry(run, calls)
    voids, call = _what_failed(calls)
    refuse_copied(run, history[0].body, voids)
    relied = Relied(set(), set())
    crossed = await app.read(effects_since, app.store, run, calls, voids, relied)
    child = next((one.started for one in calls.children() if one.outcome and one.outcome.seq == voids), None)
    crossed += await app.read(lost_child, app.store, child) if child is not None else []
    refuse_crossing(run, crossed, across_once=across_once)
    if child is not None:
        child_row = await app.read(app.store.run, child.body.run)
        if child_row is not None and child_row.status == "failed":
            await retry(app, child.body.run, by, across_once=across_once)
    claimed = await _claim(app, run, ("failed",))
    if claimed is None:
        raise RunActive(f"The run {run} was retried by somebody else just now.")
    journal, history = await app.read(journal_of, app, claimed)
    entropy = _entropy_of_retry(history[0].body, journal.seq + 1)
    body = ev.RunRetried(voids, entropy, call, by, [one.seq for one in crossed if one.run == run])
    journal.record("run_retried", "", body, journal.at)
    change = RowChange("queued", journal.at, budget=standing_after(history, journal))
    unit = bare_unit(claimed, journal, change)
    unit.redeliver = True
    unit.keys = KeyChanges(relies=sorted(relied.keys)) if relied.keys else None
    verdict = await app.committer.submit(unit)
    if isinstance(verdict, Refused) and verdict.why == "key":  # a key was forgotten since it was read
        await app.returns.give_back(Release(run, claimed.epoch, claimed.status))
        await retry(app, run, by, across_once=across_once)
        return
    _expect_accepted(verdict, run)


def _entropy_of_retry(started: ev.RunStarted, seq: int) -> str:
    """Return the entropy for the keys of a retry's new calls.

    It is derived, not random: if the retry is lost with a restored backup, the next retry has the same keys again.
    """
    own = started.forked.entropy if started.forked is not None else started.entropy
    return derived_key(own, f"#retry {seq}")


def _what_failed(calls: Calls) -> tuple[int, int]:
    """Return the event from which on the run's history no longer counts, and the failed call."""
    end = calls.failed
    if end is None:
        raise Misuse("The run's history does not end with a failure.")
    failed = calls.current.get(end.body.call)
    outcome = failed.outcome if failed is not None else None
    failed_at = outcome.seq if outcome is not None and outcome.kind in ("step_failed", "child_ended") else 0
    if not failed_at and not calls.timed_out_at:
        return end.seq, 0
    return (failed_at, end.body.call) if failed_at > calls.timed_out_at else (calls.timed_out_at, 0)


async def hold(app: Host, run: str, note: str, by: str) -> None:
    """Put a run on hold: at once if no process drives it, else through its inbox.

    A run that is driven in this process gets it through the inbox as well: the hold may have to wait for a step that
    must not be cut off, and is durable meanwhile.
    """
    row = await app.read(readable_row, app, run)
    report = asked_report(note, by)
    if row.status == "held":
        raise HoldConflict(f"The run {run} is held already.")
    if run not in app.drivers:
        with app.setting_aside(run):
            claimed = await _claim(app, run, ("queued", "running", "waiting"))
            if claimed is not None:
                unit = await app.read(hold_unit, app, claimed, report)
                _expect_accepted(await app.committer.submit(unit), run)
                app.held(unit.hold)
                return
    await _post(app, Post(run, "hold", value=msgspec.json.encode(report), at=app.clock.now()), "held")
    if run in app.drivers:
        app.wake_driver(run)
        await app.committer.drained()
        row = await app.read(existing_row, app, run)
        if row.status in ENDED:
            raise RunEnded(f"The run {run} has ended ({row.status}), so it cannot be held.", row.status)


async def rollback(app: Host, run: str, note: str, *, by: str, uncompensated: bool) -> None:
    """Roll a run back. An unfinished run stops for that; an ended one is resumed."""
    row = await app.read(readable_row, app, run)
    if row.status == "held":
        how = {"uncompensated": uncompensated, "by_verb": True}
        await resolve(app, run, "rollback", hold=None, value=None, note=note, by=by, **how)
        return
    request = ev.RollbackRequested(by=by, note=note, uncompensated=uncompensated)
    if row.status in ENDED:
        await _roll_back_ended(app, row, request)
        return
    row, history = await app.read(load_now, app.store, row)
    if row.status == "held" or row.status in ENDED:  # just now
        await rollback(app, run, note, by=by, uncompensated=uncompensated)
        return
    await app.read(refuse_rollback, app.store, row, Calls(history), allowed=uncompensated)
    post = Post(run, "cancel", ROLLBACK, value=ev.encode_body(request), at=app.clock.now())
    try:
        await _post(app, post, "rolled back")
    except RunEnded:  # just now
        await rollback(app, run, note, by=by, uncompensated=uncompensated)


async def _roll_back_ended(app: Host, row: RunRow, request: ev.RollbackRequested) -> None:
    claimed = await _claim(app, row.id, tuple(ENDED))
    if claimed is None:
        raise RunActive(f"The run {row.id} was resumed by another process just now; look again.")
    try:
        journal, history = await app.read(journal_of, app, claimed)
        await app.read(refuse_rollback, app.store, claimed, Calls(history), allowed=request.uncompensated)
    except BaseException:
        await app.returns.give_back(Release(row.id, claimed.epoch, claimed.status))
        raise
    crash_point("rollback.claimed")
    note_rollback(journal, Calls(history))
    journal.record("rollback_requested", "", request, journal.at)
    change = RowChange("queued", journal.at, budget=standing_after(history, journal))
    _expect_accepted(await app.committer.submit(bare_unit(claimed, journal, change)), row.id)


async def resolve(
    app: Host,
    run: str,
    resolution: str,
    *,
    hold: str | None,
    value: Any,
    note: str,
    by: str,
    uncompensated: bool = False,
    by_verb: bool = False,
) -> None:
    """Record a person's decision, and let the run continue (or end)."""
    await app.read(existing_row, app, run)
    chosen = await app.read(_one_hold, app, run, hold)
    if resolution not in chosen.resolutions and not (by_verb and resolution in _by_verb(chosen)):
        hint = f" For {resolution!r} there is `everstep {resolution} {run}`." if resolution in _by_verb(chosen) else ""
        if resolution == "accept" and (unfinished := report_of(chosen).get("unfinished")):
            hint = f" {cannot_accept(unfinished)}"
        raise HoldConflict(
            f"{resolution!r} does not resolve hold {chosen.id} ({chosen.reason}). "
            f"Possible: {', '.join(f'{one} ({_consequence(chosen, one)})' for one in chosen.resolutions)}.{hint}"
        )
    refuse_going_on_twice(chosen, resolution, is_named=hold is not None)
    if resolution == "repair":
        await repair(app, run, note=note, by=by)
        return
    await app.read(readable_row, app, run)
    payload = app.codec.encode(value, PLAIN, "the value for --skip") if resolution in ("skip", "done") else b""
    claimed = await _claim(app, run, ("held",))
    if claimed is None:
        raise HoldConflict(f"Hold {chosen.id} was resolved by another process just now.")
    try:
        facts = {"note": note, "by": by, "uncompensated": uncompensated}
        unit = await app.read(resolve_unit, app, claimed, chosen, resolution, payload, **facts)
    except BaseException:
        await app.returns.give_back(Release(run, claimed.epoch, "held"))
        raise
    _expect_accepted(await app.committer.submit(unit), run)
    for post in unit.posts:
        app.wake(post.run)
    if unit.keys is not None:
        app.keys_changed(unit.keys)
    app.watchers.look_again(run)
    if resolution == "cancel":
        app.pump.nudge()  # a run here may follow it, and its inbox has that end now


def refuse_going_on_twice(hold: HoldRow, resolution: str, *, is_named: bool) -> None:
    """Refuse to continue an exported run here, because it continues elsewhere, unless the caller names exactly this
    hold.
    """
    path = report_of(hold).get("exported")
    if path is not None and resolution == "retry" and not is_named:
        raise HoldConflict(
            f"The run {hold.run} was exported to {path}, and continues where that is imported. If it is imported "
            f"nowhere and never will be, continue it here: `everstep resolve {hold.run} --retry --hold {hold.id}`."
        )


def _consequence(hold: HoldRow, resolution: str) -> str:
    return consequence_of(report_of(hold), resolution)


def _by_verb(hold: HoldRow) -> list[str]:
    """Return verbs that would resolve a hold and are not among its answers, because as an answer they would be
    refused, or do nothing.
    """
    return list(report_of(hold).get("by_verb", ()))


def _one_hold(app: Host, run: str, hold: str | None) -> HoldRow:
    """Return the chosen open hold; for ambiguous, unknown and resolved ones the error lists the open ones."""
    holds = app.store.holds(run=run)
    chosen = [one for one in holds if hold is None or one.id == hold]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(f"{one.id} ({one.reason})" for one in holds) or "none"
    if hold is None:
        hint = "Name one with --hold." if holds else "There is nothing to resolve."
        raise HoldConflict(f"The run {run} has {len(holds)} open holds: {listed}. {hint}")
    for one in app.store.holds(run=run, open_only=False):
        if one.id == hold and one.resolved_at is not None:
            by = f" by {one.by}" if one.by else ""
            raise HoldConflict(f"Hold {hold} was resolved already ({one.resolution}{by}). Open: {listed}.")
    raise HoldConflict(f"The run {run} has no open hold {hold}. Open: {listed}.")


def existing_row(app: Host, run: str) -> RunRow:
    """Return a run's row. Raises `UnknownRun` if there is none."""
    row = app.store.run(checked_run_id(run))
    if row is None:
        raise unknown_run(app.store, run)
    refuse_deleted(app.store, row)
    return row


def readable_row(app: Host, run: str) -> RunRow:
    """Return a run's row. Raises if there is none, or if it is damaged."""
    row = existing_row(app, run)
    refuse_unreadable(row)
    return row


async def _claim(app: Host, run: str, statuses: tuple[Status, ...]) -> RunRow | None:
    row = await app.read(existing_row, app, run)
    await app.read(refuse_without_key, app.store, row)  # a useless claim would only stop others
    await app.become_worker()
    await wait_for_lapse(app, row.owner)
    verdict = await app.committer.submit(Claim(run, app.worker, app.clock.now(), statuses))
    if isinstance(verdict, Claimed):
        return verdict.row
    refuse_deleted(app.store, row)
    return None


def _expect_accepted(verdict: Any, run: str) -> None:
    if isinstance(verdict, Refused):
        raise RunActive(f"The run {run} was taken over by another process just now; look again.")


def held_error(run: str, holds: Sequence[HoldRow], more: str = "") -> RunHeld:
    """Return the error for a caller that waits for a held run."""
    if not holds:
        return RunHeld(f"The run {run} is held.{more}")
    hold = holds[-1]
    then = f"; then `everstep resolve {run} --{hold.resolutions[0]}` or another resolution" if hold.resolutions else ""
    return RunHeld(
        f"The run {run} is held ({hold.reason}): {hold.summary.rstrip('.')}. See `everstep holds`{then}.{more}",
        hold.id,
        hold.reason,
    )
