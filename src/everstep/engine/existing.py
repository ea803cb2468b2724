"""`start` with the id of a run that exists: attach, retry, restart or fail."""

from typing import TYPE_CHECKING

import msgspec

from everstep.codec import Arguments
from everstep.engine import operations
from everstep.engine.agreement import refuse_unreadable
from everstep.engine.history import check_ends, refuse_deleted
from everstep.engine.repairing import damaged_hold
from everstep.engine.starting import Origin, new_run
from everstep.engine.workflow import Workflow
from everstep.errors import IdConflict, RunActive
from everstep.model.budgets import allotment_of
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Claim, Claimed, RestartRun, RunRow

if TYPE_CHECKING:
    from everstep.engine.app import App


async def existing_run(app: "App", row: RunRow, workflow: Workflow, arguments: Arguments, policy: str) -> None:
    """Do what the caller wants with a run that is there already."""
    is_held = policy == "restart" and row.status == "held"
    if is_held and damaged_hold(await app.read(app.store.holds, run=row.id)) is not None:
        await restart(app, row, workflow, arguments)
        return
    refuse_unreadable(row)
    refuse_deleted(app.store, row)
    if (row.workflow, row.arguments) != (workflow.name, arguments.digest):
        # So that damage is not taken for a conflict. The rest is verified when it is needed.
        await app.read(check_ends, app.store, row)
    if policy == "fail":
        raise IdConflict(f"The run {row.id} exists already ({row.status}), and on_existing is 'fail'.")
    if row.workflow != workflow.name:
        raise IdConflict(f"The id {row.id} belongs to a run of {row.workflow}, not of {workflow.name}. Use another id.")
    if policy == "restart":
        await restart(app, row, workflow, arguments)
        return
    if row.arguments != arguments.digest:
        raise IdConflict(
            f"The run {row.id} exists with other arguments ({row.preview}). Use another id, or on_existing='restart' "
            "once it has ended."
        )
    if policy == "retry" and row.status == "failed":
        try:
            await operations.retry(app, row.id, "")
        except RunActive:
            pass  # somebody else retries it just now: this is the same retry
    elif row.status in ENDED:
        return
    await go_on_with(app, row)


async def go_on_with(app: "App", row: RunRow) -> None:
    """Drive an unfinished run here, if nobody else does; a held one only if the code is right again."""
    if row.status == "held":
        await app.retry_diverged(row.id)
        return
    app.want(row.id)
    await app.read(app.store.bury_dead, app.clock.now())
    await app.take_up_run(row.id)


async def restart(app: "App", row: RunRow, workflow: Workflow, arguments: Arguments) -> None:
    """Begin an ended run again. Its old history is kept as an earlier generation.

    So is that of a run which is held as damaged: what cannot be repaired can at least be begun anew.
    """
    hold = damaged_hold(await app.read(app.store.holds, run=row.id)) if row.status == "held" else None
    if row.status not in ENDED and hold is None:
        raise RunActive(
            f"The run {row.id} is {row.status}: cancel it first (`everstep cancel {row.id}`), then restart it."
        )
    at = max(app.clock.now(), row.updated_at)
    if hold is not None:
        hold = msgspec.structs.replace(hold, resolved_at=at, resolution="restart")
    claim = await app.committer.submit(Claim(row.id, app.worker, at, (row.status,) if hold else tuple(ENDED)))
    if not isinstance(claim, Claimed):
        refuse_deleted(app.store, row)
        raise RunActive(f"The run {row.id} was restarted by somebody else just now.")
    new = new_run(
        workflow,
        row.id,
        arguments,
        at=at,
        randomness=app.randomness,
        generation=claim.row.generation + 1,
        tags=row.tags,
        priority=row.priority,
        queue=row.queue,
        parent=row.parent,
        origin=Origin(app.store.chain.writing, app.life),
        budget=allotment_of(workflow.budget),
    )
    verdict = await app.committer.submit(RestartRun(claim.row.epoch, new, hold))
    if not isinstance(verdict, Accepted):
        raise RunActive(f"The run {row.id} was taken over by somebody else just now.")
    app.adopt(row.id)
