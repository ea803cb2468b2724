"""Forgetting markers: those of ended runs, when nobody can need them any more."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.effects.atomic import in_transaction
from everstep.effects.databases import Database, Transaction
from everstep.engine.acting import may_act
from everstep.engine.clock import microseconds
from everstep.model.crash_points import crash_point
from everstep.model.events import decode_body
from everstep.model.status import ENDED

if TYPE_CHECKING:
    from everstep.engine.driving import Driving


async def forget_markers(app: "Driving", database: Database[Any], older_than: float) -> int:
    """Delete the markers of runs of this store that have ended, and return how many there were."""
    before = app.clock.now() - microseconds(older_than)

    def listed(transaction: Transaction[Any]) -> Any:
        return transaction.marked_runs(before)

    def forgotten(run: str) -> int:
        """Forget one run in a transaction of its own: others who write to the database need not wait long."""

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


def _may_be_forgotten(app: "Driving", run: str) -> bool:
    """Whether a run has ended, and no worker that was overtaken in one of its atomic steps can still wake up.

    A run that this store does not know is another store's, and is left alone.
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
    except msgspec.MsgspecError:  # a damaged history is left as it is
        return False
    return len(begun_by) < 2 or not any(may_act(app.store, worker, run) for worker in begun_by)
