"""Starting runs and sending signals without driving runs: by name, or in a caller's own transaction.

A run that is started here has no owner: it is `queued`, for a worker that knows its workflow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from everstep.codec import Arguments, is_equal, without_internals
from everstep.engine.code.start import Origin, new_run, refuse_start_options, start_arguments
from everstep.engine.code.workflow import NamedWorkflow, Workflow, new_run_id
from everstep.engine.history.clock import microseconds
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import check_ends, event_at, refuse_deleted, refuse_unreadable
from everstep.engine.process.host import Host
from everstep.engine.verbs import runs
from everstep.engine.verbs.repair import damaged_hold
from everstep.engine.verbs.runs import signal_post, told_of_post
from everstep.engine.verbs.wanted import refuse_wrong_type_at_once
from everstep.errors import IdConflict, Misuse, NotDecodable, RunActive
from everstep.model.budgets import allotment_of
from everstep.model.crash_points import crash_point
from everstep.model.durations import Duration
from everstep.model.ids import checked_run_id
from everstep.model.options import checked_choice
from everstep.model.status import ENDED
from everstep.stores.protocol import Accepted, Claim, Claimed, Existing, Failed, NewRun, RestartRun, RunRow, StartRun


def unowned_run(
    app: Host,
    target: Workflow | NamedWorkflow,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    id: str | None,
    queue: str | None,
    priority: int,
    delay: Duration,
    tags: dict[str, str] | None,
) -> tuple[NewRun, Arguments]:
    """Return a run to create that no worker drives yet."""
    delay = refuse_start_options(priority, delay, tags, queue)
    at = app.clock.now()
    run = checked_run_id(id) if id is not None else new_run_id(target, at, app.randomness)
    arguments = start_arguments(app.codec, target, args, kwargs)
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


def has_arguments(app: Host, row: RunRow, target: Workflow | NamedWorkflow, arguments: Arguments) -> bool:
    """Return True if a run was started with equal arguments.

    Equal digests say so. Others do not: a model is equal whether a field was given or has its default, and a run that
    was started by name has plain data.
    """
    if row.arguments == arguments.digest:
        return True
    stored = _arguments_of(app, row)
    if stored is None or is_equal(stored, arguments.payload):
        return stored is not None
    try:
        args, kwargs = app.codec.decode_arguments(target.signature, stored)
        return is_equal(start_arguments(app.codec, target, args, kwargs).payload, arguments.payload)
    except (NotDecodable, Misuse, TypeError):  # the code takes other arguments now
        return False


def _arguments_of(app: Host, row: RunRow) -> bytes | None:
    """Return the payload of the arguments that a run was started with. A generation that its code began with
    `continue_as` has others, under the digest of the first.
    """
    for generation in dict.fromkeys((row.generation, 1)):
        started = event_at(app.store, msgspec.structs.replace(row, generation=generation), 1).body
        if started.digest == row.arguments and started.carried is None:
            ref = started.arguments_ref
            return restore_payload(app.store.payload(row.id, ref), ref) if ref else bytes(started.arguments)
    return None


def attach(app: Host, row: RunRow, target: Workflow | NamedWorkflow, arguments: Arguments, policy: str) -> None:
    """Accept an existing run if it is the same, and the caller allows that."""
    refuse_unreadable(row)
    if policy == "fail":
        raise IdConflict(f"The run {row.id} exists already ({row.status}), and on_existing is 'fail'.")
    if row.workflow != target.name:
        raise IdConflict(f"The id {row.id} belongs to a run of {row.workflow}, not of {target.name}. Use another id.")
    if not has_arguments(app, row, target, arguments):
        told = without_internals(row.preview)
        raise IdConflict(f"The run {row.id} exists with other arguments ({told}). {_by_name(arguments)}Use another id.")


def _by_name(arguments: Arguments) -> str:
    """Return what is said to a caller who gave arguments by name and has not got the workflow's signature."""
    if not arguments.kwargs:
        return ""
    return "Here only the workflow's name is known: give the arguments by place if they were given so before. "


