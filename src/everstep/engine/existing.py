"""`start` with the id of a run that exists: attach, retry, restart or fail."""

from typing import TYPE_CHECKING

from everstep.codec import Arguments
from everstep.engine import operations
from everstep.engine.starting import new_run
from everstep.engine.workflow import Workflow
from everstep.errors import IdConflict, RunActive
from everstep.model.budgets import allotment_of
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Claim, Claimed, RestartRun, RunRow

if TYPE_CHECKING:
    from everstep.engine.app import App


async def existing_run(app: "App", row: RunRow, workflow: Workflow, arguments: Arguments, policy: str) -> None:
    """Do what the caller wants with a run that is there already."""
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
    app.store.bury_dead(app.clock.now())
    await app.take_up_run(row.id)


async def restart(app: "App", row: RunRow, workflow: Workflow, arguments: Arguments) -> None:
    """Begin an ended run again. Its old history is kept as an earlier generation."""
    if row.status not in ENDED:
        raise RunActive(
            f"The run {row.id} is {row.status}: cancel it first (`everstep cancel {row.id}`), then restart it."
        )
    at = max(app.clock.now(), row.updated_at)
    claim = await app.committer.submit(Claim(row.id, app.worker, at, tuple(ENDED)))
    if not isinstance(claim, Claimed):
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
        budget=allotment_of(workflow.budget),
    )
    verdict = await app.committer.submit(RestartRun(claim.row.epoch, new))
    if not isinstance(verdict, Accepted):
        raise RunActive(f"The run {row.id} was taken over by somebody else just now.")
    app.adopt(row.id)
