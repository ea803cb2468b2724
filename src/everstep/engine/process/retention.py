"""The retention of an app: from time to time it deletes what is old enough, in the background.

It deletes a little at a time, so that active runs hardly notice. Each process with a retention does it; two that meet
leave each other's runs alone. If a process dies in between, the others do the rest.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence, Set
from datetime import timedelta
from typing import Final

import msgspec

from everstep.engine.history.clock import SECOND, Alarm, microseconds, set_alarm, ticks_of
from everstep.engine.process.process import Process
from everstep.engine.run.acting import may_act
from everstep.model.crash_points import crash_point
from everstep.model.events import decode_body
from everstep.model.ids import STEP_PREFIX
from everstep.model.retention import Retention, retention_of
from everstep.model.status import ENDED
from everstep.model.untrusted import logger
from everstep.stores.protocol import Accepted, Claim, Claimed, RunFilter, RunRow, Store
from everstep.stores.rows.keys import UNSETTLED, EffectFilter, ForgetKeys, Forgotten
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart

log = logger("everstep.gc")

LEAP_SECONDS: Final = 30 * 86400.0
"""If a store's clock is ahead of its last reading by more than this, without time having passed, it may be wrong."""
TRUST_SECONDS: Final = 86400.0
"""Delay before anything is deleted after such a jump, so that a person can correct the clock."""
FIRST_SECONDS: Final = 1.0
"""How soon after its start a process first looks, so that short-lived ones do their share."""


class Collector:
    """Deletes in the background what need not be kept. Without a retention it does nothing."""

    def __init__(self, app: Process, retention: Retention | float | timedelta | None) -> None:
        self.retention: Retention | None = None
        if retention is not None:
            self.retention = retention_of(retention)
        self._app = app
        self._alarm: Alarm | None = None
        self._ticks = ticks_of(app.clock)
        self._seen = 0, 0
        """The last reading of the store's clock, and the ticks at that time."""
        self._trusted_at = 0

    def begin(self) -> None:
        """Look soon after the app has become a worker, and then from time to time."""
        if self.retention is not None and self._alarm is None:
            self._seen = self._app.store.noted or self._app.clock.now(), self._ticks()
            self._look_after(min(FIRST_SECONDS, self.retention.seconds_between))

    def close(self) -> None:
        """Stop looking. A deletion in progress stops by itself."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _look_after(self, seconds: float) -> None:
        app = self._app
        self._alarm = set_alarm(app.clock, app.loop, app.clock.now() + microseconds(seconds), self._ring)

    def _ring(self) -> None:
        if not self._app.draining:
            self._app.background.keep("retention", self._look)

    def _is_trusted(self) -> bool:
        """Return True if the store's clock may decide what is old. A clock that is a year ahead must not delete
        everything.
        """
        (seen, then), now, ticks = self._seen, self._app.clock.now(), self._ticks()
        self._seen = now, ticks
        leapt = (now - seen - (ticks - then)) / SECOND
        if leapt > LEAP_SECONDS:
            self._trusted_at = ticks + microseconds(TRUST_SECONDS)
            log.warning(
                "The store's clock is %.0f days ahead of what it was when it was last used: nothing is deleted for a "
                "day, unless you say `everstep gc`. If the clock is wrong, put it right and start again.",
                leapt / 86400,
            )
        return ticks >= self._trusted_at

    async def _look(self) -> None:

        assert self.retention is not None
        if self._is_trusted():
            done = await collect(self._app, self.retention)
            if done.runs or done.keys:
                log.info("%d runs and %d keys were old enough, and were deleted.", len(done.runs), done.keys)
        if not self._app.draining:
            self._look_after(self.retention.seconds_between)


PAGE: Final = 50
PART: Final = 200
"""The number of rows that are deleted in one transaction."""
BESIDE: Final = 10
"""An estimate of a run's rows that are not events."""
KEYS: Final = 200
"""The number of keys that are forgotten in one transaction."""
REST: Final = 4.0
"""The length of a pause, relative to the transaction before it."""
REST_MAX: Final = 0.25


class Collected(msgspec.Struct):
    """What was deleted, or with `dry_run` what would be."""

    runs: list[str] = []
    rows: int = 0
    """The number of rows of histories, payloads, checkpoints, inboxes and runs."""
    left: int = 0
    """Runs that are old enough, and were left: one of their family has not ended, is held, is kept, or is needed by
    another run that may continue.
    """
    keys: int = 0
    """The number of keys of actions that were forgotten."""


async def collect(app: Process, retention: Retention, *, dry_run: bool = False) -> Collected:
    """Delete what is older than it has to be kept. It ends early when the app is closed."""
    done = Collected()
    if not dry_run:
        await app.become_worker()
        await app.read(app.store.bury_dead, app.clock.now())
        await _end_deletions(app, done)
    if retention.seconds_of_runs is not None:
        until = app.clock.now() - microseconds(retention.seconds_of_runs)
        before = -1
        while before < len(done.runs) and not app.draining:
            before, done.left = len(done.runs), 0
            await _collect_runs(app, until, retention.keep, done, dry_run=dry_run)
            if dry_run or not done.left:
                break  # otherwise the deleted runs may have been all that needed a remaining family
    if retention.seconds_of_keys is not None:
        await _forget(app, app.clock.now() - microseconds(retention.seconds_of_keys), done, dry_run=dry_run)
    return done


