"""Deleting runs that have ended, without anybody having to wait for it.

A run is claimed first, which fences whoever would begin it anew, and then deleted part by part: each part is a short
transaction, and between two of them there is a pause of a few times as long as the last one took. Small runs share a
transaction. A process that dies in between leaves a run of which a part is gone; the store knows that, and the next
deletion ends it.

Families go together: the run that nobody started, and its children. A family is left alone while any of it has not
ended, has an open hold, has a key in doubt that somebody has to decide about, was taken over from a worker that may
still wake up, or has ended too lately. The keys of actions outlive their runs: they have a retention of their own.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.engine.clock import microseconds
from everstep.engine.threads import off_the_loop
from everstep.model.events import decode_body
from everstep.model.ids import STEP_PREFIX
from everstep.model.retention import Retention
from everstep.model.status import ENDED
from everstep.stores.keys import EffectFilter, ForgetKeys, Forgotten
from everstep.stores.moving import Deleted, DeletePart
from everstep.stores.protocol import Claim, Claimed, RunFilter, RunRow, Store

if TYPE_CHECKING:
    from everstep.engine.driving import Driving

PAGE: Final = 50
PART: Final = 200
"""So many rows are deleted in one transaction."""
BESIDE: Final = 10
"""Rows of a run that are not events, as a guess."""
KEYS: Final = 200
"""So many keys are forgotten in one transaction."""
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
    keys: int = 0
    """So many keys of actions were forgotten."""


async def collect(app: "Driving", retention: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what is older than it has to be kept. It ends early when the app is closed."""
    done = Collected()
    if not dry_run:
        await app.become_worker()
        app.store.bury_dead(app.clock.now())
        await _end_deletions(app, done)
    if retention.seconds_of_runs is not None:
        until = app.clock.now() - microseconds(retention.seconds_of_runs)
        gathered: list[RunRow] = []
        async for family in _families(app, until, retention.keep, done):
            if dry_run:
                done.runs += [row.id for row in family]
                done.rows += sum(row.head_seq for row in family)
                continue
            gathered += family
            if sum(map(_weight, gathered)) >= PART:
                await _delete_all(app, gathered, done)
                gathered = []
            if app.draining:
                return done
        await _delete_all(app, gathered, done)
    if retention.seconds_of_keys is not None:
        await _forget(app, app.clock.now() - microseconds(retention.seconds_of_keys), done, dry_run=dry_run)
    return done


async def _end_deletions(app: "Driving", done: Collected) -> None:
    """End what somebody began to delete and did not end."""
    for run, generation in await app.read(app.store.deletions):
        row = app.store.run(run)
        if row is not None and row.generation == generation:
            await _delete(app, [row], done)


async def _families(app: "Driving", until: int, keep: int, done: Collected) -> AsyncIterator[list[RunRow]]:
    """Return the families that may go. Those to be kept are counted from the newest on."""
    kept: Counter[str] = Counter()
    before: tuple[int, str] | None = None if keep else (until, "")
    while page := await app.read(app.store.runs, RunFilter(status=tuple(sorted(ENDED)), before=before, limit=PAGE)):
        before = (page[-1].created_at, page[-1].id)
        for row in page:
            await asyncio.sleep(0)  # whoever has something to do goes first
            if row.parent is not None and app.store.run(row.parent) is not None:
                continue  # it goes with its parent
            kept[row.workflow] += 1
            if row.ended_at is None or row.ended_at >= until:
                continue
            family = await family_of(app.store, row)
            if kept[row.workflow] <= keep or not await _may_all_go(app, family, until):
                done.left += len(family)
                continue
            yield family


async def family_of(store: Store, row: RunRow) -> list[RunRow]:
    """Return a run and all that it started, and those started, and so on: each after its parent."""
    family, seen = [row], {row.id}
    for one in family:
        for child in store.children(one.id):
            if child.id not in seen:
                seen.add(child.id)
                family.append(child)
        await asyncio.sleep(0)
    return family


async def _may_all_go(app: "Driving", family: Sequence[RunRow], until: int) -> bool:
    for number, row in enumerate(family):
        if number % 10 == 9:
            await asyncio.sleep(0)
        if not may_go(app.store, row, until):
            return False
    alive = {worker.id for worker in app.store.workers()}
    taken_over = [row for row in family if row.epoch > 0] if alive - {app.worker} else []
    for row in taken_over:
        if alive & await off_the_loop(overtaken_in, app.store, row):
            return False
    return True


