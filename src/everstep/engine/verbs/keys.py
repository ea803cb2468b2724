"""Operations on the keys of effects from outside: decide about one by hand, forget old ones."""

import asyncio
from typing import Any

import msgspec

from everstep.codec import PLAIN
from everstep.effects.atomic import in_transaction
from everstep.effects.databases import Database, Transaction
from everstep.engine.history.clock import microseconds
from everstep.engine.history.journal import packed
from everstep.engine.process.host import Host
from everstep.engine.run.acting import may_act
from everstep.errors import KeyConflict, Misuse
from everstep.model.crash_points import crash_point
from everstep.model.events import decode_body
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Refused
from everstep.stores.rows.keys import EffectRow, ForgetKeys, Forgotten, SettleKey


async def free(app: Host, key: str, note: str, by: str) -> None:
    """Free a key, so that its action may be done (again)."""
    await _settle(app, SettleKey(key, app.clock.now(), by=by, note=note))


async def settle(app: Host, key: str, value: Any, note: str, by: str) -> None:
    """Give an outcome to a key that was left in doubt; every step that asks for the key shares it."""
    payload = app.codec.encode(value, PLAIN, f"the outcome of {key!r}")
    row = await app.read(app.store.effect, key)
    seal = app.store.chain.seal(payload, key, row.step, row.arguments) if row is not None else ""
    await _settle(app, SettleKey(key, app.clock.now(), packed(payload), seal, by, note))


async def _settle(app: Host, operation: SettleKey) -> None:
    verdict = await app.committer.submit(operation)
    if isinstance(verdict, Accepted):
        app.pump.nudge()  # the inboxes of waiting runs have that
        return
    assert isinstance(verdict, Refused)
    row = await app.read(app.store.effect, operation.key)
    if row is None or row.state == "free":
        raise Misuse(f"No step has the key {operation.key!r} in {app.store.url}. `everstep effects` lists the keys.")
    raise KeyConflict(_why_not(row), row.key, row.run)


def _why_not(row: EffectRow) -> str:
    if row.state == "done":
        return f"The key {row.key!r} has an outcome, of {row.step} in run {row.run}. Free it first, if it is wrong."
    state = "being undone" if row.state == "undoing" else "under way"
    return (
        f"The key {row.key!r} is {state}: {row.step} of run {row.run} has it, and that run may still settle it. Decide "
        f"about the run first: `everstep show {row.run}`."
    )


async def forget(app: Host, before: int) -> int:
    """Delete keys that are done or free and have not changed since; return how many."""
    forgotten = 0
    while True:
        verdict = await app.committer.submit(ForgetKeys(before))
        assert isinstance(verdict, Forgotten)
        forgotten += verdict.keys
        if verdict.keys < ForgetKeys(0).limit:
            return forgotten


async def forget_markers(app: Host, database: Database[Any], older_than: float) -> int:
    """Delete the markers of runs of this store that have ended, and return how many there were."""
    before = app.clock.now() - microseconds(older_than)

    def listed(transaction: Transaction[Any]) -> Any:
        return transaction.marked_runs(before)

    def forgotten(run: str) -> int:
        """Forget one run in a separate transaction, so that other writers of the database need not wait long."""

        async def deleted(transaction: Transaction[Any]) -> int:
            counted = transaction.forget_markers(run, before)
            count = counted if isinstance(counted, int) else await counted
            crash_point("markers.forget.written")
            return count

        crash_point("markers.forget.before")
        count: int = in_transaction(database, app.store, deleted, commits=True)
        crash_point("markers.forget.after")
        return count

    runs = await asyncio.to_thread(in_transaction, database, app.store, listed)
    forgettable = [run for run in runs if await app.read(_may_be_forgotten, app, run)]
    return sum([await asyncio.to_thread(forgotten, run) for run in forgettable])


def _may_be_forgotten(app: Host, run: str) -> bool:
    """Return True if a run has ended, and no worker that lost it in one of its atomic steps can still wake up.

    A run that this store does not have belongs to another store, and is left alone.
    """
    row = app.store.run(run)
    if row is None or row.status not in ENDED or run in app.acting.runs():
        return False
    try:
        begun_by = {
            decode_body(event.kind, event.body).by
            for generation in range(1, row.generation + 1)
            for event in app.store.events(run, generation)
            if event.kind == "step_started"
        } - {""}
    except msgspec.MsgspecError:  # a damaged history is left alone
        return False
    return len(begun_by) < 2 or not any(may_act(app.store, worker, run) for worker in begun_by)
