"""Moving what is not a run: threads and items of frameworks, and schedules.

A thread goes on when a program invokes it, so an export cannot hold it; nobody runs it while it is read. A schedule
goes on by itself: one that is moved is paused where it was, and one that was copied is paused where it is imported.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from everstep.engine.exporting import Mode, Writing, read_others
from everstep.engine.leases import wait_for_lapse
from everstep.engine.saved import dump_thread, every_item, every_thread, verify_item, verify_thread
from everstep.engine.schedules import existing_schedule
from everstep.engine.scheduling import changed_row, definition_of, state_of
from everstep.errors import Damaged, IdConflict, Misuse, ThreadActive
from everstep.model.schedules import wake_time
from everstep.stores.protocol import Accepted, RunFilter
from everstep.stores.saved import ChangeItems, ChangeThread, FreeThread, SavedItem, Taken, TakeThread, ThreadDump
from everstep.stores.schedules import ChangeSchedule, ScheduleRow

if TYPE_CHECKING:
    from everstep.engine.app import App

PAGE: Final = 500


class Others(msgspec.Struct):
    """What is exported beside runs."""

    threads: list[str] = []
    items: bool = False
    schedules: list[ScheduleRow] = []

    @property
    def is_anything(self) -> bool:
        """Whether there is anything of it."""
        return bool(self.threads or self.items or self.schedules)

    @property
    def going_on(self) -> list[str]:
        """The names of schedules that start runs by themselves."""
        return [row.name for row in self.schedules if is_going_on(row)]


def is_going_on(row: ScheduleRow) -> bool:
    """Tell whether a schedule starts runs by itself."""
    state = state_of(row)
    return state.stopped_at is None or bool(state.asked)


# -- exporting ----------------------------------------------------------------------------------------------------
def everything(app: "App") -> Others:
    """Return all that a store has beside runs."""
    saved = app.store.saved
    has_items = bool(saved.items("", app.clock.now(), limit=1))
    return Others(list(every_thread(saved)), has_items, app.store.schedules())


def named(app: "App", threads: Sequence[str], items: bool, schedules: Sequence[str]) -> Others:
    """Return what is meant by names."""
    for thread in threads:
        if not app.store.saved.states(thread, limit=1):
            raise Misuse(f"There is no thread {thread!r} in {app.store.url}.")
    return Others(list(threads), items, [existing_schedule(app, name) for name in schedules])


def runs_of(app: "App", others: Others) -> list[str]:
    """Return the runs that belong to threads and schedules: the steps in nodes, and what is under way."""
    found = [run for row in others.schedules for run in state_of(row).active if app.store.run(run) is not None]
    for thread in others.threads:
        before: tuple[int, str] | None = None
        while page := app.store.runs(RunFilter(tags={"thread": thread}, before=before, limit=PAGE)):
            found += [row.id for row in page]
            before = (page[-1].created_at, page[-1].id)
    return found


@asynccontextmanager
async def taken(app: "App", threads: Sequence[str]) -> AsyncIterator[None]:
    """Let nobody run threads while they are read."""
    epochs: dict[str, int] = {}
    if threads:
        await app.become_worker()
    try:
        for thread in threads:
            owner = app.store.saved.owner(thread)
            if owner is not None and owner.owner is not None:
                await wait_for_lapse(app, owner.owner)
            verdict = await app.committer.submit(TakeThread(thread, app.worker, app.clock.now()))
            if not isinstance(verdict, Taken):
                raise ThreadActive(f"The thread {thread!r} is being run by a process that is alive. Export it later.")
            epochs[thread] = verdict.epoch
        yield
    finally:
        for thread, epoch in epochs.items():
            await app.committer.submit(FreeThread(thread, app.worker, epoch))


def write(app: "App", others: Others, writing: Writing) -> int:
    """Write all of it, verified, and return how many items there were."""
    saved, count = app.store.saved, 0
    for thread in others.threads:
        dump = dump_thread(saved, thread)
        verify_thread(dump)
        writing.thread(dump)
    for item in every_item(saved, app.clock.now()) if others.items else ():
        verify_item(item)
        writing.item(item)
        count += 1
    for row in others.schedules:
        verify_schedule(row)
        writing.schedule(row)
    return count


async def pause(app: "App", schedules: Sequence[ScheduleRow], note: str, by: str) -> None:
    """Pause schedules that go on elsewhere, unless they have changed since they were read."""
    for row in schedules:
        if is_going_on(row):
            new = _paused(row, app.clock.now(), note, by)
            if not isinstance(await app.committer.submit(ChangeSchedule(row.name, row.revision, new)), Accepted):
                raise Misuse(f"The schedule {row.name} was changed just now, perhaps by a tick. Export it again.")


def _paused(row: ScheduleRow, at: int, note: str, by: str = "") -> ScheduleRow:
    state = state_of(row)
    state.stopped_at, state.note, state.by, state.buffered, state.asked = at, note, by, None, []
    return changed_row(row, definition_of(row), state, at)


def verify_schedule(row: ScheduleRow) -> None:
    """Raise `Damaged` unless a schedule can be read, and its columns say what its definition and its state do."""
    definition, state = definition_of(row), state_of(row)
    if (row.workflow, row.next_at) != (definition.workflow, wake_time(row.name, definition, state)):
        raise Damaged(f"The row of schedule {row.name} tells another story than its definition and its state.")


# -- importing ----------------------------------------------------------------------------------------------------
def check(app: "App", stream: BinaryIO, *, skip_existing: bool) -> None:
    """Raise what speaks against anything of a file that is not a run, before anything is written."""
    for one in read_others(stream):
        match one:
            case ThreadDump():
                verify_thread(one)
                what = f"thread {one.thread!r}"
            case SavedItem():
                verify_item(one)
                what = f"item {one.key!r}"
            case ScheduleRow():
                verify_schedule(one)
                what = f"schedule {one.name}"
        if is_here(app, one) and not skip_existing:
            raise IdConflict(
                f"The {what} is in this store already. Nothing was imported. With skip_existing=True (--skip-existing) "
                "what is here is left as it is."
            )


def is_here(app: "App", one: ThreadDump | SavedItem | ScheduleRow) -> bool:
    """Tell whether there is something of the same name in this store."""
    saved = app.store.saved
    match one:
        case ThreadDump():
            return saved.owner(one.thread) is not None or bool(saved.states(one.thread, limit=1))
        case SavedItem():
            return saved.item(one.namespace, one.key, app.clock.now()) is not None
        case ScheduleRow():
            return bool(app.store.schedules(name=one.name))


async def put(app: "App", one: ThreadDump | SavedItem | ScheduleRow, mode: Mode, *, copies: bool) -> None:
    """Put one of them here, in one transaction."""
    at = app.clock.now()
    match one:
        case ThreadDump():
            rows = {"states": one.states, "parts": one.parts, "rewrites": one.writes}
            change = ChangeThread(one.thread, at, everything=True, born=one.born, **rows)  # type: ignore[arg-type]
            verdict = await app.committer.submit(change)
        case SavedItem():
            verdict = await app.committer.submit(ChangeItems([one]))
        case ScheduleRow():
            verdict = await app.committer.submit(ChangeSchedule(one.name, 0, _arrived(app, one, at, mode, copies)))
    if not isinstance(verdict, Accepted):
        raise IdConflict(f"{type(one).__name__}: something of the same name is in this store by now. Say it again.")


def _arrived(app: "App", row: ScheduleRow, at: int, mode: Mode, copies: bool) -> ScheduleRow:
    """Return a schedule as it is in the store that it was moved to. A copy is paused: the other one goes on."""
    new = msgspec.structs.replace(row, revision=0)
    if is_going_on(row) and mode != "hold" and not copies:
        new = _paused(new, at, "imported from a copy: it goes on where that was exported")
    state = state_of(new)
    state.restores = app.store.restores()
    return changed_row(new, definition_of(new), state, at)
