"""An App: what an application may ask of Everstep. How runs are driven stands in `driving.py`."""

from collections.abc import Callable, Collection, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple, overload

from everstep.codec import ANY
from everstep.engine import asking, forking, key_operations, moving, operations, outbox, queueing, repairing
from everstep.engine.by_name import new_run_id
from everstep.engine.clock import microseconds
from everstep.engine.collecting import Collected, collect
from everstep.engine.driving import Driving
from everstep.engine.existing import existing_run
from everstep.engine.handles import Run
from everstep.engine.moving import Exported, Imported, Unfinished
from everstep.engine.repairing import Repair
from everstep.engine.schedules import ScheduleVerbs
from everstep.engine.starting import Origin, new_run
from everstep.engine.workflow import DECLARED, ON_EXISTING, OnExisting, Workflow, checked_choice, workflow_of
from everstep.errors import Misuse, StoreError
from everstep.model.budgets import allotment_of
from everstep.model.ids import checked_name, checked_run_id
from everstep.model.retention import Retention
from everstep.model.status import STATUSES
from everstep.stores.keys import STATES, EffectFilter, EffectRow, EffectState, shown_effect
from everstep.stores.protocol import Existing, HoldRow, RunFilter, RunRow, StartRun
from everstep.stores.queues import DEFAULT_QUEUE, QueueRow

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class App(ScheduleVerbs, Driving):
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
            goes on here; others are an `IdConflict`), `retry` (attach, and a failed run goes on from what failed),
            `restart` (an ended run begins again; its old history is kept), or `fail`.
        queue: which queue it waits in (default: its workflow's). In the queue `default` nothing waits: this app begins
            it at once. See `queue`.
        priority: of the runs that wait in one queue, those with a higher one begin first; then the oldest.
        delay: seconds before it begins.
        tags: what it is found by later. The tag `key` is what `per_key` of a queue counts by.
        transaction: a connection to the store's database with an open transaction of yours (an `apsw.Connection` to its
            file): the run is there if and only if you commit. It is `queued` then, for a worker.
        """
        target = workflow_of(workflow)
        policy = checked_choice("on_existing", on_existing or target.on_existing, ON_EXISTING)
        if transaction is not None:
            options: Any = {"id": id, "queue": queue, "priority": priority, "delay": delay, "tags": tags}
            return outbox.start_in(self, target, args, policy, transaction, **options)
        run, is_new = checked_run_id(id) if id is not None else self._new_id(target), id is None
        arguments = self.codec.encode_arguments(target.signature, args, {}, target.name)
        if not self.worker:
            await self.become_worker()
        self.refuse_when_failed()
        at = self.clock.now()
        in_line = (queue := queue or target.queue) != DEFAULT_QUEUE and bool(checked_name(queue, "queue"))
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
            origin=Origin(self.store.chain.writing, self.restores),
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
            if in_line:
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
        wanted = (status,) if isinstance(status, str) else tuple(status)
        for one in wanted:
            checked_choice("status", one, STATUSES)
        return await self.read(
            self.store.runs,
            RunFilter(
                status=wanted,  # type: ignore[arg-type]
                workflow=workflow,
                parent=parent,
                tags=tags or {},
                text=text,
                before=(before.created_at, before.id) if before is not None else None,
                limit=limit,
                offset=offset,
            ),
        )

    async def signal(
        self, run: str, name: str, value: Any = None, *, id: str | None = None, transaction: Any = None
    ) -> None:
        """Send a signal to a run. It is durable on return. Raises `RunEnded` or `UnknownRun`.

        transaction: as in `start`: the signal is sent if and only if you commit.
        """
        if transaction is not None:
            outbox.signal_in(self, run, name, value, id or "", transaction)
            return
        await operations.signal(self, run, name, value, id or "")

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
        """Ask a run something and wait for its answer, which is durable then.

        id: asking again with the same one, also after a crash, gives the same answer and is one request to the run.
        answer: the type that the answer must have.
        timeout: after so many seconds `NoAnswer`, a `TimeoutError`; the run keeps the request.

        Raises `RequestRefused` or the error with which the run refused it, `RunEnded` when the run has ended without
        an answer, `RunHeld` when it waits for a person, `UnknownRun`, and `IdConflict` when the id belongs to another
        request.
        """
        return await asking.ask(self, run, name, value, id=id, answer=answer, timeout=timeout)

    async def cancel(self, run: str, reason: str = "", *, grace: float = 30.0, now: bool = False, by: str = "") -> None:
        """Ask a run to stop. Its code gets `asyncio.CancelledError` and may clean up for `grace` seconds; with `now` it
        ends without its code. The request is durable on return. Raises `RunEnded` if the run had ended.
        """
        await operations.cancel(self, run, reason, grace=grace, now=now, by=by)

    async def retry(self, run: str, *, by: str = "", across_once: bool = False) -> Run[Any]:
        """Let a failed run go on from what failed, as a new attempt, and drive it if its workflow is declared here.

        across_once: also if `once` steps have happened after the failure, which otherwise raises `CrossesOnce`. If the
            code comes to the same step with the same arguments again, it is given that outcome and does not do it.
        """
        await operations.retry(self, run, by, across_once=across_once)
        self._want_if_declared(run)
        return Run(self, run)

    async def rollback(self, run: str, note: str = "", *, allow_uncompensated: bool = False, by: str = "") -> Run[Any]:
        """Undo what a run did: the compensations of its completed steps run, the last step's first. Then it is
        `cancelled`. An unfinished run stops for that, and its code is not asked. The request is durable on return.

        allow_uncompensated: roll back also if that leaves effects that must not happen twice and have no `compensate=`.
            Without it that is refused (`Uncompensated`).
        """
        await operations.rollback(self, run, note, by=by, uncompensated=allow_uncompensated)
        self._want_if_declared(run)
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
        """Start a new run that begins with what another one did up to the event `at`, and goes on from there by itself.

        The other run, whatever its status, is not touched. The fork is durable on return; asked for again with the same
        `id` it is the same fork. Raises `Misuse` if there can be none at that event, or if the code would not do with
        the new `args` what was recorded.

        args: other arguments of the workflow. With `at=1` any will do.
        outcome: what takes the place of the outcome that the event `at` records: a step's, a signal's or a child's.
        generation: which history of the run, if not the newest.
        allow_effects: the names of steps that the fork may do once more although the other run has done them after
            `at`, or True for all. Without it that is refused (`CrossesOnce`), with the list.
        """
        wanted = forking.Wanted(run, at, generation, args, outcome, id, allow_effects, by, note)
        forked = await forking.fork(self, wanted)
        self._want_if_declared(forked)
        return Run(self, forked)

    async def hold(self, run: str, note: str = "", *, by: str = "") -> None:
        """Put a run on hold until somebody resolves it."""
        await operations.hold(self, run, note, by)

    async def holds(self, *, run: str | None = None, open_only: bool = True) -> Sequence[HoldRow]:
        """Return holds, open ones only by default."""
        return self.store.holds(run=run, open_only=open_only)

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
        """Resolve a run's hold in one of the ways that it names, and let the run go on, or end.

        resolution: `retry`, `accept`, `skip` and `done` (both with `value`), `not-done`, `probe`, `repair`, `rollback`
            or `cancel`, as the hold's reason allows.
        hold: which one, if the run has more than one.
        note, by: why, and who says so; both are kept in the history.
        """
        await operations.resolve(self, run, resolution, hold=hold, value=value, note=note, by=by)
        if resolution != "cancel":
            self._want_if_declared(run)
        return Run(self, run)

    async def forget_markers(self, database: Any, *, older_than: float = 30 * 86400.0) -> int:
        """Delete the markers of atomic steps whose runs have ended, and return how many there were.

        database: as in `@everstep.transaction(database)`.
        older_than: seconds that a marker is kept at least. Keep them longer than your oldest backup of the store: a
            run that is restored from it is told by its markers what has happened since.
        """
        from everstep.effects.databases import database_of
        from everstep.engine.markers import forget_markers

        return await forget_markers(self, database_of(database), older_than)

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
        """Return the keys of effects (`key=`), those that changed last first. State: `under-way`, `done` or `free`.

        Of a step with `secret=True` the outcome is left out.
        """
        if state is not None:
            checked_choice("state", state, STATES)
        wanted = EffectFilter(prefix=prefix, run=run, step=step, state=state, limit=limit, offset=offset)
        return [shown_effect(row) for row in await self.read(self.store.effects, wanted)]

    async def free_key(self, key: str, *, note: str = "", by: str = "") -> None:
        """Free a key by hand: its action may be done again, and is another one to its receiver if it had been done.

        Raises `KeyConflict` while a run that has not ended may still settle it.
        """
        await key_operations.free(self, key, note, by)

    async def settle_key(self, key: str, value: Any = None, *, note: str = "", by: str = "") -> None:
        """Say what came of an action whose run has ended without knowing: `value` is its outcome for all who ask."""
        await key_operations.settle(self, key, value, note, by)

    async def forget_keys(self, *, older_than: float) -> int:
        """Delete keys that are done or free and have not changed for so many seconds. Returns how many.

        Until then a key is kept, also when its run was deleted. A forgotten one may be used again for anything.
        """
        return await key_operations.forget(self, self.clock.now() - microseconds(older_than))

    async def gc(
        self,
        *,
        older_than: float | timedelta | None = None,
        keep: int = 0,
        keys_older_than: float | timedelta | None = None,
        dry_run: bool = False,
    ) -> Collected:
        """Delete what is old enough, in short transactions, so that nobody who writes has to wait. See `Retention`.

        older_than: runs that ended so many seconds ago. A run goes with its children, and only when all of them have
            ended so long ago; none goes that is held, or has a key in doubt.
        keep: the newest so many runs of each workflow stay.
        keys_older_than: keys of actions that have not changed for so long. Without it they all stay.
        dry_run: only say what would be deleted.
        With neither time, what `everstep.open(retention=…)` says is done now.
        """
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
        """Say how many runs of a queue may be begun at once, over all workers, and return all that is said about it.

        What is not given stays as it is; None takes a limit away. Workers keep to a change from then on, without a
        restart; runs that have begun go on. A run has its slot from its beginning until it ends, is held or given back.

        concurrency: over all workers. per_worker: in each. per_key: with the same tag `key`.
        rate: (how many, in how many seconds): a bucket of so many tokens that fills in that time; each run that begins
            takes one, also one that begins again after a hold or a retry.
        paused: nothing begins.
        """
        options = {"concurrency": concurrency, "per_worker": per_worker, "per_key": per_key, "rate": rate}
        changes = queueing.changes_of(**options, paused=paused)
        return await queueing.change(self, "queue", name, changes)

    async def limit(
        self,
        name: str,
        *,
        concurrency: int | None = ...,  # type: ignore[assignment]
        rate: tuple[int, float] | None = ...,  # type: ignore[assignment]
    ) -> QueueRow:
        """Say how many bodies of the steps with `limit=name` may run at once, over all workers and runs.

        What is not given stays as it is; None takes a limit away. Workers keep to a change from then on.
        """
        return await queueing.change(self, "limit", name, queueing.changes_of(concurrency=concurrency, rate=rate))

    async def export(
        self, runs: Sequence[str] | None, path: str, *, unfinished: Unfinished | None = None, by: str = ""
    ) -> Exported:
        """Write runs into a new file, each with its family: parents, children, and whom they wait for. None: all runs.

        unfinished: what becomes of those that have not ended. `hold`: they are held here, and go on where the file is
            imported. `leave`: they go on here, and the file is a copy. It must be said if there are any.
        """
        return await moving.export(self, runs, path, unfinished=unfinished, by=by)

    async def import_(self, path: str, *, skip_existing: bool = False, copies: bool = False) -> Imported:
        """Put the runs of a file into this store; unfinished ones go on here. All of it is verified first.

        skip_existing: leave runs alone whose ids are here; otherwise that is an `IdConflict` and nothing is imported.
        copies: also take unfinished runs that were left to go on where they were, so that everything is done twice.
        """
        done = await moving.import_file(self, path, skip_existing=skip_existing, copies=copies)
        for run in done.unfinished:
            self._want_if_declared(run)
        return done

    async def repair(self, run: str, *, note: str = "", by: str = "", dry_run: bool = False) -> Repair:
        """Put a damaged run right from the good part of its history, and say what can no longer be seen.

        What comes after the last good event is archived, and the run goes on from there. From then on a step that must
        not happen twice is asked about (its probe, or a person) before it is done, until somebody resolves such a
        question with `accept`. A sound run is left alone. Raises `Damaged` if nothing of the history is good; then the
        run can only be started again with `on_existing="restart"`. With `dry_run` nothing is changed.
        """
        report = await repairing.repair(self, run, note=note, by=by, dry_run=dry_run)
        if report.status == "queued" and not dry_run:
            self._want_if_declared(run)
        return report

    def _want_if_declared(self, run: str) -> None:
        row = self.store.run(run)
        if row is not None and row.workflow in DECLARED.names():
            self.adopt(run)
