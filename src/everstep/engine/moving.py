"""Exporting runs into a file, and importing them into another store."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from everstep.engine.exporting import (
    Header,
    Mode,
    Writing,
    check_sound,
    read_families,
    read_header,
    unfinished_of,
)
from everstep.engine.holding import HoldReport
from everstep.engine.leases import wait_for_lapse
from everstep.engine.resume import hold_unit
from everstep.errors import IdConflict, Misuse, RunActive
from everstep.model.ids import checked_run_id
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.moving import ImportRuns, RunDump
from everstep.stores.protocol import Accepted, Claim, Claimed, Release, RunFilter, RunRow

if TYPE_CHECKING:
    from everstep.engine.app import App

PAGE: Final = 500
NAMED_MAX: Final = 5
EXPORTED: Final = "exported"
"""The fact in the hold of a run that goes on elsewhere: the file."""
Unfinished = Literal["hold", "leave"]


class Exported(msgspec.Struct):
    """What was exported."""

    runs: list[str]
    mode: Mode
    unfinished: list[str]
    """Those that had not ended: held here now, or left to go on here."""


class Imported(msgspec.Struct):
    """What was imported."""

    runs: list[str] = []
    skipped: list[str] = []
    """Their ids are here already."""
    unfinished: list[str] = []
    """Those of `runs` that have not ended: they go on here."""


# -- exporting ----------------------------------------------------------------------------------------------------
async def export(
    app: "App", runs: Sequence[str] | None, path: str, *, unfinished: Unfinished | None, by: str = ""
) -> Exported:
    """Write runs with their families into a file. None means all runs."""
    refuse_existing(path)
    families = _families(app, runs)
    rows = [row for family in families for row in family]
    open_runs = [row for row in rows if row.status not in ENDED]
    if open_runs and unfinished is None:
        raise Misuse(
            f"{_named([row.id for row in open_runs])} have not ended. Say what becomes of them here: unfinished='hold' "
            "(--hold) if they go on where the file is imported, or 'leave' (--leave) if they go on here and the file "
            "is only a copy."
        )
    mode: Mode = (unfinished or "ended") if open_runs else "ended"
    async with _claims(app, open_runs if mode == "hold" else []) as claimed:
        _write_part(app, families, path, mode)
        await _hold(app, claimed, path, by)
    _name_file(path)
    return Exported([row.id for row in rows], mode, [row.id for row in open_runs])


def _families(app: "App", runs: Sequence[str] | None) -> list[list[RunRow]]:
    """Return the runs that are meant, grouped by who waits for whom."""
    from everstep.engine.operations import existing_row

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


def _family(app: "App", row: RunRow, seen: set[str]) -> list[RunRow]:
    """Return all runs that are tied to one: parents, children, who follows whom, who waits for whose key."""
    family: list[RunRow] = []
    found = [row.id]
    for id in found:
        one = app.store.run(id) if id not in seen else None
        if one is None:
            continue
        seen.add(id)
        family.append(one)
        found += [child.id for child in app.store.children(id)]
        found += [one.parent] if one.parent is not None else []
        found += app.store.ties(id) if one.status not in ENDED else []
    return family


@asynccontextmanager
async def _claims(app: "App", rows: Sequence[RunRow]) -> AsyncIterator[list[RunRow]]:
    """Claim runs, so that nobody drives them. What is not held at the end is given back."""
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


async def _hold(app: "App", claimed: Sequence[RunRow], path: str, by: str) -> None:
    """Put the exported runs on hold. If this is cut off, there is no file, and whoever is held can go on here."""
    for row in claimed:
        report = HoldReport(
            "asked",
            f"exported to {os.path.basename(path)}: it goes on in the store where that file is imported",
            facts={"by": by, EXPORTED: path},
            without=["rollback"],
            consequences={
                "retry": "go on HERE: only if the file is imported nowhere, or all is done twice",
                "cancel": "end what is here as cancelled, without its code; what was imported elsewhere is not touched",
            },
        )
        verdict = await app.committer.submit(hold_unit(app, row, report))
        if not isinstance(verdict, Accepted):
            raise RunActive(f"The run {row.id} was taken over by somebody else just now. There is no file.")


def refuse_existing(path: str) -> None:
    """Raise if there is a file of this name."""
    if os.path.lexists(path):
        raise Misuse(f"{path} exists; nothing is ever overwritten. Name another file.")


def _write_part(app: "App", families: Sequence[Sequence[RunRow]], path: str, mode: Mode) -> None:
    """Write the whole file beside its name, onto the disk."""
    with open(os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        number = sum(map(len, families))
        writing = Writing(stream, Header(mode=mode, at=app.clock.now(), entropy=app.store.entropy, runs=number))
        for family in families:
            dumps = [dump for row in family if (dump := app.store.dump(row.id)) is not None]
            check_sound(dumps, app.store.chain)
            if mode == "hold":
                _refuse_keys_under_way(dumps, "exported")
            writing.family(dumps)
        writing.end()


def _name_file(path: str) -> None:
    """Only now is there a file of this name: whoever has it knows that nothing in it is driven here any more."""
    os.replace(f"{path}.part", path)
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- importing ----------------------------------------------------------------------------------------------------
async def import_file(app: "App", path: str, *, skip_existing: bool = False, copies: bool = False) -> Imported:
    """Put the runs of a file into this store, a family in one transaction. All of it is verified before anything is."""
    done = Imported()
    with open(path, "rb") as stream:  # noqa: ASYNC230  # read twice, family by family; the app waits for its disk
        header = read_header(stream)
        for family in read_families(stream):
            check_sound(family, app.store.chain)
            _refuse(app, header, family, skip_existing=skip_existing, copies=copies)
        for family in read_families(stream):
            new = [dump for dump in family if app.store.run(dump.row.id) is None]
            done.skipped += [dump.row.id for dump in family if dump not in new]
            if not new:
                continue
            verdict = await app.committer.submit(ImportRuns(new))
            if not isinstance(verdict, Accepted):
                raise IdConflict(
                    f"{_named([dump.row.id for dump in new])} were not imported: an id, a hold or a key of theirs is "
                    f"in this store already. {len(done.runs)} others were."
                )
            done.runs += [dump.row.id for dump in new]
            done.unfinished += unfinished_of(new)
    app.pump.nudge()
    return done


def _refuse(app: "App", header: Header, family: Sequence[RunDump], *, skip_existing: bool, copies: bool) -> None:
    """Raise what speaks against a family, before anything is written."""
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
    if header.entropy == app.store.entropy:
        return
    _refuse_keys_under_way([dump for dump in family if dump.row.id not in existing], "imported")


def _refuse_keys_under_way(dumps: Sequence[RunDump], verb: str) -> None:
    """What a receiver was given for a shared key derives from the store, so elsewhere it would be another action."""
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
