"""Deleting runs that have ended, without anybody having to wait for it.

A run is claimed first, which fences whoever would begin it anew, and then deleted part by part: each part is a short
transaction, and between two of them there is a pause of a few times as long as the last one took. A process that dies
in between leaves a run of which a part is gone; the store knows that, and the next deletion ends it.

Families go together: the run that nobody started, and its children. A family is left alone while any of it has not
ended, has an open hold, or has ended too lately. The keys of actions stay: they have a retention of
their own (`forget_keys`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.errors import Misuse
from everstep.model.status import ENDED
from everstep.stores.moving import Deleted, DeletePart
from everstep.stores.protocol import Claim, Claimed, RunFilter, RunRow, Store

if TYPE_CHECKING:
    from everstep.engine.app import App

PAGE: Final = 200
REST: Final = 4.0
"""A pause is so many times as long as the transaction before it."""
REST_MAX: Final = 0.25


class Collected(msgspec.Struct):
    """What was deleted, or with `dry_run` what would be."""

    runs: list[str] = []
    rows: int = 0
    """So many rows of histories, payloads, checkpoints, inboxes and runs."""
    left: int = 0
    """Runs that are old enough, and were left: one of their family has not ended, is held, or is kept."""


async def collect(app: "App", *, older_than: float, keep: int = 0, dry_run: bool = False) -> Collected:
    """Delete families of runs that have all ended so many seconds ago, the newest `keep` of each workflow excepted."""
    if older_than < 0 or keep < 0:
        raise Misuse("older_than= is a number of seconds, keep= a number of runs; neither is below 0.")
    done = Collected()
    until = app.clock.now() - int(older_than * 1e6)
    if not dry_run:
        await app.become_worker()
        app.store.bury_dead(app.clock.now())
        for run, generation in await app.read(app.store.deletions):
            row = app.store.run(run)
            if row is not None and row.generation == generation:
                await _delete(app, run, done)
    async for family in _families(app, until, keep, done):
        for row in family:
            if dry_run:
                done.runs.append(row.id)
                done.rows += row.head_seq
            else:
                await _delete(app, row.id, done)
    return done


async def _families(app: "App", until: int, keep: int, done: Collected) -> AsyncIterator[list[RunRow]]:
    """Return the families that may go. Those to be kept are counted from the newest on."""
    kept: Counter[str] = Counter()
    before: tuple[int, str] | None = None if keep else (until, "")
    while page := await app.read(app.store.runs, RunFilter(status=tuple(sorted(ENDED)), before=before, limit=PAGE)):
        before = (page[-1].created_at, page[-1].id)
        for row in page:
            if row.parent is not None and app.store.run(row.parent) is not None:
                continue  # it goes with its parent
            kept[row.workflow] += 1
            family = await app.read(family_of, app.store, row)
            if row.ended_at is None or row.ended_at >= until:
                continue
            if kept[row.workflow] <= keep or not all(_may_go(app.store, one, until) for one in family):
                done.left += len(family)
                continue
            yield family


def family_of(store: Store, row: RunRow) -> list[RunRow]:
    """Return a run and all that it started, and those started, and so on: each after its parent."""
    family, seen = [row], {row.id}
    for one in family:
        for child in store.children(one.id):
            if child.id not in seen:
                seen.add(child.id)
                family.append(child)
    return family


def _may_go(store: Store, row: RunRow, until: int) -> bool:
    is_old = row.status in ENDED and row.ended_at is not None and row.ended_at < until
    return is_old and not store.holds(run=row.id)


async def _delete(app: "App", run: str, done: Collected) -> None:
    """Delete a run part by part. One that somebody claimed meanwhile is left."""
    claimed = await app.committer.submit(Claim(run, app.worker, app.clock.now(), tuple(ENDED)))
    if not isinstance(claimed, Claimed):
        done.left += 1
        return
    while True:
        part = DeletePart(run, claimed.row.epoch, app.clock.now())
        begun = time.perf_counter()
        verdict = await app.committer.submit(part)
        took = time.perf_counter() - begun
        if not isinstance(verdict, Deleted):
            done.left += 1
            return
        done.rows += verdict.rows
        if verdict.done:
            done.runs.append(run)
        await asyncio.sleep(min(took * REST, REST_MAX))
        if verdict.done:
            return
