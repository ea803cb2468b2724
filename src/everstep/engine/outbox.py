"""Starting and signalling from outside of what drives runs: by name, or in a caller's own transaction.

A run that is started here has no owner: it is `queued`, for a worker that knows its workflow.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everstep.codec import Arguments
from everstep.engine.agreement import refuse_unreadable
from everstep.engine.by_name import NamedWorkflow, new_run_id
from everstep.engine.clock import microseconds
from everstep.engine.handles import Run
from everstep.engine.history import refuse_deleted
from everstep.engine.operations import signal_post, told_of_post
from everstep.engine.starting import Origin, new_run, refuse_start_options
from everstep.engine.workflow import Workflow
from everstep.errors import IdConflict, Misuse
from everstep.model.budgets import allotment_of
from everstep.model.crash_points import crash_point
from everstep.model.ids import checked_run_id
from everstep.model.options import checked_choice
from everstep.stores.protocol import Existing, Failed, NewRun, RunRow, StartRun

if TYPE_CHECKING:
    from everstep.engine.app import App


def unowned_run(
    app: "App",
    target: Workflow | NamedWorkflow,
    args: Sequence[Any],
    *,
    id: str | None,
    queue: str | None,
    priority: int,
    delay: float,
    tags: dict[str, str] | None,
) -> tuple[NewRun, Arguments]:
    """Return a run to be created that nobody drives yet."""
    refuse_start_options(priority, delay, tags, queue)
    at = app.clock.now()
    run = checked_run_id(id) if id is not None else new_run_id(target, at, app.randomness)
    arguments = app.codec.encode_arguments(target.signature, tuple(args), {}, target.name)
    new = new_run(
        target,
        run,
        arguments,
        at=at,
        randomness=app.randomness,
        tags=tags,
        priority=priority,
        queue=queue,
        wake_at=at + microseconds(delay) if delay > 0 else None,
        origin=Origin(app.store.chain.writing, app.store.life()),
        budget=allotment_of(target.budget),
    )
    return new, arguments


def attach(row: RunRow, target: Workflow | NamedWorkflow, arguments: Arguments, policy: str) -> None:
    """Accept a run that is there already if it is the same, and the caller wants that."""
    refuse_unreadable(row)
    if policy == "fail":
        raise IdConflict(f"The run {row.id} exists already ({row.status}), and on_existing is 'fail'.")
    if row.workflow != target.name:
        raise IdConflict(f"The id {row.id} belongs to a run of {row.workflow}, not of {target.name}. Use another id.")
    if row.arguments != arguments.digest:
        raise IdConflict(f"The run {row.id} exists with other arguments ({row.preview}). Use another id.")


def start_in(
    app: "App", target: Workflow | NamedWorkflow, args: Sequence[Any], policy: str, connection: Any, **options: Any
) -> Run[Any]:
    """Start a run in the caller's transaction: it is there if and only if that is committed."""
    if policy not in ("attach", "fail"):
        raise Misuse(
            f"on_existing={policy!r} cannot be done inside your transaction: with transaction= it is attach or fail."
        )
    app.refuse_when_failed()
    new, arguments = unowned_run(app, target, args, **options)
    (verdict,) = app.store.write_in(connection, [StartRun(new)])
    if isinstance(verdict, Failed):
        raise verdict.error
    if isinstance(verdict, Existing):
        refuse_deleted(app.store, verdict.row)
        attach(verdict.row, target, arguments, policy)
    crash_point("outbox.written")
    return Run(app, new.row.id, target.signature.result)


def signal_in(app: "App", run: str, name: str, value: Any, id: str | None, connection: Any) -> bool:
    """Send a signal in the caller's transaction: it is sent if and only if that is committed."""
    app.refuse_when_failed()
    post = signal_post(app, run, name, value, id)
    (verdict,) = app.store.write_in(connection, [post])
    is_new = told_of_post(app, post, verdict, "signalled")
    crash_point("outbox.written")
    return is_new


async def start_named(app: "App", target: NamedWorkflow, args: Sequence[Any], policy: str, **options: Any) -> Run[Any]:
    """Start a run of which only the workflow's name is known. The start is durable on return."""
    checked_choice("on_existing", policy, ("attach", "fail"))
    app.refuse_when_failed()
    new, arguments = await app.read(unowned_run, app, target, args, **options)
    verdict = await app.committer.submit(StartRun(new))
    if isinstance(verdict, Existing):
        refuse_deleted(app.store, verdict.row)
        attach(verdict.row, target, arguments, policy)
    return Run(app, new.row.id, target.signature.result)