def start_in(
    app: Host,
    target: Workflow | NamedWorkflow,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    policy: str,
    connection: Any,
    **options: Any,
) -> str:
    """Start a run in the caller's transaction: it exists if and only if that is committed."""
    if policy not in ("attach", "fail"):
        raise Misuse(
            f"on_existing={policy!r} cannot be done inside your transaction: with transaction= it is attach or fail."
        )
    app.refuse_when_failed()
    new, arguments = unowned_run(app, target, args, kwargs, **options)
    (verdict,) = app.store.write_in(connection, [StartRun(new)])
    if isinstance(verdict, Failed):
        raise verdict.error
    if isinstance(verdict, Existing):
        refuse_deleted(app.store, verdict.row)
        attach(app, verdict.row, target, arguments, policy)
    crash_point("outbox.written")
    return new.row.id


def signal_in(app: Host, run: str, name: str, value: Any, id: str | None, connection: Any) -> bool:
    """Send a signal in the caller's transaction: it is sent if and only if that is committed."""
    app.refuse_when_failed()
    post = signal_post(app, run, name, value, id)
    refuse_wrong_type_at_once(app, post)
    (verdict,) = app.store.write_in(connection, [post])
    is_new = told_of_post(app, post, verdict, "signalled")
    crash_point("outbox.written")
    return is_new


async def start_named(
    app: Host, target: NamedWorkflow, args: Sequence[Any], kwargs: Mapping[str, Any], policy: str, **options: Any
) -> str:
    """Start a run of which only the workflow's name is known. The start is durable on return."""
    checked_choice("on_existing", policy, ("attach", "fail"))
    app.refuse_when_failed()
    new, arguments = await app.read(unowned_run, app, target, args, kwargs, **options)
    verdict = await app.committer.submit(StartRun(new))
    if isinstance(verdict, Existing):
        await app.read(refuse_deleted, app.store, verdict.row)
        await app.read(attach, app, verdict.row, target, arguments, policy)
    return new.row.id


async def existing_run(app: Host, row: RunRow, workflow: Workflow, arguments: Arguments, policy: str) -> None:
    """Do what the caller wants with an existing run."""
    is_held = policy == "restart" and row.status == "held"
    if is_held and damaged_hold(await app.read(app.store.holds, run=row.id)) is not None:
        await restart(app, row, workflow, arguments)
        return
    refuse_unreadable(row)
    await app.read(refuse_deleted, app.store, row)
    if (row.workflow, row.arguments) != (workflow.name, arguments.digest):
        # So that damage is not reported as a conflict. The rest is verified when it is needed.
        await app.read(check_ends, app.store, row)
    if policy == "fail":
        raise IdConflict(f"The run {row.id} exists already ({row.status}), and on_existing is 'fail'.")
    if row.workflow != workflow.name:
        raise IdConflict(f"The id {row.id} belongs to a run of {row.workflow}, not of {workflow.name}. Use another id.")
    if policy == "restart":
        await restart(app, row, workflow, arguments)
        return
    if not await app.read(has_arguments, app, row, workflow, arguments):
        raise IdConflict(
            f"The run {row.id} exists with other arguments ({without_internals(row.preview)}). Use another id, or "
            "on_existing='restart' once it has ended."
        )
    if policy == "retry" and row.status == "failed":
        try:
            await runs.retry(app, row.id, "")
        except RunActive:
            pass  # another process retries it now: this is the same retry
    elif row.status in ENDED:
        return
    await go_on_with(app, row)


async def go_on_with(app: Host, row: RunRow) -> None:
    """Drive an unfinished run here, if no other worker does; a held one only if the code matches again."""
    if row.status == "held":
        await app.holding.retry_diverged(row.id)
        return
    app.want(row.id)
    await app.read(app.store.bury_dead, app.clock.now())
    await app.take_up_run(row.id)


async def restart(app: Host, row: RunRow, workflow: Workflow, arguments: Arguments) -> None:
    """Begin an ended run again. Its old history is kept as an earlier generation.

    So is that of a run which is held as damaged: what cannot be repaired can at least be restarted.
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
        await app.read(refuse_deleted, app.store, row)
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
        raise RunActive(f"The run {row.id} was taken over by another process just now.")
    app.adopt(row.id)
