"""What a store does, as a model: the differential tests compare every database with it.

It is plain dicts, without locks, transactions or files, and short enough to be read beside the rules that it is about
(`everstep.stores.protocol`, and the pure functions of `stores.rows`, which it uses as the stores do). It has what those
tests do and ask. It imports no runs, deletes a run in one part, and repairs only the newest generation of one;
`test_conformance_*` show of every store what it does beyond that.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from everstep.errors import Misuse
from everstep.model.events import EventRow
from everstep.model.forked import TAG
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.protocol import (
    Accepted,
    Append,
    CheckpointRow,
    Claim,
    Claimed,
    Delivery,
    Existing,
    Failed,
    HoldRow,
    MarkRestored,
    NewRun,
    NotClaimed,
    NotPosted,
    Operation,
    Post,
    Posted,
    Refused,
    Release,
    RepairRun,
    RestartRun,
    RunRow,
    StartRun,
    Verdict,
    WorkerRow,
    check_events,
    child_value,
)
from everstep.stores.rows import keys
from everstep.stores.rows.answers_and_streams import ENTRY_COLUMNS, AnswerRow, EntryRow
from everstep.stores.rows.archive import (
    CHECKPOINT_COLUMNS,
    EVENT_COLUMNS,
    PAYLOAD_COLUMNS,
    RUN_COLUMNS,
    ArchiveRow,
    archive_bytes,
)
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.schedules import ChangeSchedule
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart
from tests.stores.model_beside import Notifications, Queues, Schedules
from tests.stores.model_saved import SavedModel


class Kept(msgspec.Struct):
    """All of one run that goes when it is deleted."""

    row: RunRow
    events: dict[int, list[EventRow]] = {}
    payloads: dict[str, bytes] = {}
    checkpoints: dict[int, dict[int, CheckpointRow]] = {}
    inbox: dict[int, Delivery] = {}
    archive: list[ArchiveRow] = []
    answers: dict[int, AnswerRow] = {}
    entries: dict[tuple[int, str, int], EntryRow] = {}
    followers: set[tuple[str, int]] = set()
    holds: dict[str, HoldRow] = {}

    def history(self) -> list[EventRow]:
        return self.events.get(self.row.generation, [])

    def pending(self) -> list[Delivery]:
        return [one for one in self.inbox.values() if one.state == "pending"]

    def keep(self, new: NewRun) -> None:
        """Begin a generation, or the first one."""
        self.row = new.row
        self.events[new.row.generation] = [new.event, *new.more]
        self.payloads = {**dict(reversed(new.payloads)), **self.payloads}
        if new.follower is not None:
            self.followers.add((new.follower, new.follower_call))


class Model:
    """A store, as far as the differential tests use it."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.now = clock
        self.kept: dict[str, Kept] = {}
        self._workers: dict[str, WorkerRow] = {}
        self.dead: set[str] = set()
        self.keys: dict[str, keys.EffectRow] = {}
        self.waiting: set[tuple[str, str, int]] = set()
        """Keys, and the runs and calls that wait for them."""
        self.relied: set[tuple[str, str]] = set()
        """Keys, and the runs that count on them."""
        self.begun: dict[str, tuple[int, int]] = {}
        """Runs to when their deletion began, and their generations then."""
        self.restored = self.last = 0
        self.notes = Notifications(self.holds, self._workers)
        self.plans = Schedules()
        self.limits = Queues(self._all, self._workers)
        self.saved = SavedModel(lambda worker: worker in self._workers and self._workers[worker].has_lease)

    def close(self) -> None:
        """Nothing is open."""

    # -- runs ---------------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation]) -> list[Verdict]:
        return [deepcopy(self._verdict(deepcopy(operation))) for operation in operations]

    def _verdict(self, operation: Any) -> Verdict:
        try:
            return self._do(operation)
        except Exception as error:  # noqa: BLE001  # it concerns this operation only
            return Failed(error)

    def _do(self, operation: Any) -> Verdict:
        do: dict[type, Callable[[Any], Verdict]] = {
            StartRun: self._start,
            RestartRun: self._restart,
            Append: self._append,
            Post: self._post,
            Claim: self._claim,
            Release: self._release,
            RepairRun: self._repair,
            MarkRestored: self._mark_restored,
            ClaimFamily: self._claim_family,
            DeletePart: self._delete,
            keys.SettleKey: self._settle_key,
            keys.ForgetKeys: self._forget_keys,
            TakeNotification: self.notes.take,
            SettleNotification: self.notes.settle,
            ChangeSchedule: self._change_schedule,
            ChangeQueue: self.limits.change,
            TakeSlot: self.limits.take_slot,
            FreeSlot: self.limits.free_slot,
        }
        return do.get(type(operation), self.saved.do)(operation)

    def _start(self, start: StartRun) -> Verdict:
        check_events(start.new)
        id, needs = start.new.row.id, start.needs
        if id in self.kept:
            return Existing(self.kept[id].row)
        if needs is not None and any(one not in self.kept or self.is_being_deleted(one) for one in needs.runs):
            return Refused("missing")
        if needs is not None and any(key not in self.keys for key in needs.keys):
            return Refused("key")
        self._create(start.new)
        self.relied |= {(key, id) for key in needs.keys} if needs is not None else set()
        return Accepted()

    def _create(self, new: NewRun) -> None:
        self.kept.setdefault(new.row.id, Kept(new.row)).keep(new)

    def _restart(self, restart: RestartRun) -> Verdict:
        check_events(restart.new)
        new, kept = restart.new, self.kept.get(restart.new.row.id)
        if kept is None:
            return Refused("missing")
        row = kept.row
        if row.epoch != restart.epoch or row.status not in ENDED or new.row.generation != row.generation + 1:
            return Refused("fenced")
        for one in kept.inbox.values():
            one.state = "consumed" if one.state == "consumed" else "left"
            one.id = "" if one.kind in ("signal", "cancel") else one.id
        self._begin_generation(kept, new, new.row.updated_at)
        return Accepted()

    def _begin_generation(self, kept: Kept, new: NewRun, at: int) -> None:
        """Epochs never go down. What the old generation followed is no news about the new one's calls."""
        row = kept.row
        self._free_keys(row, at)
        for one in self.kept.values():
            one.followers = {follower for follower in one.followers if follower[0] != row.id}
        new.row.epoch = row.epoch
        kept.keep(new)

    def _append(self, append: Append) -> Verdict:
        check_events(append)
        kept = self.kept.get(append.run)
        if kept is None:
            return Refused("missing")
        if (refusal := self._refusal(append, kept)) is not None:
            return refusal
        hold, at = append.hold, append.row.at
        if hold is not None and hold.resolved_at is None and self._hold_of(hold.id) is not None:
            raise Misuse("There is such a hold.")
        for new in (*append.starts, *([append.renewal] if append.renewal is not None else [])):
            check_events(new)
        self._move(kept.row, append)
        kept.history().extend(append.events)
        kept.payloads = {**dict(reversed(append.payloads)), **kept.payloads}
        for number in {*append.consumed} & {*kept.inbox}:
            kept.inbox[number].state = "consumed"
        for new in append.starts:
            self._start_child(new, at)
        for post in append.posts:
            verdict = self._post(post)
            if isinstance(verdict, NotPosted) and verdict.status is not None and self._same(post) is None:
                self._deliver(post)  # it stays visible that it came too late
        if hold is not None:
            self._hold(kept, hold)
            for note in append.notifications:
                self.notes.rows.setdefault(note.id, note)
        if append.keys is not None:
            self._change_keys(append.keys, kept.row, at)
        self._keep_beside(kept, append)
        if append.renewal is not None:
            self._begin_generation(kept, append.renewal, at)
        if append.row.status in ENDED:
            self._end(kept, append)
        return Accepted()

    def _refusal(self, append: Append, kept: Kept) -> Refused | None:
        row, wanted = kept.row, append.keys
        if (row.generation, row.epoch) != (append.generation, append.epoch):
            return Refused("fenced")
        if (row.head_seq, row.head_digest) != (append.expected_seq, append.expected_digest):
            return Refused("head")
        cancels = {one.number for one in kept.pending() if one.kind == "cancel"}
        if append.row.status in ENDED and not cancels <= set(append.consumed):
            return Refused("inbox")
        if wanted is not None and (lost := self._lost_keys(wanted, row)):
            return Refused("key", lost)
        if wanted is not None and any(key not in self.keys for key in wanted.relies):
            return Refused("key")
        return None

    def _move(self, row: RunRow, append: Append) -> None:
        change = append.row
        if append.events:
            row.head_seq, row.head_digest = append.events[-1].seq, append.events[-1].digest
            row.deaths = 0 if change.progress else row.deaths
        row.status, row.updated_at, row.wake_at = change.status, change.at, change.wake_at
        row.current_step, row.outcome = change.current_step, change.outcome
        row.published = row.published if change.published is None else change.published
        row.budget = row.budget if change.budget is None else change.budget
        row.ended_at = change.at if change.status in ENDED else None
        row.owner = None if change.status in ENDED or append.release else row.owner

    def _keep_beside(self, kept: Kept, append: Append) -> None:
        rows = kept.checkpoints.setdefault(append.generation, {})
        for row in append.checkpoints:
            rows.setdefault(row.seq, row)
        for seq in sorted(rows)[: -append.checkpoints_kept] if append.checkpoints else ():
            del rows[seq]
        if append.beside is not None:
            for answer in append.beside.answers:
                kept.answers.setdefault(answer.number, answer)
            for entry in append.beside.entries:
                kept.entries.setdefault((entry.generation, entry.name, entry.position), entry)
        kept.archive += append.archive
        for archived in append.archive:
            if archived.what == "checkpoint":
                kept.checkpoints.get(archived.generation, {}).pop(archived.seq, None)

    def _start_child(self, new: NewRun, at: int) -> None:
        kept = self.kept.get(new.row.id)
        if kept is None:
            self._create(new)
            return
        row = kept.row
        assert new.follower is not None
        if (row.workflow, row.arguments) != (new.row.workflow, new.row.arguments):
            self._tell(new.follower, row.id, new.follower_call, child_value("refused", None), at)
        elif row.status in ENDED:
            value = child_value(row.status, row.outcome, row.budget)
            self._tell(new.follower, row.id, new.follower_call, value, at)
        else:
            kept.followers.add((new.follower, new.follower_call))

    def _end(self, kept: Kept, append: Append) -> None:
        row, change = kept.row, append.row
        for follower, call in sorted(kept.followers):
            self._tell(follower, row.id, call, child_value(row.status, row.outcome, change.budget), change.at)
        kept.followers = set()
        self._free_keys(row, change.at)
        for one in kept.pending():
            one.state = "undelivered"

    def _claim(self, claim: Claim) -> Verdict:
        row = self.run(claim.run)
        if row is None or row.status not in claim.statuses:
            return NotClaimed(row)
        if not UNFINISHED.issuperset(claim.statuses) and self.is_being_deleted(row.id) != claim.deleting:
            return NotClaimed(row)
        if row.owner != claim.worker and not self._is_free(row):
            return NotClaimed(row)
        if claim.queued and not self.limits.lets_begin(claim, row):
            return NotClaimed(row)
        has_died = row.owner not in (None, claim.worker) and row.owner not in self._workers
        row.deaths += has_died and row.status in ("running", "queued")
        row.epoch, row.owner = row.epoch + 1, claim.worker
        return Claimed(row)

    def _release(self, release: Release) -> Verdict:
        row = self.run(release.run)
        if row is None:
            return Refused("missing")
        if row.epoch != release.epoch:
            return Refused("fenced")
        row.owner, row.status = None, row.status if row.status in ENDED else release.status
        return Accepted()

    def _is_free(self, row: RunRow) -> bool:
        return row.owner not in self._workers or not self._workers[row.owner].has_lease

    # -- inboxes and holds --------------------------------------------------------------------------------------------
    def _post(self, post: Post) -> Verdict:
        there, row = self._same(post), self.run(post.run)
        if there is not None and there.state != "undelivered":
            return Posted(there.number, duplicate=True)
        if row is None or row.status in ENDED:
            return NotPosted(row.status if row is not None else None)
        if there is not None:
            there.state, there.name, there.value, there.at = "pending", post.name, post.value, post.at
            return Posted(there.number)
        return Posted(self._deliver(post))

    def _same(self, post: Post) -> Delivery | None:
        inbox = self.kept[post.run].inbox.values() if post.id and post.run in self.kept else ()
        return next((one for one in inbox if (one.kind, one.id) == (post.kind, post.id)), None)

    def _deliver(self, post: Post) -> int:
        self.last += 1
        kept = self.kept[post.run]
        one = Delivery(self.last, post.run, post.kind, post.name, post.id, post.value, post.at)
        one.state = "undelivered" if kept.row.status in ENDED else "pending"
        kept.inbox[self.last] = one
        return self.last

    def _tell(self, follower: str, run: str, call: int, value: bytes, at: int) -> None:
        if follower in self.kept:
            self._deliver(Post(run=follower, kind="child", name=run, id=str(call), value=value, at=at))

    def _hold_of(self, id: str) -> HoldRow | None:
        return next((kept.holds[id] for kept in self.kept.values() if id in kept.holds), None)

    def _hold(self, kept: Kept, hold: HoldRow) -> None:
        there = kept.holds.get(hold.id)
        if hold.resolved_at is None:
            kept.holds[hold.id] = hold
        elif there is not None and there.resolved_at is None:
            there.resolved_at, there.resolution = hold.resolved_at, hold.resolution
            there.by, there.note = hold.by, hold.note
            self.notes.drop(hold.id)

    # -- keys ---------------------------------------------------------------------------------------------------------
    def _lost_keys(self, wanted: keys.KeyChanges, row: RunRow) -> tuple[int, ...]:
        taken: set[str] = set()
        lost: list[int] = []
        for claim in wanted.claims:
            owner = (row.id, row.generation, claim.call)
            if claim.key in taken or not keys.may_claim(self.keys.get(claim.key), claim, owner):
                lost.append(claim.call)
            else:
                taken.add(claim.key)
        lost += [share.call for share in wanted.shares if not keys.may_share(self.keys.get(share.key), share)]
        return tuple(lost)

    def _change_keys(self, wanted: keys.KeyChanges, row: RunRow, at: int) -> None:
        """Claims come first, then ends, what is undone, and waits."""
        for claim in wanted.claims:
            owner = (row.id, row.generation, claim.call)
            self.keys[claim.key] = keys.claimed_row(claim, owner, self.keys.get(claim.key), at)
        for end in wanted.ends:
            owner, there = (row.id, row.generation, end.claim.call), self.keys.get(end.claim.key)
            if keys.ends_key(there, end, owner):
                self._change_key(end.claim.key, keys.ended_row(there, end, owner, at), at)
        for undoing in wanted.undoing:
            is_change, after = keys.undoing_row(self.keys.get(undoing.key), undoing, row.id, row.generation, at)
            if is_change:
                self._change_key(undoing.key, after, at)
        for wait in wanted.waits:
            if wait.key in self.keys and self.keys[wait.key].state in keys.UNSETTLED:
                self.waiting.add((wait.key, row.id, wait.call))
            else:
                self._tell_of_key(row.id, wait.key, wait.call, at)
        self.relied |= {(key, row.id) for key in wanted.relies}

    def _change_key(self, key: str, row: keys.EffectRow | None, at: int) -> None:
        self.keys = {other: there for other, there in self.keys.items() if other != key}
        if row is not None:
            self.keys[key] = row
        for run, call in self.waiters(key):
            self.waiting.remove((key, run, call))
            self._tell_of_key(run, key, call, at)

    def _tell_of_key(self, run: str, key: str, call: int, at: int) -> None:
        row = self.run(run)
        if row is not None and row.status not in ENDED:
            self._deliver(Post(run=run, kind="key", name=key, id=str(call), at=at))

    def _free_keys(self, row: RunRow, at: int) -> None:
        """Its run ends: what its steps had under way, and anybody may do again, is free."""
        mine = [one for one in self.keys.values() if (one.run, one.generation) == (row.id, row.generation)]
        for one in sorted(mine, key=lambda one: one.key):
            if keys.ends_with_its_run(one):
                self._change_key(one.key, keys.freed_row(one, at), at)

    def _settle_key(self, settle: keys.SettleKey) -> Verdict:
        there = self.keys.get(settle.key)
        owner = self.run(there.run) if there is not None else None
        is_active = owner is not None and owner.status not in ENDED and owner.generation == there.generation
        if why := keys.may_settle(there, settle, owner_is_active=is_active):
            return Refused(why)
        self._change_key(settle.key, keys.settled_by_hand(self.keys[settle.key], settle), settle.at)
        return Accepted()

    def _forget_keys(self, forget: keys.ForgetKeys) -> Verdict:
        old = sorted(self._old_keys(forget.before), key=lambda row: (row.changed_at, row.key))[: forget.limit]
        for row in old:
            del self.keys[row.key]
        self.relied = {one for one in self.relied if one[0] in self.keys}
        return keys.Forgotten(len(old))

    def _old_keys(self, before: int) -> list[keys.EffectRow]:
        relied = {key for key, run in self.relied if self._may_go_on(run)}
        old = [one for one in self.keys.values() if one.state not in keys.UNSETTLED and one.changed_at < before]
        return [one for one in old if one.key not in relied]

    # -- repairs and deletions ----------------------------------------------------------------------------------------
    def _repair(self, repair: RepairRun) -> Verdict:
        new, kept = repair.row, self.kept.get(repair.row.id)
        if kept is None:
            return Refused("missing")
        row = kept.row
        if row.epoch != repair.epoch or (row.owner != repair.worker and not self._is_free(row)):
            return Refused("fenced")

        def put_away(what: str, generation: int, seq: int, columns: Sequence[str], values: Iterable[object]) -> None:
            found = archive_bytes(columns, list(values))
            kept.archive.append(ArchiveRow(new.id, generation, what, seq, found, repair.why, repair.at))

        tags = msgspec.json.encode(row.tags).decode()
        columns = [tags if name == "tags" else getattr(row, name) for name in RUN_COLUMNS]
        put_away("run", row.generation, row.head_seq, RUN_COLUMNS, columns)
        history, checkpoints = kept.history(), kept.checkpoints.get(new.generation, {})
        for event in [event for event in history if event.seq > repair.keep]:
            history.remove(event)
            values = (new.id, new.generation, *event)
            put_away("event", new.generation, event.seq, EVENT_COLUMNS, values)
        for seq in sorted(seq for seq in checkpoints if seq > repair.keep):  # it is worth nothing without its events
            put_away("checkpoint", new.generation, seq, CHECKPOINT_COLUMNS, checkpoints.pop(seq))
        kept.answers = {number: one for number, one in kept.answers.items() if not self._is_after(one, repair)}
        for place in sorted(place for place, entry in kept.entries.items() if self._is_after(entry, repair)):
            entry = kept.entries.pop(place)
            put_away("entry", entry.generation, entry.seq, ENTRY_COLUMNS, entry)
        for digest in sorted({*repair.payloads} & {*kept.payloads}):
            values = (new.id, digest, kept.payloads.pop(digest))
            put_away("payload", new.generation, 0, PAYLOAD_COLUMNS, values)
        kept.row = msgspec.structs.replace(new, epoch=row.epoch + 1, owner=None)
        history += [repair.event] if repair.event is not None else []
        for number in {*repair.pending} & {*kept.inbox}:
            if kept.inbox[number].state in ("consumed", "undelivered"):
                kept.inbox[number].state = "pending"
        return Accepted()

    def _is_after(self, one: AnswerRow | EntryRow, repair: RepairRun) -> bool:
        return one.generation == repair.row.generation and one.seq > repair.keep

    def _mark_restored(self, mark: MarkRestored) -> Verdict:
        if self.restored != mark.expected or self._workers:
            return Refused("fenced")
        self.restored += 1
        return Accepted()

    def _claim_family(self, family: ClaimFamily) -> Verdict:
        for run, epoch in family.epochs.items():
            row = self.run(run)
            if row is None or row.epoch != epoch or row.status not in ENDED or (row.ended_at or 0) >= family.before:
                return Refused("fenced")
            has_keys = any(one.run == run and one.state not in ("done", "free") for one in self.keys.values())
            if not self._is_free(row) or self.holds(run=run) or has_keys:
                return Refused("fenced")
        if self.is_needed(list(family.epochs)):
            return Refused("taken")
        for run in family.epochs:
            row = self.kept[run].row
            row.epoch, row.owner = row.epoch + 1, family.worker
            self.begun[run] = (family.at, row.generation)
        return Accepted()

    def _delete(self, part: DeletePart) -> Verdict:
        kept = self.kept.get(part.run)
        if kept is None:
            return Refused("missing")
        if kept.row.epoch != part.epoch or kept.row.status not in ENDED or self.holds(run=part.run):
            return Refused("fenced")
        many = (*kept.events.values(), *kept.checkpoints.values())
        large = (kept.entries, kept.payloads, kept.inbox, kept.archive)
        del self.kept[part.run]
        for one in self.kept.values():
            one.followers = {follower for follower in one.followers if follower[0] != part.run}
        self.relied = {one for one in self.relied if one[1] != part.run}
        self.notes.rows = {id: row for id, row in self.notes.rows.items() if row.run != part.run}
        self.begun.pop(part.run, None)
        return Deleted(sum(map(len, (*many, *large))) + 1, True)

    def _may_go_on(self, run: str) -> bool:
        return run in self.kept and self.kept[run].row.status not in ("completed", "cancelled")

    def _change_schedule(self, change: ChangeSchedule) -> Verdict:
        for new in change.starts:
            check_events(new)
        if not self.plans.change(change):
            return Refused("taken")
        for new in change.starts:
            self._start(StartRun(new))
        for post in change.posts:
            self._post(post)
        return Accepted()

    # -- workers ------------------------------------------------------------------------------------------------------
    def register_worker(self, worker: str, pid: int, host: str, lease_until: int) -> WorkerRow:
        taken = {row.place for row in self.workers() if row.id != worker}
        place = next(place for place in range(1, len(taken) + 2) if place not in taken)
        self._workers[worker] = WorkerRow(worker, place, pid, host, self.now(), lease_until)
        self.dead.discard(worker)
        return self._workers[worker]

    def renew(self, worker: str, lease_until: int) -> bool:
        if worker in self._workers:
            row = self._workers[worker]
            row.lease_until = lease_until + (lease_until == abs(row.lease_until))  # it changes in any case
        return worker in self._workers

    def bury_dead(self, at: int) -> list[str]:
        buried = [row.id for row in self.workers() if row.id in self.dead]
        for worker in buried:
            del self._workers[worker]
        return buried

    def leave(self, worker: str) -> None:
        for row in self._all():
            if row.owner == worker:
                row.owner, row.status = None, "queued" if row.status == "running" else row.status
        self._workers.pop(worker, None)

    def workers(self) -> list[WorkerRow]:
        return sorted(self._workers.values(), key=lambda row: row.place)

    # -- what operations ask, and readers as well ---------------------------------------------------------------------
    def _all(self) -> list[RunRow]:
        return [kept.row for kept in self.kept.values()]

    def run(self, id: str) -> RunRow | None:
        return self.kept[id].row if id in self.kept else None

    def waiters(self, key: str) -> list[tuple[str, int]]:
        return sorted((run, call) for one, run, call in self.waiting if one == key)

    def is_being_deleted(self, run: str) -> bool:
        return run in self.kept and run in self.begun and self.begun[run][1] == self.kept[run].row.generation

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Tell whether a run is a parent, a child, told of one of them, or a fork, and may go on without them."""
        for row in self._all():
            is_outside = row.parent in self.kept and row.parent not in runs
            if is_outside if row.id in runs else row.parent in runs:
                return True
        told = {one.run for run in self.kept for one in self.signals(run) if one.kind == "child" and one.name in runs}
        forks = {row.id for row in self._all() if row.tags.get(TAG, "").rpartition("@")[0] in told | {*runs}}
        return any(self._may_go_on(run) for run in (told | forks) - {*runs})

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        kept = [kept for kept in self.kept.values() if run in (None, kept.row.id)]
        found = [msgspec.structs.replace(one, workflow=of.row.workflow) for of in kept for one in of.holds.values()]
        return sorted((one for one in found if one.resolved_at is None or not open_only), key=by_creation)


def by_creation(hold: HoldRow) -> tuple[int, str]:
    return hold.created_at, hold.id
