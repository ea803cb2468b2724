"""Exporting runs into a file, and importing them into another store."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import BinaryIO, Final, Literal

import msgspec

from everstep.engine.history.restored import may_lack, restores_in
from everstep.engine.history.saved import dump_thread, every_item, every_thread, verify_item, verify_thread
from everstep.engine.history.verify import refuse_deleted
from everstep.engine.process.host import Host
from everstep.engine.process.leases import wait_for_lapse
from everstep.engine.process.schedules import changed_row, definition_of, state_of
from everstep.engine.run.holds import HoldReport
from everstep.engine.run.units import hold_unit
from everstep.engine.verbs.export_file import (
    FORMAT,
    Header,
    Mode,
    Writing,
    check_sound,
    failed_in_secret,
    lacking,
    note_of,
    read_families,
    read_header,
    read_others,
    secretive,
    unfinished_of,
    without,
)
from everstep.engine.verbs.runs import existing_row
from everstep.engine.verbs.schedules import existing_schedule
from everstep.errors import Damaged, IdConflict, Misuse, RunActive, ThreadActive
from everstep.model.ids import checked_run_id
from everstep.model.own_files import name_new, naming, part_file
from everstep.model.schedules import wake_time
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.protocol import Accepted, Claim, Claimed, Release, RunFilter, RunRow
from everstep.stores.rows.saved import ChangeItems, ChangeThread, FreeThread, SavedItem, Taken, TakeThread, ThreadDump
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow
from everstep.stores.rows.transfer import Arrival, ImportRuns, RunDump

SAVED_PAGE: Final = 500


class Others(msgspec.Struct):
    """What is exported in addition to runs."""

    threads: list[str] = []
    items: bool = False
    schedules: list[ScheduleRow] = []

    @property
    def is_anything(self) -> bool:
        """Whether there is any of it."""
        return bool(self.threads or self.items or self.schedules)

    @property
    def going_on(self) -> list[str]:
        """The names of schedules that start runs by themselves."""
        return [row.name for row in self.schedules if is_going_on(row)]


def is_going_on(row: ScheduleRow) -> bool:
    """Return True if a schedule starts runs by itself."""
    state = state_of(row)
    return state.stopped_at is None or bool(state.asked)


# -- exporting ----------------------------------------------------------------------------------------------------
def everything(app: Host) -> Others:
    """Return everything that a store has in addition to runs."""
    saved = app.store.saved
    has_items = bool(saved.items("", app.clock.now(), limit=1))
    return Others(list(every_thread(saved)), has_items, app.store.schedules())


def named(app: Host, threads: Sequence[str], items: bool, schedules: Sequence[str]) -> Others:
    """Return the named threads, items and schedules."""
    for thread in threads:
        if not app.store.saved.states(thread, limit=1):
            raise Misuse(f"There is no thread {thread!r} in {app.store.url}.")
    return Others(list(threads), items, [existing_schedule(app, name) for name in schedules])


def runs_of(app: Host, others: Others) -> list[str]:
    """Return the runs that belong to threads and schedules: the steps in nodes, and unfinished runs."""
    found = [run for row in others.schedules for run in state_of(row).active if app.store.run(run) is not None]
    for thread in others.threads:
        before: tuple[int, str] | None = None
        while page := app.store.runs(RunFilter(tags={"thread": thread}, before=before, limit=SAVED_PAGE)):
            found += [row.id for row in page]
            before = (page[-1].created_at, page[-1].id)
    return found


@asynccontextmanager
async def taken(app: Host, threads: Sequence[str]) -> AsyncIterator[None]:
    """Take threads, so that no other process runs them while they are read."""
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


def write(app: Host, others: Others, writing: Writing) -> int:
    """Write all of it, verified, and return the number of items."""
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


async def pause(app: Host, schedules: Sequence[ScheduleRow], note: str, by: str) -> None:
    """Pause schedules that continue elsewhere, unless they have changed since they were read."""
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
    """Raise `Damaged` unless a schedule can be read, and its columns agree with its definition and its state."""
    definition, state = definition_of(row), state_of(row)
    if (row.workflow, row.next_at) != (definition.workflow, wake_time(row.name, definition, state)):
        raise Damaged(f"The row of schedule {row.name} tells another story than its definition and its state.")


# -- importing ----------------------------------------------------------------------------------------------------
def check(app: Host, stream: BinaryIO, *, skip_existing: bool) -> None:
    """Check everything in a file that is not a run, before anything is written. Raises if something must not be
    imported.
    """
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


def is_here(app: Host, one: ThreadDump | SavedItem | ScheduleRow) -> bool:
    """Return True if something of the same name exists in this store."""
    saved = app.store.saved
    match one:
        case ThreadDump():
            return saved.owner(one.thread) is not None or bool(saved.states(one.thread, limit=1))
        case SavedItem():
            return saved.item(one.namespace, one.key, app.clock.now()) is not None
        case ScheduleRow():
            return bool(app.store.schedules(name=one.name))


async def put(app: Host, one: ThreadDump | SavedItem | ScheduleRow, mode: Mode, *, copies: bool) -> None:
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


def _arrived(app: Host, row: ScheduleRow, at: int, mode: Mode, copies: bool) -> ScheduleRow:
    """Return a schedule as it is in the store that it was moved to. A copy is paused, because the original
    continues.
    """
    new = msgspec.structs.replace(row, revision=0)
    if is_going_on(row) and mode != "hold" and not copies:
        new = _paused(new, at, "imported from a copy: it continues where that was exported")
    state = state_of(new)
    state.restores = app.store.restores()
    return changed_row(new, definition_of(new), state, at)


PAGE: Final = 500
NAMED_MAX: Final = 5
EXPORTED: Final = "exported"
"""The fact in the hold of a run that continues elsewhere: the file."""
Unfinished = Literal["hold", "leave"]


class Exported(msgspec.Struct):
    """What was exported."""

    runs: list[str]
    mode: Mode
    unfinished: list[str]
    """Runs that had not ended: held here now, or left to continue here."""
    left_out: list[str] = []
    """Runs whose secrets are not in the file: they can be inspected where it is imported, but not continue."""
    threads: list[str] = []
    items: int = 0
    schedules: list[str] = []


class Imported(msgspec.Struct):
    """What was imported."""

    runs: list[str] = []
    skipped: list[str] = []
    """Runs whose ids exist here already."""
    unfinished: list[str] = []
    """Those of `runs` that have not ended: they continue here."""
    asking: list[str] = []
    """Those of `unfinished` that ask before they do what must not happen twice: a backup was restored, here or in
    the store that they come from, and they may have done it already.
    """
    threads: list[str] = []
    items: int = 0
    schedules: list[str] = []
    """Imported schedules. Those that continue where they were exported are paused here."""


# -- exporting ----------------------------------------------------------------------------------------------------
async def export(
    app: Host,
    runs: Sequence[str] | None,
    path: str,
    *,
    unfinished: Unfinished | None,
    others: Others,
    secrets: bool = False,
    by: str = "",
) -> Exported:
    """Write runs with their families into a file, and others. None means all runs."""
    refuse_existing(path)
    also = [] if runs is None else await app.read(runs_of, app, others)
    families = await app.read(_families, app, None if runs is None else [*runs, *also])
    rows = [row for family in families for row in family]
    open_runs = [row for row in rows if row.status not in ENDED]
    going_on = [row.id for row in open_runs] or others.going_on
    if going_on and unfinished is None:
        what = _named(going_on) if open_runs else f"The schedules {', '.join(going_on)}"
        raise Misuse(
            f"{what} have not ended. Say what becomes of them here: unfinished='hold' (--hold) if they go on where the "
            "file is imported, or 'leave' (--leave) if they go on here and the file is only a copy."
        )
    mode: Mode = (unfinished or "ended") if going_on else "ended"
    held = open_runs if mode == "hold" else []
    async with _claims(app, held) as claimed, taken(app, others.threads):
        epochs = {row.id: row.epoch for row in claimed}
        with part_file(path) as (part, stream):
            writing = partial(_write, app, families, others, stream, mode, epochs, secrets=secrets)
            with naming(path):
                done = await app.elsewhere.call(writing)
            await _hold(app, claimed, path, by)
            if mode == "hold":
                await pause(app, others.schedules, f"exported to {os.path.basename(path)}", by)
    _name_file(part, path)
    done.runs, done.unfinished = [row.id for row in rows], [row.id for row in open_runs]
    return done


def _families(app: Host, runs: Sequence[str] | None) -> list[list[RunRow]]:
    """Return the chosen runs, grouped by ties."""
    if runs is None:
        wanted: list[RunRow] = []
        before: tuple[int, str] | None = None
        while page := app.store.runs(RunFilter(before=before, limit=PAGE)):
            wanted += page
            before = (page[-1].created_at, page[-1].id)
    else:
        wanted = [existing_row(app, checked_run_id(run)) for run in runs]
    families: list[list[RunRow]] = []
    seen: set[str] = set()
    for row in reversed(wanted) if runs is None else wanted:
        family = _family(app, row, seen)
        if family:
            families.append(family)
    return families


def _family(app: Host, row: RunRow, seen: set[str]) -> list[RunRow]:
    """Return all runs that are tied to one: parents, children, followers, and runs that wait for a key."""
    family: list[RunRow] = []
    found = [row.id]
    for id in found:
        one = app.store.run(id) if id not in seen else None
        if one is None or (one.status in ENDED and app.store.is_being_deleted(id)):
            continue
        seen.add(id)
        family.append(one)
        found += [child.id for child in app.store.children(id)]
        found += [one.parent] if one.parent is not None else []
        found += app.store.ties(id) if one.status not in ENDED else []
    return family


@asynccontextmanager
async def _claims(app: Host, rows: Sequence[RunRow]) -> AsyncIterator[list[RunRow]]:
    """Claim runs, so that no worker drives them. Runs that are not held at the end are given back."""
    claimed: list[RunRow] = []
    if rows:
        await app.become_worker()
    for owner in {row.owner for row in rows}:
        await wait_for_lapse(app, owner)
    try:
        for row in rows:
            if row.status == "held":
                raise Misuse(f"The run {row.id} is held: resolve that first (`everstep holds --run {row.id}`).")
            allowed = tuple(sorted(UNFINISHED - {"held"}))
            verdict = await app.committer.submit(Claim(row.id, app.worker, app.clock.now(), allowed))
            if row.id in app.drivers or not isinstance(verdict, Claimed):
                raise RunActive(f"The run {row.id} is driven by a process that is alive. Stop that one, then export.")
            claimed.append(verdict.row)
        yield claimed
    except BaseException:
        for row in claimed:
            await app.returns.give_back(Release(row.id, row.epoch, "queued" if row.status == "running" else row.status))
        raise


async def _hold(app: Host, claimed: Sequence[RunRow], path: str, by: str) -> None:
    """Put the exported runs on hold. If this is cut off, there is no file, and the held runs can continue here."""
    for row in claimed:
        report = HoldReport(
            "asked",
            f"exported to {os.path.basename(path)}: it continues in the store where that file is imported",
            facts={"by": by, EXPORTED: path},
            without=["rollback"],
            consequences={
                "retry": "continue HERE: only if the file is imported nowhere, or all is done twice",
                "cancel": "end what is here as cancelled, without its code; what was imported elsewhere is not touched",
            },
        )
        verdict = await app.committer.submit(await app.read(hold_unit, app, row, report))
        if not isinstance(verdict, Accepted):
            raise RunActive(f"The run {row.id} was taken over by another process just now. There is no file.")


def refuse_existing(path: str) -> None:
    """Raise if there is a file of this name."""
    if os.path.lexists(path):
        raise Misuse(f"{path} exists; nothing is ever overwritten. Name another file.")


def _write(
    app: Host,
    families: Sequence[Sequence[RunRow]],
    others: Others,
    stream: BinaryIO,
    mode: Mode,
    claimed: dict[str, int],
    *,
    secrets: bool,
) -> Exported:
    """Write the whole file beside its name, onto the disk. `claimed`: the epochs of unfinished runs that are held."""
    life = app.store.life()
    done = Exported([], mode, [], threads=others.threads, schedules=[row.name for row in others.schedules])
    header = Header(mode=mode, at=app.clock.now(), entropy=app.store.entropy, runs=sum(map(len, families)))
    may_be_doubted = restores_in(life) or any(app.store.arrival(row.id) for family in families for row in family)
    header.format = FORMAT if others.is_anything or may_be_doubted else 1
    writing = Writing(stream, header)
    for family in families:
        dumps = [dump for row in family if (dump := app.store.dump(row.id)) is not None]
        _refuse_what_has_changed(app, family, dumps, mode, claimed)
        check_sound(dumps, app.store.chain)
        if mode == "hold":
            _refuse_keys_under_way(dumps, "exported")
        for dump in dumps:
            is_doubted = may_lack(app.store, life, dump.row.id, dump.row.generation, note_of(dump))
            dump.arrivals = [_arrival(dump, doubted=True)] if is_doubted else []
        hidden = set() if secrets else failed_in_secret(app.store, dumps)
        secret = [] if secrets else secretive(dumps, hidden)
        if secret and mode == "hold" and unfinished_of(dumps):
            raise Misuse(
                f"{_named(secret)} have secret outcomes. They, or runs that depend on them, go on where the file is "
                "imported, and need them there. Say secrets=True (--with-secrets), and guard the file as you guard the "
                "store. Nothing was exported."
            )
        done.left_out += secret
        writing.family(without(dumps, hidden) if secret else dumps)
    done.items = write(app, others, writing)
    writing.end()
    return done


def _refuse_what_has_changed(
    app: Host, family: Sequence[RunRow], dumps: Sequence[RunDump], mode: Mode, claimed: dict[str, int]
) -> None:
    """Raise if a run was deleted since its status was read, or restarted: then it would continue here and elsewhere."""
    for row in family:
        refuse_deleted(app.store, row)
    for row in (dump.row for dump in dumps):
        if mode != "leave" and row.status not in ENDED and claimed.get(row.id) != row.epoch:
            raise RunActive(f"The run {row.id} was begun again just now ({row.status}). Export it again.")


def _arrival(dump: RunDump, *, doubted: bool) -> Arrival:
    return Arrival(dump.row.id, dump.row.generation, dump.row.head_seq, int(doubted))


def _name_file(part: str, path: str) -> None:
    """Give the file its name only now: its existence proves that nothing in it is driven here any more."""
    try:
        name_new(part, path)
    except FileExistsError:
        raise Misuse(
            f"{path} was made by another process meanwhile, and nothing is ever overwritten. The export is complete: "
            f"it is {part}. Give it another name."
        ) from None
    except OSError as error:
        raise Misuse(
            f"{path} cannot be given its name: {error.strerror}. The export is complete: it is {part}. Keep it, and "
            "give it another name: runs that were exported with 'hold' go on where it is imported."
        ) from error


# -- importing ----------------------------------------------------------------------------------------------------
async def import_file(app: Host, path: str, *, skip_existing: bool = False, copies: bool = False) -> Imported:
    """Import the runs of a file, a family in one transaction. The whole file is verified before anything is written."""
    done = Imported()
    with open(path, "rb") as stream:  # noqa: ASYNC230  # read twice, family by family; the app waits for its disk
        header = read_header(stream)
        for family in read_families(stream):
            _refuse_without_secrets(family)
            check_sound(family, app.store.chain)
            await app.read(_refuse, app, header, family, skip_existing=skip_existing, copies=copies)
        await app.read(check, app, stream, skip_existing=skip_existing)
        for family in read_families(stream):
            there = {row.id for row in await app.read(app.store.rows, [dump.row.id for dump in family])}
            new = [dump for dump in family if dump.row.id not in there]
            done.skipped += [dump.row.id for dump in family if dump not in new]
            if not new:
                continue
            for dump in new:
                dump.arrivals = [_arrival(dump, doubted=bool(dump.arrivals))]
            verdict = await app.committer.submit(ImportRuns(new))
            if not isinstance(verdict, Accepted):
                raise IdConflict(
                    f"{_named([dump.row.id for dump in new])} were not imported: an id, a hold or a key of theirs is "
                    f"in this store already. {len(done.runs)} others were."
                )
            done.runs += [dump.row.id for dump in new]
            done.unfinished += unfinished_of(new)
            was_restored = restores_in(app.life or await app.read(app.store.life)) > 0
            done.asking += unfinished_of([dump for dump in new if was_restored or dump.arrivals[0].doubted])
        await _import_others(app, header, stream, done, copies=copies)
    app.pump.nudge()
    return done


async def _import_others(app: Host, header: Header, stream: BinaryIO, done: Imported, *, copies: bool) -> None:
    for one in read_others(stream):
        if is_here(app, one):
            continue
        await put(app, one, header.mode, copies=copies)
        match one:
            case ThreadDump():
                done.threads.append(one.thread)
            case SavedItem():
                done.items += 1
            case ScheduleRow():
                done.schedules.append(one.name)
    if done.schedules:
        app.scheduler.look_closely()


def _refuse(app: Host, header: Header, family: Sequence[RunDump], *, skip_existing: bool, copies: bool) -> None:
    """Check a family before anything is written. Raises if it must not be imported."""
    existing = [dump.row.id for dump in family if app.store.run(dump.row.id) is not None]
    if existing and not skip_existing:
        raise IdConflict(
            f"{_named(existing)} are in this store already. Nothing was imported. With skip_existing=True "
            "(--skip-existing) they are left as they are here."
        )
    unfinished = [id for id in unfinished_of(family) if id not in existing]
    if unfinished and header.mode == "leave" and not copies:
        raise Misuse(
            f"{_named(unfinished)} were left to go on where they were exported, so here everything would be done "
            "twice. Export them with --hold, or say copies=True (--copies) if that is meant. Nothing was imported."
        )
    for dump in family:
        if dump.arrivals and note_of(dump).life == app.store.life():
            raise Misuse(
                f"The run {dump.row.id} comes from a backup of this very store, and has not been asked yet whether it "
                "lacks anything. Let a worker resume it there, then export it. Nothing was imported."
            )
    if header.entropy == app.store.entropy:
        return
    _refuse_keys_under_way([dump for dump in family if dump.row.id not in existing], "imported")


def _refuse_without_secrets(family: Sequence[RunDump]) -> None:
    """Refuse unfinished runs that lack secrets, and those that need them: they would have to compute outcomes again."""
    unfinished, lack = unfinished_of(family), lacking(family)
    if unfinished and lack:
        raise Misuse(
            f"{_named(unfinished)} have not ended, and the secrets of {', '.join(lack[:NAMED_MAX])} were left out of "
            "the file: they cannot go on. Export them again with secrets=True (--with-secrets). Nothing was imported."
        )


def _refuse_keys_under_way(dumps: Sequence[RunDump], verb: str) -> None:
    """Refuse a shared key in progress: its receiver's key derives from the store, so elsewhere it would be another
    action.
    """
    for dump in dumps:
        for one in dump.effects:
            if one.state == "under-way":
                raise Misuse(
                    f"A step of run {dump.row.id} with the key {one.key!r} was under way. What it gave its receiver "
                    "derives from the store that it was in, so in another it would be another action. Let the run "
                    f"settle it there, then export it. Nothing was {verb}."
                )


def _named(runs: Sequence[str]) -> str:
    more = f" and {len(runs) - NAMED_MAX} more" if len(runs) > NAMED_MAX else ""
    return f"The runs {', '.join(runs[:NAMED_MAX])}{more}"
