"""What an application may ask: start runs, ask and tell them, look after them, and schedule them."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple, overload

from everstep.codec import ANY
from everstep.effects.databases import database_of
from everstep.engine.app.handles import Run
from everstep.engine.code.start import Origin, new_run, refuse_start_options, start_arguments
from everstep.engine.code.workflow import DECLARED, ON_EXISTING, OnExisting, Workflow, new_run_id, workflow_of
from everstep.engine.history.clock import microseconds
from everstep.engine.process.host import Host
from everstep.engine.process.retention import Collected, collect
from everstep.engine.verbs import approve, ask, fork, keys, queues, repair, runs, start, transfer
from everstep.engine.verbs.approve import Approval
from everstep.engine.verbs.gone import Gone, declare
from everstep.engine.verbs.keys import forget_markers
from everstep.engine.verbs.repair import Repair
from everstep.engine.verbs.schedules import Schedule, Scheduled, define, scheduled
from everstep.engine.verbs.start import existing_run, start_in
from everstep.engine.verbs.transfer import Exported, Imported, Unfinished
from everstep.errors import Misuse, StoreError
from everstep.model.budgets import allotment_of
from everstep.model.ids import checked_key, checked_name, checked_run_id
from everstep.model.options import (
    check_flags,
    check_optional_texts,
    check_texts,
    checked_choice,
    checked_path,
    checked_seconds,
    checked_tags,
    checked_text,
    checked_whole,
    refused,
)
from everstep.model.retention import Retention
from everstep.model.schedules import CatchUp, Overlap
from everstep.model.status import STATUSES
from everstep.model.untrusted import is_a
from everstep.stores.protocol import Existing, HoldRow, RunFilter, RunRow, StartRun
from everstep.stores.rows.keys import STATES, EffectFilter, EffectRow, EffectState, shown_effect
from everstep.stores.rows.queues import DEFAULT_QUEUE, QueueRow

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class App(Host):
    """Starts runs, drives those it started (and with `recover` those whose owner is gone), and answers questions."""

    # -- starting --------------------------------------------------------------------------------------------------
    @overload
    async def start(
        self,
        workflow: Callable[[*Ts], Coroutine[Any, Any, R]],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        queue: str | None = ...,
        priority: int = ...,
        delay: float = ...,
        tags: dict[str, str] | None = ...,
        transaction: Any = ...,
    ) -> Run[R]: ...
    @overload
    async def start(
        self,
        workflow: Callable[[*Ts], R],
        /,
        *args: *Ts,
        id: str | None = ...,
        on_existing: OnExisting | None = ...,
        queue: str | None = ...,
        priority: int = ...,
        delay: float = ...,
        tags: dict[str, str] | None = ...,
        transaction: Any = ...,
    ) -> Run[R]: ...
    async def start(  # type: ignore[misc]  # mypy does not see that *args: Any takes any *Ts
        self,
        workflow: Any,
        /,
        *args: Any,
        id: str | None = None,
        on_existing: OnExisting | None = None,
        queue: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        tags: dict[str, str] | None = None,
        transaction: Any = None,
    ) -> Run[Any]:
        """Start a run, or with the id of an existing one do what `on_existing` says. The start is durable on return.

        on_existing: `attach` (default: the same workflow and arguments give the same run, and if its owner is gone it
            resumes here; others are an `IdConflict`), `retry` (attach, and a failed run continues from what failed),
            `restart` (an ended run begins again; its old history is kept), or `fail`.
        queue: which queue it waits in (default: its workflow's). In the queue `default` nothing waits: this app begins
            it at once. See `queue`.
        priority: among the runs that wait in one queue, a higher priority begins first; then the oldest run.
        delay: seconds before it begins.
        tags: names and values to find the run by later. `per_key` of a queue counts by the tag `key`.
        transaction: a connection to the store's database with an open transaction of yours (an `apsw.Connection` to its
            file): the run exists if and only if you commit. It is `queued` then, for a worker.
        """
        target = workflow_of(workflow)
        policy = target.on_existing if on_existing is None else checked_choice("on_existing", on_existing, ON_EXISTING)
        refuse_start_options(priority, delay, tags, queue)
        if transaction is not None:
            options: Any = {"id": id, "queue": queue, "priority": priority, "delay": delay, "tags": tags}
            return Run(self, start_in(self, target, args, policy, transaction, **options), target.signature.result)
        run, is_new = checked_run_id(id) if id is not None else self._new_id(target), id is None
        arguments = start_arguments(self.codec, target, args)
        if not self.worker:
            await self.become_worker()
        self.refuse_when_failed()
        at = self.clock.now()
        in_line = (queue := queue or target.queue) != DEFAULT_QUEUE
        new = new_run(
            target,
            run,
            arguments,
            at=at,
            randomness=self.randomness,
            owner=None if in_line else self.worker,
            tags=tags,
            priority=priority,
            queue=queue,
            wake_at=at + microseconds(delay) if delay > 0 else None,
            origin=Origin(self.store.chain.writing, self.life),
            budget=allotment_of(target.budget),
        )
        begun = self.committer.submit(StartRun(new))
        if is_new and delay <= 0 and not in_line:
            # Nobody else has this id, so the code may begin at once: its first events share the start's commit.
            self.drive_new(new, target)
        try:
            verdict = await begun
        except StoreError:
            self._drop(run)
            raise
        if isinstance(verdict, Existing):
            await existing_run(self, verdict.row, target, arguments, policy)
        elif in_line or delay > 0:
            self.queueing.expect(new.row)
            self.pump.nudge()
        elif not is_new:
            self.drive_new(new, target)
        return Run(self, run, target.signature.result)

    def _drop(self, run: str) -> None:
        """The start of a run cannot be durable: if its driver has begun already, that is dropped."""
        if run in self.drivers:
            self.let_go(self.drivers[run])

    def _new_id(self, workflow: Workflow) -> str:
        return new_run_id(workflow, self.clock.now(), self.randomness)

    @overload
    async def run(
        self, workflow: Callable[[*Ts], Coroutine[Any, Any, R]], /, *args: *Ts, id: str | None = ..., **options: Any
    ) -> R: ...
    @overload
    async def run(self, workflow: Callable[[*Ts], R], /, *args: *Ts, id: str | None = ..., **options: Any) -> R: ...
    async def run(self, workflow: Any, /, *args: Any, id: str | None = None, **options: Any) -> Any:  # type: ignore[misc]  # as in App.start
        """Start a run and wait for its result. The options are those of `start`."""
        return await (await self.start(workflow, *args, id=id, **options)).result()

    # -- asking and telling ----------------------------------------------------------------------------------------
    def get(self, run: str) -> Run[Any]:
        """Return a handle on a run by its id."""
        return Run(self, checked_run_id(run))

    def result_types(self, run: Run[Any]) -> Any:
        """Return what a run's result may decode to: its workflow's return type, if that is declared here."""
        row = self.store.run(run.id)
        try:
            return DECLARED.named(row.workflow).signature.result if row is not None else ANY
        except Misuse:
            return ANY

    async def list(
        self,
        *,
        status: str | Sequence[str] = (),
        workflow: str | None = None,
        parent: str | None = None,
        tags: dict[str, str] | None = None,
        text: str = "",
        before: RunRow | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Sequence[RunRow]:
        """Return runs, newest first.

        tags: all of these. They are found by an index.
        text: in the id, the workflow, the arguments' preview or a tag (`name=value`); capital letters do not matter.
        before: the last run of the page before, to page on also while new runs arrive.
        """
        if not is_a(status, str, list, tuple, set, frozenset):
            raise refused("status", status, 'it is a status, or a list of them, such as status=["held", "failed"]')
        wanted = (status,) if isinstance(status, str) else tuple(status)
        check_optional_texts(workflow=workflow, parent=parent)
        if before is not None and not is_a(before, RunRow):
            raise refused("before", before, "it is a run of the page before, as `list` returned it")
        for one in wanted:
            checked_choice("status", one, STATUSES)
        return await self.read(
            self.store.runs,
            RunFilter(
                status=wanted,  # type: ignore[arg-type]
                workflow=workflow,
                parent=parent,
                tags=checked_tags(tags) or {},
                text=checked_text("text", text),
                before=(before.created_at, before.id) if before is not None else None,
                limit=checked_whole("limit", limit),
                offset=checked_whole("offset", offset),
            ),
        )

    async def signal(
        self, run: str, name: str, value: Any = None, *, id: str | None = None, transaction: Any = None
    ) -> bool:
        """Send a signal to a run. It is durable on return. Raises `RunEnded` or `UnknownRun`.

        With an `id`, the run gets the signal once, however often it is sent: this returns False if it has been sent
        before, and raises `IdConflict` if that had another name or value. A run that is restarted may get it again.

        transaction: as in `start`: the signal is sent if and only if you commit.
        """
        if transaction is not None:
            return start.signal_in(self, run, name, value, id, transaction)

        return await runs.signal(self, run, name, value, id)

    async def ask(
        self,
        run: str,
        name: str,
        value: Any = None,
        *,
        id: str | None = None,
        answer: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Send a request to a run and wait for its answer, which is durable when this returns.

        id: asking again with the same one, also after a crash, gives the same answer and is one request to the run.
        answer: the type that the answer must have.
        timeout: seconds after which `NoAnswer`, a `TimeoutError`, is raised; the run keeps the request.

        Raises `RequestRefused` or the error with which the run refused it, `RunEnded` when the run has ended without
        an answer, `RunHeld` when it waits for a person, `UnknownRun`, and `IdConflict` when the id belongs to another
        request.
        """
        return await ask.ask(self, run, name, value, id=id, answer=answer, timeout=timeout)

    async def approvals(self, run: str | None = None) -> Sequence[Approval]:
        """Return what waits for a person's answer (`everstep.approval`), in one run or in all, the oldest first."""
        return await approve.approvals(self, None if run is None else checked_run_id(run))

    async def approve(
        self,
        run: str,
        answer: Any = True,
        *,
        what: str | None = None,
        id: str | None = None,
        arguments: Any = ...,
        by: str = "",
        note: str = "",
    ) -> Approval:
        """Answer an approval (`everstep.approval`) for which a run waits, and return it. It is durable on return.

        answer: any JSON value; `True` by default.
        what, id: which one is meant, if the run waits for more than one. An id is bound to the arguments that it was
            shown with.
        arguments: those that you have seen: if the run asks about other arguments, no answer is given.
        by, note: who answers, and why, for the history.

        Raises `ApprovalConflict` if there is no such approval, more than one, if it has its answer or has expired, or
        if it is about other arguments; `RunEnded` or `UnknownRun`.
        """
        check_optional_texts(what=what, id=id)
        check_texts(by=by, note=note)
        return await approve.approve(self, run, answer, what=what, id=id, arguments=arguments, by=by, note=note)

    # -- looking after runs ----------------------------------------------------------------------------------------
    async def cancel(self, run: str, reason: str = "", *, grace: float = 30.0, now: bool = False, by: str = "") -> None:
        """Ask a run to stop. Its code gets `asyncio.CancelledError` and may clean up for `grace` seconds; with `now` it
        ends without its code. The request is durable on return. Raises `RunEnded` if the run had ended.
        """
        check_texts(reason=reason, by=by)
        check_flags(now=now)
        await runs.cancel(self, run, reason, grace=grace, now=now, by=by)

    async def retry(self, run: str, *, by: str = "", across_once: bool = False) -> Run[Any]:
        """Let a failed run continue from what failed, as a new attempt, and drive it if its workflow is declared here.

        across_once: also if `once` steps have happened after the failure, which otherwise raises `CrossesOnce`. If the
            code comes to the same step with the same arguments again, it is given that outcome and does not do it.
        """
        check_texts(by=by)
        check_flags(across_once=across_once)
        await runs.retry(self, run, by, across_once=across_once)
        await self._want_if_declared(run)
        return Run(self, run)

    async def rollback(self, run: str, note: str = "", *, allow_uncompensated: bool = False, by: str = "") -> Run[Any]:
        """Undo what a run did: the compensations of its completed steps run, the last step's first. Then it is
        `cancelled`. An unfinished run stops for that, and its code does not run. The request is durable on return.

        allow_uncompensated: roll back also if that leaves effects that must not happen twice and have no `compensate=`.
            Without it that is refused (`Uncompensated`).
        """
        check_texts(note=note, by=by)
        check_flags(allow_uncompensated=allow_uncompensated)
        await runs.rollback(self, run, note, by=by, uncompensated=allow_uncompensated)
        await self._want_if_declared(run)
        return Run(self, run)

    async def fork(
        self,
        run: str,
        *,
        at: int,
        args: Sequence[Any] | None = None,
        outcome: Any = ...,
        id: str | None = None,
        generation: int | None = None,
        allow_effects: bool | Collection[str] = False,
        note: str = "",
        by: str = "",
    ) -> Run[Any]:
        """Start a new run that begins with what another one did up to the event `at`, and continues from there.

        The other run, whatever its status, is not touched. The fork is durable on return; asked for again with the same
        `id` it is the same fork. Raises `Misuse` if there can be none at that event, or if the code would not do with
        the new `args` what was recorded.

        args: other arguments of the workflow. With `at=1` any will do.
        outcome: what takes the place of the outcome that the event `at` records: a step's, a signal's or a child's.
        generation: which history of the run, if not the newest.
        allow_effects: the names of steps that the fork may do once more although the other run has done them after
            `at`, or True for all. Without it that is refused (`CrossesOnce`), with the list.
        """
        check_texts(note=note, by=by)
        checked_whole("at", at)  # which of them there are is told later
        if generation is not None:
            checked_whole("generation", generation, least=1)
        if not is_a(allow_effects, bool, list, tuple, set, frozenset):
            wanted_text = 'it is True, or a list of names of steps, such as allow_effects=["pay"]'
            raise refused("allow_effects", allow_effects, wanted_text)
        for one in () if is_a(allow_effects, bool) else allow_effects:  # type: ignore[union-attr]
            checked_text("allow_effects", one)
        wanted = fork.Wanted(run, at, generation, args, outcome, id, allow_effects, by, note)
        forked = await fork.fork(self, wanted)
        await self._want_if_declared(forked)
        return Run(self, forked)

    async def hold(self, run: str, note: str = "", *, by: str = "") -> None:
        """Put a run on hold until a person or a program resolves it."""
        check_texts(note=note, by=by)
        await runs.hold(self, run, note, by)

    async def holds(self, *, run: str | None = None, open_only: bool = True) -> Sequence[HoldRow]:
        """Return holds, open ones only by default."""
        check_flags(open_only=open_only)
        run = None if run is None else checked_run_id(run)
        return await self.read(self.store.holds, run=run, open_only=open_only)

    async def resolve(
        self,
        run: str,
        resolution: str,
        *,
        hold: str | None = None,
        value: Any = None,
        note: str = "",
        by: str = "",
    ) -> Run[Any]:
        """Resolve a run's hold in one of the ways that it offers; the run then resumes, or ends.

        resolution: `retry`, `accept`, `skip` and `done` (both with `value`), `not-done`, `probe`, `repair`, `rollback`
            or `cancel`, as the hold's reason allows.
        hold: which one, if the run has more than one.
        note, by: why, and who decided; both are kept in the history.
        """
        check_texts(resolution=resolution, note=note, by=by)
        check_optional_texts(hold=hold)
        await runs.resolve(self, run, resolution, hold=hold, value=value, note=note, by=by)
        if resolution != "cancel":
            await self._want_if_declared(run)
        return Run(self, run)

    async def forget_markers(self, database: Any, *, older_than: float = 30 * 86400.0) -> int:
        """Delete the markers of atomic steps whose runs have ended, and return their number.

        database: as in `@everstep.transaction(database)`.
        older_than: minimum number of seconds that a marker is kept. Keep them longer than your oldest backup of the
            store: a run that is restored from it learns from its markers what has happened since.
        """
        return await forget_markers(self, database_of(database), checked_seconds("older_than", older_than))

    async def effects(
        self,
        *,
        prefix: str = "",
        run: str | None = None,
        step: str | None = None,
        state: EffectState | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Sequence[EffectRow]:
        """Return the keys of effects (`key=`), those that changed last first.

        state: `under-way`, `done`, `undoing` (its run is compensating it) or `free`. Of a step with `secret=True` the
        outcome is left out.
        """
        if state is not None:
            checked_choice("state", state, STATES)
        check_texts(prefix=prefix)
        check_optional_texts(run=run, step=step)
        checked_whole("limit", limit)
        checked_whole("offset", offset)
        wanted = EffectFilter(prefix=prefix, run=run, step=step, state=state, limit=limit, offset=offset)
        return [shown_effect(row) for row in await self.read(self.store.effects, wanted)]

    async def free_key(self, key: str, *, note: str = "", by: str = "") -> None:
        """Free a key by hand: its action may be done again. If it had been done, its receiver sees another key then.

        Raises `KeyConflict` while a run that has not ended may still settle it.
        """
        check_texts(note=note, by=by)
        await keys.free(self, checked_key(key, "an action"), note, by)

    async def settle_key(self, key: str, value: Any = None, *, note: str = "", by: str = "") -> None:
        """Settle an action in doubt whose run has ended: `value` is its outcome for every step that asks."""
        check_texts(note=note, by=by)
        await keys.settle(self, checked_key(key, "an action"), value, note, by)

    async def forget_keys(self, *, older_than: float) -> int:
        """Delete keys that are done or free and have not changed for `older_than` seconds. Return their number.

        Until then a key is kept, also when its run was deleted. A forgotten one may be used again for anything.
        """
        seconds = checked_seconds("older_than", older_than)
        return await keys.forget(self, self.clock.now() - microseconds(seconds))

    async def gc(
        self,
        *,
        older_than: float | timedelta | None = None,
        keep: int = 0,
        keys_older_than: float | timedelta | None = None,
        dry_run: bool = False,
    ) -> Collected:
        """Delete old runs and keys in short transactions, so that no writer has to wait for long. See `Retention`.

        older_than: seconds since their end after which runs are deleted. A run goes with its children, and
            only when all of them have ended that long ago; none goes that is held, has a key in doubt, or that another
            run may need which has not ended, or has failed.
        keep: number of newest runs of each workflow that stay.
        keys_older_than: seconds without a change after which keys of actions are deleted. Without it they all stay.
        dry_run: only return what would be deleted.
        With neither time, what `everstep.open(retention=…)` says is done now.
        """
        check_flags(dry_run=dry_run)
        return await collect(self, self._retention(older_than, keep, keys_older_than), dry_run=dry_run)

    def _retention(self, runs: Any, keep: int, keys: Any) -> Retention:
        if runs is not None or keys is not None:
            return Retention(runs=runs, keys=keys, keep=keep)
        if self.collector.retention is None or keep:
            raise Misuse("app.gc needs older_than= or keys_older_than=, or an app that was opened with retention=.")
        return self.collector.retention

    async def queue(
        self,
        name: str,
        *,
        concurrency: int | None = ...,  # type: ignore[assignment]  # not said: as it is
        per_worker: int | None = ...,  # type: ignore[assignment]
        per_key: int | None = ...,  # type: ignore[assignment]
        rate: tuple[int, float] | None = ...,  # type: ignore[assignment]
        paused: bool = ...,  # type: ignore[assignment]
    ) -> QueueRow:
        """Set how many runs of a queue may be begun at once, over all workers, and return the settings of the queue.

        A setting that you leave out stays as it is; None removes a limit. Workers follow a change without a
        restart; runs that have begun continue. A run has its slot from its beginning until it ends, is held or
        given back.

        concurrency: over all workers. per_worker: in each. per_key: with the same tag `key`.
        rate: (tokens, seconds): a bucket of that many tokens that fills in that time; each run that begins
            takes one, also one that begins again after a hold or a retry.
        paused: no run begins.
        """
        options = {"concurrency": concurrency, "per_worker": per_worker, "per_key": per_key, "rate": rate}
        changes = queues.changes_of(**options, paused=paused)
        return await queues.change(self, "queue", name, changes)

    async def limit(
        self,
        name: str,
        *,
        concurrency: int | None = ...,  # type: ignore[assignment]
        rate: tuple[int, float] | None = ...,  # type: ignore[assignment]
    ) -> QueueRow:
        """Set how many bodies of the steps with `limit=name` may run at once, over all workers and runs.

        A setting that you leave out stays as it is; None removes a limit. Workers follow a change without a restart.
        """
        return await queues.change(self, "limit", name, queues.changes_of(concurrency=concurrency, rate=rate))

    async def worker_gone(self, worker: str, *, note: str, by: str = "") -> Gone:
        """Declare that a worker cannot act any more, although nothing proves it: its machine is off, for instance.

        Its `once` steps in doubt are settled by their probes from now on; runs that are held for it resume by
        themselves. The store records who said so, when and why. Raises `WorkerAlive` while it has a lease. If it lives
        all the same, what it is doing just now may happen twice.
        """
        check_texts(worker=worker, note=note, by=by)
        return await declare(self, "worker", worker, note=note, by=by)

    async def host_gone(self, host: str, *, note: str, by: str = "", never_seen: bool = False) -> Gone:
        """Declare the same for everything that was begun on a host until now, but not for what starts there later.

        never_seen: also if the store knows no worker and no step in doubt of that host, which otherwise is a `Misuse`
            that names the hosts it knows.
        """
        check_texts(host=host, note=note, by=by)
        check_flags(never_seen=never_seen)
        return await declare(self, "host", host, note=note, by=by, never_seen=never_seen)

    async def export(
        self,
        runs: Sequence[str] | None,
        path: str,
        *,
        unfinished: Unfinished | None = None,
        secrets: bool = False,
        threads: Sequence[str] = (),
        items: bool = False,
        schedules: Sequence[str] = (),
        by: str = "",
    ) -> Exported:
        """Write runs into a new file, each with its family: parents, children, and the runs for which they wait.

        runs: their ids. None: all runs of the store, and all threads, items and schedules.

        unfinished: what happens to runs that have not ended. `hold`: they are held here, and resume where the file is
            imported. `leave`: they continue here, and the file is a copy. Required if there are any.
        secrets: whether secrets are in the file, too. Without them a run can be read where the file is
            imported, but not resumed; a run that has to resume is refused.
        threads: threads of LangGraph, by their ids, with the runs of the steps in their nodes.
        items: whether the items of LangGraph's store are in the file.
        schedules: by their names. With `hold` they are paused here; with `leave` they are paused where the file is
            imported.
        """
        if runs is not None and not is_a(runs, list, tuple, set, frozenset):
            raise refused("runs", runs, "it is a list of ids of runs, or None for all")
        if unfinished is not None:
            checked_choice("unfinished", unfinished, ("hold", "leave"))
        check_texts(by=by)
        check_flags(secrets=secrets, items=items)
        for name, given in (("threads", threads), ("schedules", schedules)):
            if not is_a(given, list, tuple, set, frozenset):
                raise refused(name, given, "it is a list of names")
            for one in given:
                checked_text(name, one)
        where = checked_path("path", path)
        if runs is None:
            others = await self.read(transfer.everything, self)
        else:
            others = await self.read(transfer.named, self, list(threads), items, list(schedules))
        options: Any = {"unfinished": unfinished, "secrets": secrets, "by": by}
        return await transfer.export(self, runs, where, others=others, **options)

    async def import_(self, path: str, *, skip_existing: bool = False, copies: bool = False) -> Imported:
        """Put the runs of a file into this store; unfinished ones resume here. The whole file is verified first.

        skip_existing: leave runs alone whose ids are here; otherwise that is an `IdConflict` and nothing is imported.
        copies: also take unfinished runs that continue in the old store, so that everything is done twice.
        """
        check_flags(skip_existing=skip_existing, copies=copies)
        done = await transfer.import_file(self, checked_path("path", path), skip_existing=skip_existing, copies=copies)
        for run in done.unfinished:
            await self._want_if_declared(run)
        return done

    async def repair(self, run: str, *, note: str = "", by: str = "", dry_run: bool = False) -> Repair:
        """Repair a damaged run from the good part of its history, and report what is lost.

        What comes after the last good event is archived, and the run continues from there. From then on a step that
        must not happen twice is asked about (its probe, or a person) before it is done, until a person resolves such a
        question with `accept`. A sound run is left alone. Raises `Damaged` if nothing of the history is good; then the
        run can only be started again with `on_existing="restart"`. With `dry_run` nothing is changed.
        """
        check_texts(note=note, by=by)
        check_flags(dry_run=dry_run)
        report = await repair.repair(self, run, note=note, by=by, dry_run=dry_run)
        if report.status == "queued" and not dry_run:
            await self._want_if_declared(run)
        return report

    async def _want_if_declared(self, run: str) -> None:
        row = await self.read(self.store.run, run)
        if row is not None and row.workflow in DECLARED.names():
            self.adopt(run)

    # -- schedules -------------------------------------------------------------------------------------------------
    async def schedule(
        self,
        workflow: Any,
        /,
        *args: Any,
        name: str | None = None,
        cron: str = "",
        zone: str = "UTC",
        every: float | timedelta = 0,
        offset: float | timedelta = 0,
        jitter: float | timedelta = 0,
        overlap: Overlap = "skip",
        catch_up: CatchUp = "newest",
        catch_up_max: int = 100,
        queue: str | None = None,
        priority: int = 0,
        tags: dict[str, str] | None = None,
    ) -> Schedule:
        """Start a run of a workflow again and again, at the times that a cron expression or an interval says.

        The schedule is durable on return. Any worker that knows the workflow starts the runs; each has the schedule's
        name and the time in its id, as in `nightly@2026-11-16T09:00:00Z`. The same call once more changes nothing; with
        other options it changes the schedule, from the next tick on.

        workflow: the declared one, or its name, also if it is declared elsewhere.
        name: of the schedule; default: the workflow's.
        cron: five fields (minute, hour, day, month, day of the week), or six with the second first.
        zone: the time zone of the expression, such as `Europe/Berlin`.
        every: instead of `cron`: the interval in seconds, or as a `timedelta`. It counts from the beginning of 1970
            (UTC), so that 3600 is every full hour; `offset` moves that.
        jitter: a run is started up to this many seconds later: by the same delay for one tick on every worker, and by
            another delay for each tick.
        overlap: what happens at a tick when the run before has not ended. `skip` (default): nothing. `queue`: the
            newest tick waits for its end. `allow`: both run. `cancel`: the run before is cancelled, and when it has
            ended the newest tick's is started.
        catch_up: what happens to ticks while no worker was running. `newest` (default): of the ticks that were missed,
            the newest is started. `all`: all of them, the newest `catch_up_max`. `none`: no tick that is more than a
            minute late.
        """
        times = {"every": every, "offset": offset, "jitter": jitter}
        options = {"overlap": overlap, "catch_up": catch_up, "catch_up_max": catch_up_max, "priority": priority}
        where = {
            "queue": checked_name(queue, "queue") if queue not in (None, "") else "",
            "tags": checked_tags(tags) or {},
        }
        checked_whole("priority", priority, least=-(2**31), most=2**31)
        checked_whole("catch_up_max", catch_up_max, least=1)
        checked_text("cron", cron)
        checked_text("zone", zone)
        return await define(self, workflow, args, name, cron, zone, times, {**options, **where})

    def get_schedule(self, name: str) -> Schedule:
        """Return a handle on a schedule by its name."""
        return Schedule(self, name)

    async def schedules(self) -> Sequence[Scheduled]:
        """Return all schedules, by their names."""
        return [scheduled(row) for row in await self.read(self.store.schedules)]