async def _collect_runs(app: Process, until: int, keep: int, done: Collected, *, dry_run: bool) -> None:
    """Go through all families once."""
    gathered: list[list[RunRow]] = []
    async for family in _families(app, until, keep, done):
        if dry_run:
            done.runs += [row.id for row in family]
            done.rows += sum(row.head_seq for row in family)
            continue
        gathered.append(family)
        if sum(_weight(row) for family in gathered for row in family) >= PART:
            await _delete_families(app, gathered, until, done)
            gathered = []
        if app.draining:
            return
    await _delete_families(app, gathered, until, done)


async def _end_deletions(app: Process, done: Collected) -> None:
    """End what somebody began to delete and did not end."""
    for run, generation in await app.read(app.store.deletions):
        row = await app.read(app.store.run, run)
        if row is None or row.generation != generation:
            continue
        claim = Claim(run, app.worker, app.clock.now(), tuple(ENDED), deleting=True)
        verdict = await app.committer.submit(claim)
        if isinstance(verdict, Claimed):
            await _delete(app, [verdict.row], done)


async def _families(app: Process, until: int, keep: int, done: Collected) -> AsyncIterator[list[RunRow]]:
    """Return the families that may go. Those to be kept are counted from the newest on."""
    kept: Counter[str] = Counter()
    before: tuple[int, str] | None = None if keep else (until, "")
    while page := await app.read(app.store.runs, RunFilter(status=tuple(sorted(ENDED)), before=before, limit=PAGE)):
        before = (page[-1].created_at, page[-1].id)
        for row in page:
            await asyncio.sleep(0)  # other work goes first
            if row.parent is not None and await app.read(app.store.run, row.parent) is not None:
                continue  # it is deleted with its parent
            kept[row.workflow] += 1
            if row.ended_at is None or row.ended_at >= until:
                continue
            family = await family_of(app, row)
            if kept[row.workflow] <= keep or not await _may_all_go(app, family, until):
                done.left += len(family)
                continue
            yield family


async def family_of(app: Process, row: RunRow) -> list[RunRow]:
    """Return a run and all that it started, and those started, and so on: each after its parent."""
    family, seen = [row], {row.id}
    for one in family:
        for child in await app.read(app.store.children, one.id):
            if child.id not in seen:
                seen.add(child.id)
                family.append(child)
        await asyncio.sleep(0)
    return family


async def _may_all_go(app: Process, family: Sequence[RunRow], until: int) -> bool:
    for number, row in enumerate(family):
        if number % 10 == 9:
            await asyncio.sleep(0)
        if not await app.read(may_go, app.store, row, until):
            return False
    for row in family:
        if row.epoch > 1:  # it was taken over, perhaps from a worker that has not noticed yet
            overtaken = await asyncio.to_thread(overtaken_in, app.store, row)
            if await app.read(_may_any_act, app.store, overtaken, row.id):
                return False
    return not await app.read(app.store.is_needed, [row.id for row in family])


def _may_any_act(store: Store, workers: Set[str], run: str) -> bool:
    return any(may_act(store, worker, run) for worker in workers)


def overtaken_in(store: Store, row: RunRow) -> set[str]:
    """Return the workers that may be in the middle of an atomic step of a run that was taken over from them.

    One that has not ended may wake up there, and only a marker tells it that it is late.
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
    """Return True if a run by itself may be deleted."""
    is_old = row.status in ENDED and row.ended_at is not None and row.ended_at < until
    if not is_old or store.holds(run=row.id) or has_key_in_doubt(store, row.id):
        return False
    return not row.workflow.startswith(STEP_PREFIX) or not is_of_a_thread(store, row)


def is_of_a_thread(store: Store, row: RunRow) -> bool:
    """Return True if a step was called in an existing thread of a framework: that may be resumed, and ask for it."""
    return "thread" in row.tags and bool(store.saved.states(row.tags["thread"], limit=1))


def has_key_in_doubt(store: Store, run: str) -> bool:
    """Return True if an ended run has a key that a person has to decide about, for which its history is needed."""
    return any(store.effects(EffectFilter(run=run, state=state, limit=1)) for state in UNSETTLED)


def _weight(row: RunRow) -> int:
    return row.head_seq + BESIDE


async def _delete_families(app: Process, families: Sequence[Sequence[RunRow]], until: int, done: Collected) -> None:
    """Claim families and delete them, so many runs at a time that their rows fit into one transaction.

    Those of which anything is not as it was when they were judged are left.
    """
    crash_point("gc.judged")
    at = app.clock.now()
    claims = [ClaimFamily({row.id: row.epoch for row in family}, app.worker, at, until) for family in families]
    verdicts = await asyncio.gather(*map(app.committer.submit, claims))
    group: list[RunRow] = []
    for family, verdict in zip(families, verdicts, strict=True):
        if not isinstance(verdict, Accepted):
            done.left += len(family)
            continue
        for row in family:
            if group and sum(map(_weight, group)) + _weight(row) > PART:
                await _delete(app, group, done)
                group = []
            group.append(msgspec.structs.replace(row, epoch=row.epoch + 1))
    await _delete(app, group, done)


async def _delete(app: Process, claimed: Sequence[RunRow], done: Collected) -> None:
    """Delete claimed runs part by part, at the same time."""
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


async def _forget(app: Process, until: int, done: Collected, *, dry_run: bool) -> None:
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
