"""The part of an app that looks after runs from outside: stops, retries, forks, repairs, moves and deletes them.

Each verb loads its own part of the engine when it is used: a program that only starts runs does not wait for it.
"""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.engine import queueing
from everstep.engine.clock import microseconds
from everstep.engine.handles import Run
from everstep.engine.workflow import DECLARED
from everstep.errors import Misuse
from everstep.model.ids import checked_key, checked_run_id
from everstep.model.options import (
    check_flags,
    check_optional_texts,
    check_texts,
    checked_choice,
    checked_path,
    checked_seconds,
    checked_whole,
    refused,
)
from everstep.model.untrusted import is_a
from everstep.stores.keys import STATES, EffectFilter, EffectRow, EffectState, shown_effect
from everstep.stores.protocol import HoldRow
from everstep.stores.queues import QueueRow

if TYPE_CHECKING:
    from everstep.engine.collecting import Collected
    from everstep.engine.gone import Gone
    from everstep.engine.moving import Exported, Imported, Unfinished
    from everstep.engine.repairing import Repair
    from everstep.model.retention import Retention


class TendingVerbs:
    """The part of an app that looks after runs."""

    async def cancel(
        self: Any, run: str, reason: str = "", *, grace: float = 30.0, now: bool = False, by: str = ""
    ) -> None:
        """Ask a run to stop. Its code gets `asyncio.CancelledError` and may clean up for `grace` seconds; with `now` it
        ends without its code. The request is durable on return. Raises `RunEnded` if the run had ended.
        """
        from everstep.engine import operations

        check_texts(reason=reason, by=by)
        check_flags(now=now)
        await operations.cancel(self, run, reason, grace=grace, now=now, by=by)

    async def retry(self: Any, run: str, *, by: str = "", across_once: bool = False) -> Run[Any]:
        """Let a failed run go on from what failed, as a new attempt, and drive it if its workflow is declared here.

        across_once: also if `once` steps have happened after the failure, which otherwise raises `CrossesOnce`. If the
            code comes to the same step with the same arguments again, it is given that outcome and does not do it.
        """
        from everstep.engine import operations

        check_texts(by=by)
        check_flags(across_once=across_once)
        await operations.retry(self, run, by, across_once=across_once)
        await self._want_if_declared(run)
        return Run(self, run)

    async def rollback(
        self: Any, run: str, note: str = "", *, allow_uncompensated: bool = False, by: str = ""
    ) -> Run[Any]:
        """Undo what a run did: the compensations of its completed steps run, the last step's first. Then it is
        `cancelled`. An unfinished run stops for that, and its code is not asked. The request is durable on return.

        allow_uncompensated: roll back also if that leaves effects that must not happen twice and have no `compensate=`.
            Without it that is refused (`Uncompensated`).
        """
        from everstep.engine import operations

        check_texts(note=note, by=by)
        check_flags(allow_uncompensated=allow_uncompensated)
        await operations.rollback(self, run, note, by=by, uncompensated=allow_uncompensated)
        await self._want_if_declared(run)
        return Run(self, run)

    async def fork(
        self: Any,
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
        from everstep.engine import forking

        check_texts(note=note, by=by)
        checked_whole("at", at)  # which of them there are is told later
        if generation is not None:
            checked_whole("generation", generation, least=1)
        if not is_a(allow_effects, bool, list, tuple, set, frozenset):
            wanted_text = 'it is True, or a list of names of steps, such as allow_effects=["pay"]'
            raise refused("allow_effects", allow_effects, wanted_text)
        wanted = forking.Wanted(run, at, generation, args, outcome, id, allow_effects, by, note)
        forked = await forking.fork(self, wanted)
        await self._want_if_declared(forked)
        return Run(self, forked)

    async def hold(self: Any, run: str, note: str = "", *, by: str = "") -> None:
        """Put a run on hold until somebody resolves it."""
        from everstep.engine import operations

        check_texts(note=note, by=by)
        await operations.hold(self, run, note, by)

    async def holds(self: Any, *, run: str | None = None, open_only: bool = True) -> Sequence[HoldRow]:
        """Return holds, open ones only by default."""
        check_flags(open_only=open_only)
        run = None if run is None else checked_run_id(run)
        found: list[HoldRow] = await self.read(self.store.holds, run=run, open_only=open_only)
        return found

    async def resolve(
        self: Any,
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
        from everstep.engine import operations

        check_texts(resolution=resolution, note=note, by=by)
        check_optional_texts(hold=hold)
        await operations.resolve(self, run, resolution, hold=hold, value=value, note=note, by=by)
        if resolution != "cancel":
            await self._want_if_declared(run)
        return Run(self, run)

    async def forget_markers(self: Any, database: Any, *, older_than: float = 30 * 86400.0) -> int:
        """Delete the markers of atomic steps whose runs have ended, and return how many there were.

        database: as in `@everstep.transaction(database)`.
        older_than: seconds that a marker is kept at least. Keep them longer than your oldest backup of the store: a
            run that is restored from it is told by its markers what has happened since.
        """
        from everstep.effects.databases import database_of
        from everstep.engine.markers import forget_markers

        return await forget_markers(self, database_of(database), checked_seconds("older_than", older_than))

    async def effects(
        self: Any,
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

    async def free_key(self: Any, key: str, *, note: str = "", by: str = "") -> None:
        """Free a key by hand: its action may be done again, and is another one to its receiver if it had been done.

        Raises `KeyConflict` while a run that has not ended may still settle it.
        """
        from everstep.engine import key_operations

        check_texts(note=note, by=by)
        await key_operations.free(self, checked_key(key, "an action"), note, by)

    async def settle_key(self: Any, key: str, value: Any = None, *, note: str = "", by: str = "") -> None:
        """Say what came of an action whose run has ended without knowing: `value` is its outcome for all who ask."""
        from everstep.engine import key_operations

        check_texts(note=note, by=by)
        await key_operations.settle(self, checked_key(key, "an action"), value, note, by)

    async def forget_keys(self: Any, *, older_than: float) -> int:
        """Delete keys that are done or free and have not changed for so many seconds. Returns how many.

        Until then a key is kept, also when its run was deleted. A forgotten one may be used again for anything.
        """
        from everstep.engine import key_operations

        seconds = checked_seconds("older_than", older_than)
        return await key_operations.forget(self, self.clock.now() - microseconds(seconds))

    async def gc(
        self: Any,
        *,
        older_than: float | timedelta | None = None,
        keep: int = 0,
        keys_older_than: float | timedelta | None = None,
        dry_run: bool = False,
    ) -> "Collected":
        """Delete what is old enough, in short transactions, so that nobody who writes has to wait. See `Retention`.

        older_than: runs that ended so many seconds ago. A run goes with its children, and only when all of them have
            ended so long ago; none goes that is held, has a key in doubt, or that another run may need which has not
            ended, or has failed.
        keep: the newest so many runs of each workflow stay.
        keys_older_than: keys of actions that have not changed for so long. Without it they all stay.
        dry_run: only say what would be deleted.
        With neither time, what `everstep.open(retention=…)` says is done now.
        """
        from everstep.engine.collecting import collect

        check_flags(dry_run=dry_run)
        return await collect(self, self._retention(older_than, keep, keys_older_than), dry_run=dry_run)

    def _retention(self: Any, runs: Any, keep: int, keys: Any) -> "Retention":
        from everstep.model.retention import Retention

        if runs is not None or keys is not None:
            return Retention(runs=runs, keys=keys, keep=keep)
        if self.collector.retention is None or keep:
            raise Misuse("app.gc needs older_than= or keys_older_than=, or an app that was opened with retention=.")
        kept: Retention = self.collector.retention
        return kept

    async def queue(
        self: Any,
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
        self: Any,
        name: str,
        *,
        concurrency: int | None = ...,  # type: ignore[assignment]
        rate: tuple[int, float] | None = ...,  # type: ignore[assignment]
    ) -> QueueRow:
        """Say how many bodies of the steps with `limit=name` may run at once, over all workers and runs.

        What is not given stays as it is; None takes a limit away. Workers keep to a change from then on.
        """
        return await queueing.change(self, "limit", name, queueing.changes_of(concurrency=concurrency, rate=rate))

    async def worker_gone(self: Any, worker: str, *, note: str, by: str = "") -> "Gone":
        """Say that a worker cannot act any more, which nothing proves: its machine is off, its container removed.

        Its `once` steps in doubt are settled by their probes from now on; runs that are held for it go on by
        themselves. Who said so, when and why is kept. Raises `WorkerAlive` while it has a lease. If it lives all the
        same, what it is doing just now may happen twice.
        """
        from everstep.engine.gone import declare

        check_texts(worker=worker, note=note, by=by)
        return await declare(self, "worker", worker, note=note, by=by)

    async def host_gone(self: Any, host: str, *, note: str, by: str = "") -> "Gone":
        """The same of all that was begun on a host until now. What starts there later is not meant."""
        from everstep.engine.gone import declare

        check_texts(host=host, note=note, by=by)
        return await declare(self, "host", host, note=note, by=by)

    async def export(
        self: Any,
        runs: Sequence[str] | None,
        path: str,
        *,
        unfinished: "Unfinished | None" = None,
        secrets: bool = False,
        threads: Sequence[str] = (),
        items: bool = False,
        schedules: Sequence[str] = (),
        by: str = "",
    ) -> "Exported":
        """Write runs into a new file, each with its family: parents, children, and whom they wait for.

        runs: their ids. None: all runs of the store, and all threads, items and schedules.

        unfinished: what becomes of those that have not ended. `hold`: they are held here, and go on where the file is
            imported. `leave`: they go on here, and the file is a copy. It must be said if there are any.
        secrets: whether what is secret is in the file, too. Without it a run can be looked at where the file is
            imported, and not go on; one that has to is refused.
        threads: threads of LangGraph, by their ids, with the runs of the steps in their nodes.
        items: whether the items of LangGraph's store are in the file.
        schedules: by their names. With `hold` they are paused here; with `leave` they are paused where the file is
            imported.
        """
        from everstep.engine import moving, moving_saved

        if runs is not None and not is_a(runs, list, tuple, set, frozenset):
            raise refused("runs", runs, "it is a list of ids of runs, or None for all")
        if unfinished is not None:
            checked_choice("unfinished", unfinished, ("hold", "leave"))
        check_texts(by=by)
        check_flags(secrets=secrets, items=items)
        for name, given in (("threads", threads), ("schedules", schedules)):
            if not is_a(given, list, tuple, set, frozenset):
                raise refused(name, given, "it is a list of names")
        where = checked_path("path", path)
        if runs is None:
            others = moving_saved.everything(self)
        else:
            others = moving_saved.named(self, list(threads), items, list(schedules))
        options: Any = {"unfinished": unfinished, "secrets": secrets, "by": by}
        return await moving.export(self, runs, where, others=others, **options)

    async def import_(self: Any, path: str, *, skip_existing: bool = False, copies: bool = False) -> "Imported":
        """Put the runs of a file into this store; unfinished ones go on here. All of it is verified first.

        skip_existing: leave runs alone whose ids are here; otherwise that is an `IdConflict` and nothing is imported.
        copies: also take unfinished runs that were left to go on where they were, so that everything is done twice.
        """
        from everstep.engine import moving

        check_flags(skip_existing=skip_existing, copies=copies)
        done = await moving.import_file(self, checked_path("path", path), skip_existing=skip_existing, copies=copies)
        for run in done.unfinished:
            await self._want_if_declared(run)
        return done

    async def repair(self: Any, run: str, *, note: str = "", by: str = "", dry_run: bool = False) -> "Repair":
        """Put a damaged run right from the good part of its history, and say what can no longer be seen.

        What comes after the last good event is archived, and the run goes on from there. From then on a step that must
        not happen twice is asked about (its probe, or a person) before it is done, until somebody resolves such a
        question with `accept`. A sound run is left alone. Raises `Damaged` if nothing of the history is good; then the
        run can only be started again with `on_existing="restart"`. With `dry_run` nothing is changed.
        """
        from everstep.engine import repairing

        check_texts(note=note, by=by)
        check_flags(dry_run=dry_run)
        report = await repairing.repair(self, run, note=note, by=by, dry_run=dry_run)
        if report.status == "queued" and not dry_run:
            await self._want_if_declared(run)
        return report

    async def _want_if_declared(self: Any, run: str) -> None:
        row = await self.read(self.store.run, run)
        if row is not None and row.workflow in DECLARED.names():
            self.adopt(run)