def overtaken_in(store: Store, row: RunRow) -> set[str]:
    """Return the workers that may be in the middle of an atomic step of a run that somebody took over from them.

    While one of them lives it may wake up there, and only a marker tells it that it is late.
    """
    overtaken: set[str] = set()
    for generation in store.generations(row.id):
        begun_by: dict[int, str] = {}
        for event in store.events(row.id, generation):
            if event.kind not in ("step_started", "step_completed", "step_failed"):
                continue
            try:
                body = decode_body(event.kind, event.body)
            except msgspec.MsgspecError:  # a damaged history does not tell
                continue
            before = begun_by.pop(body.call, "")
            if event.kind == "step_started" and body.effect == "atomic":
                overtaken |= {before} - {body.by, ""}
                begun_by[body.call] = body.by
        overtaken |= set(begun_by.values())
    return overtaken


def may_go(store: Store, row: RunRow, until: int) -> bool:
    """Tell whether nothing speaks against deleting a run, as far as it alone is concerned."""
    is_old = row.status in ENDED and row.ended_at is not None and row.ended_at < until
    if not is_old or store.holds(run=row.id) or has_key_in_doubt(store, row.id):
        return False
    return not row.workflow.startswith(STEP_PREFIX) or not is_of_a_thread(store, row)


def is_of_a_thread(store: Store, row: RunRow) -> bool:
    """Tell whether a step was called in a thread of a framework that is still there: it may be resumed, and asks."""
    return "thread" in row.tags and bool(store.saved.states(row.tags["thread"], limit=1))


def has_key_in_doubt(store: Store, run: str) -> bool:
    """Tell whether an ended run has a key that a person has to decide about. Its history is what that is decided by."""
    return bool(store.effects(EffectFilter(run=run, state="under-way", limit=1)))


def _weight(row: RunRow) -> int:
    return row.head_seq + BESIDE


async def _delete_all(app: "Driving", rows: Sequence[RunRow], done: Collected) -> None:
    """Delete runs, so many at a time that their rows fit into one transaction, as far as one can tell."""
    group: list[RunRow] = []
    weight = 0
    for row in rows:
        weight += _weight(row)
        if group and weight > PART:
            await _delete(app, group, done)
            group, weight = [], _weight(row)
        group.append(row)
    await _delete(app, group, done)


async def _delete(app: "Driving", group: Sequence[RunRow], done: Collected) -> None:
    """Delete runs part by part, at the same time. Those that somebody claimed meanwhile are left."""
    claims = [app.committer.submit(Claim(row.id, app.worker, app.clock.now(), tuple(ENDED))) for row in group]
    verdicts = await asyncio.gather(*claims)
    claimed = [verdict.row for verdict in verdicts if isinstance(verdict, Claimed)]
    done.left += len(group) - len(claimed)
    while claimed and not app.draining:
        at, limit = app.clock.now(), max(PART // len(claimed), BESIDE)
        parts = [DeletePart(row.id, row.epoch, at, min(PART, max(limit, _weight(row)))) for row in claimed]
        begun = time.perf_counter()
        answers = await asyncio.gather(*(app.committer.submit(part) for part in parts))
        await asyncio.sleep(min((time.perf_counter() - begun) * REST, REST_MAX))
        more = []
        for row, answer in zip(claimed, answers, strict=True):
            if not isinstance(answer, Deleted):
                done.left += 1
                continue
            done.rows += answer.rows
            if answer.done:
                done.runs.append(row.id)
            else:
                more.append(row)
        claimed = more


async def _forget(app: "Driving", until: int, done: Collected, *, dry_run: bool) -> None:
    """Forget keys that are done or free and have not changed since."""
    if dry_run:
        done.keys = await app.read(app.store.old_keys, until)
        return
    while not app.draining:
        begun = time.perf_counter()
        verdict = await app.committer.submit(ForgetKeys(until, KEYS))
        assert isinstance(verdict, Forgotten)
        done.keys += verdict.keys
        if verdict.keys < KEYS:
            return
        await asyncio.sleep(min((time.perf_counter() - begun) * REST, REST_MAX))
