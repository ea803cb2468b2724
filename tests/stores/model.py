"""What a store does, as a model: the differential tests compare every database with it.

It is plain dicts, without locks, transactions or files, and short enough to be read beside the rules that it is about
(`everstep.stores.protocol`, and the pure functions of `stores.rows`, which it uses as the stores do). It has what those
tests do and ask. It imports no runs, deletes a run in one part, and repairs only the newest generation of one;
`test_conformance_*` show of every store what it does beyond that.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from everstep.errors import Misuse
from everstep.model.events import EventRow
from everstep.model.forked import TAG
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.protocol import (
    LAST,
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
    RunFilter,
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
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
from everstep.stores.rows.queues import (
    DEFAULT_QUEUE,
    ChangeQueue,
    FreeSlot,
    NoSlot,
    QueueCount,
    QueueRoom,
    QueueRow,
    SlotRow,
    TakeSlot,
    changed,
    full_at_after_one,
    key_of,
    room_of,
)
from everstep.stores.rows.runs import SMALL
from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow
from everstep.stores.rows.transfer import ClaimFamily, Deleted, DeletePart, RunDump
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
        self.workers_: dict[str, WorkerRow] = {}
        self.dead: set[str] = set()
        self.keys: dict[str, keys.EffectRow] = {}
        self.waiting: set[tuple[str, str, int]] = set()
        """Keys, and the runs and calls that wait for them."""
        self.relied: set[tuple[str, str]] = set()
        """Keys, and the runs that count on them."""
        self.notes: dict[str, NotificationRow] = {}
        self.plans: dict[str, ScheduleRow] = {}
        self.settings: dict[tuple[str, str], QueueRow] = {}
        self.taken: dict[tuple[str, str, int], SlotRow] = {}
        self.begun: dict[str, tuple[int, int]] = {}
        """Runs to when their deletion began, and their generations then."""
        self.restored = self.last = 0
        self.saved = SavedModel(lambda worker: worker in self.workers_ and self.workers_[worker].has_lease)

    def close(self) -> None:
        """Nothing is open."""

    # -- runs ---------------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation]) -> list[Verdict]:
        return [deepcopy(self._verdict(deepcopy(operation))) for operation in operations]

    def _verdict(self, operation: Any) -> Verdict:
        try:
            do = DO.get(type(operation))
            return do(self, operation) if do is not None else self.saved.do(operation)
        except Exception as error:  # noqa: BLE001  # it concerns this operation only
            return Failed(error)

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
                self.notes.setdefault(note.id, note)
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
        if claim.queued and not self._takes_place_in_queue(claim, row):
            return NotClaimed(row)
        has_died = row.owner not in (None, claim.worker) and row.owner not in self.workers_
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
        return row.owner not in self.workers_ or not self.workers_[row.owner].has_lease

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
            for row in self.notes.values():
                if (row.hold, row.state) == (hold.id, "pending"):
                    row.state, row.claimed_by = "dropped", None

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
        if self.restored != mark.expected or self.workers_:
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
        self.notes = {id: row for id, row in self.notes.items() if row.run != part.run}
        self.begun.pop(part.run, None)
        return Deleted(sum(map(len, (*many, *large))) + 1, True)

    def _may_go_on(self, run: str) -> bool:
        return run in self.kept and self.kept[run].row.status not in ("completed", "cancelled")

    # -- notifications, schedules, queues -----------------------------------------------------------------------------
    def _take_notification(self, take: TakeNotification) -> Verdict:
        row = self.notes.get(take.id)
        if row is None or row.state != "pending" or row.attempts != take.attempt - 1:
            return Refused("taken")
        if row.next_at > take.at and not self._is_abandoned(row):
            return Refused("taken")
        row.attempts, row.claimed_by, row.next_at = take.attempt, take.worker, take.until
        return Accepted()

    def _settle_notification(self, settle: SettleNotification) -> Verdict:
        row = self.notes.get(settle.id)
        if row is None:
            return Refused("taken")
        if settle.state == "sent":
            was_sent = row.state == "sent"
            row.state, row.claimed_by, row.last_error = "sent", None, ""
            return Refused("taken") if was_sent else Accepted()
        if row.state != "pending" or row.attempts != settle.attempt:
            return Refused("taken")
        row.state, row.next_at, row.last_error, row.claimed_by = settle.state, settle.next_at, settle.error, None
        return Accepted()

    def _is_abandoned(self, row: NotificationRow) -> bool:
        return row.claimed_by is not None and row.claimed_by not in self.workers_

    def _change_schedule(self, change: ChangeSchedule) -> Verdict:
        for new in change.starts:
            check_events(new)
        there = self.plans.pop(change.name, None)
        if (there.revision if there is not None else 0) != change.expected or (there is None and change.row is None):
            self.plans |= {change.name: there} if there is not None else {}
            return Refused("taken")
        self.plans |= {change.name: change.row} if change.row is not None else {}
        for new in change.starts:
            self._start(StartRun(new))
        for post in change.posts:
            self._post(post)
        return Accepted()

    def _change_queue(self, change: ChangeQueue) -> Verdict:
        place = (change.kind, change.name)
        self.settings[place] = changed(self.settings.get(place), change)
        return Accepted()

    def _take_slot(self, take: TakeSlot) -> Verdict:
        settings, place = self.settings.get(("limit", take.name)), (take.name, take.run, take.call)
        living = [one for one in self.taken.values() if one.name == take.name and one.worker in self.workers_]
        if any(one.worker == take.worker and (one.run, one.call) == place[1:] for one in living):
            return Accepted()
        room, next_at = room_of(settings, take.at, len(living))
        if room < 1:
            return NoSlot(next_at)
        if settings is not None:
            settings.full_at = full_at_after_one(settings, take.at)
        self.taken[place] = SlotRow(*place, take.worker, take.at)
        return Accepted()

    def _free_slot(self, free: FreeSlot) -> Verdict:
        place = (free.name, free.run, free.call)
        if place in self.taken and self.taken[place].worker == free.worker:
            del self.taken[place]
        return Accepted()

    def _takes_place_in_queue(self, claim: Claim, row: RunRow) -> bool:
        """Tell whether a run may be claimed as far as its queue is concerned, and if so, take a token."""
        if row.queue == DEFAULT_QUEUE:
            return True
        if claim.queues is not None and row.queue not in claim.queues:
            return False
        settings = self.settings.get(("queue", row.queue))
        if row.status != "queued" or (row.wake_at is not None and row.wake_at > claim.at) or settings is None:
            return row.status != "queued" or row.wake_at is None or row.wake_at <= claim.at
        others, key = [one for one in self._with_slot(row.queue) if one.id != row.id], key_of(row.tags)
        own = [one for one in others if one.owner == claim.worker in self.workers_]
        of_key = sum(key_of(one.tags) == key for one in others) if key is not None else -1
        if room_of(settings, claim.at, len(others), len(own))[0] < 1:
            return False
        if settings.per_key is not None and of_key >= settings.per_key:
            return False
        settings.full_at = full_at_after_one(settings, claim.at)
        return True

    def _with_slot(self, queue: str) -> list[RunRow]:
        rows = [row for row in self._all() if row.queue == queue != DEFAULT_QUEUE]
        statuses = ("running", "waiting")
        return [
            row for row in rows if row.status in statuses or (row.status == "queued" and row.owner in self.workers_)
        ]

    def _in_line(self, queue: str) -> list[RunRow]:
        rows = [row for row in self._all() if row.queue == queue != DEFAULT_QUEUE]
        return [row for row in rows if row.status == "queued" and row.owner is None]

    # -- workers ------------------------------------------------------------------------------------------------------
    def register_worker(self, worker: str, pid: int, host: str, lease_until: int) -> WorkerRow:
        taken = {row.place for row in self.workers() if row.id != worker}
        place = next(place for place in range(1, len(taken) + 2) if place not in taken)
        self.workers_[worker] = WorkerRow(worker, place, pid, host, self.now(), lease_until)
        self.dead.discard(worker)
        return self.workers_[worker]

    def renew(self, worker: str, lease_until: int) -> bool:
        if worker in self.workers_:
            row = self.workers_[worker]
            row.lease_until = lease_until + (lease_until == abs(row.lease_until))  # it changes in any case
        return worker in self.workers_

    def bury_dead(self, at: int) -> list[str]:
        buried = [row.id for row in self.workers() if row.id in self.dead]
        self.workers_ = {id: row for id, row in self.workers_.items() if id not in self.dead}
        return buried

    def leave(self, worker: str) -> None:
        for row in self._all():
            if row.owner == worker:
                row.owner, row.status = None, "queued" if row.status == "running" else row.status
        self.workers_.pop(worker, None)

    def workers(self) -> list[WorkerRow]:
        return sorted(self.workers_.values(), key=lambda row: row.place)

    # -- reading ------------------------------------------------------------------------------------------------------
    def _all(self) -> list[RunRow]:
        return [kept.row for kept in self.kept.values()]

    def run(self, id: str) -> RunRow | None:
        return self.kept[id].row if id in self.kept else None

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        return [self.kept[id].row for id in ids if id in self.kept]

    def runs(self, filter: RunFilter) -> list[RunRow]:
        def is_meant(row: RunRow) -> bool:
            return (
                (not filter.status or row.status in filter.status)
                and filter.workflow in (None, row.workflow)
                and filter.parent in (None, row.parent)
                and filter.tags.items() <= row.tags.items()
                and (filter.before is None or by_age(row) < filter.before)
                and is_found(filter.text, row)
            )

        rows = [row for row in sorted(self._all(), key=by_age, reverse=True) if is_meant(row)]
        return rows[filter.offset : filter.offset + filter.limit]

    def children(self, run: str) -> list[RunRow]:
        return sorted((row for row in self._all() if row.parent == run), key=by_age)

    def counts(self) -> dict[str, int]:
        return dict(Counter(row.status for row in self._all()))

    def strays(self) -> list[tuple[str, int]]:
        return []

    def restores(self) -> int:
        return self.restored

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        found = self.kept[run].events.get(generation, []) if run in self.kept else []
        return [one for one in found if first <= one.seq <= last and (not only or one.seq in only)]

    def generations(self, run: str) -> list[int]:
        return sorted(self.kept[run].events) if run in self.kept else []

    def payload(self, run: str, digest: str) -> bytes | None:
        return self.kept[run].payloads.get(digest) if run in self.kept else None

    def checkpoint(self, run: str, generation: int, before: int) -> CheckpointRow | None:
        rows = self.kept[run].checkpoints.get(generation, {}) if run in self.kept else {}
        return max((row for row in rows.values() if row.seq < before), default=None, key=lambda row: row.seq)

    def archived(self, run: str) -> list[ArchiveRow]:
        return self.kept[run].archive if run in self.kept else []

    def inbox(self, run: str) -> list[Delivery]:
        return self.kept[run].pending() if run in self.kept else []

    def signals(self, run: str) -> list[Delivery]:
        return list(self.kept[run].inbox.values()) if run in self.kept else []

    def answer(self, run: str, number: int) -> AnswerRow | None:
        return self.kept[run].answers.get(number) if run in self.kept else None

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        entries = sorted(self.kept[run].entries.items()) if run in self.kept else []
        return [one for place, one in entries if place[:2] == (generation, name) and place[2] > after][:limit]

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        return (self.stream(run, generation, name) or [None])[-1]

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        places = sorted(self.kept[run].entries) if run in self.kept else []
        return list({name: position for number, name, position in places if number == generation}.items())

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        kept = [kept for kept in self.kept.values() if run in (None, kept.row.id)]
        found = [msgspec.structs.replace(one, workflow=of.row.workflow) for of in kept for one in of.holds.values()]
        return sorted((one for one in found if one.resolved_at is None or not open_only), key=by_creation)

    def dump(self, run: str) -> RunDump | None:
        if run not in self.kept:
            return None
        kept = self.kept[run]
        return RunDump(
            kept.row,
            [(generation, event) for generation, events in sorted(kept.events.items()) for event in events],
            sorted(kept.payloads.items()),
            [row for _, rows in sorted(kept.checkpoints.items()) for _, row in sorted(rows.items())],
            self.signals(run),
            sorted(kept.followers),
            sorted(kept.holds.values(), key=by_creation),
            [one for _, one in sorted(self.keys.items()) if one.run == run],
            sorted((key, call) for key, id, call in self.waiting if id == run),
            kept.archive,
            answers=sorted(kept.answers.values()),
            entries=[one for _, one in sorted(kept.entries.items())],
        )

    def ties(self, run: str) -> list[str]:
        followed = {(kept.row.id, follower) for kept in self.kept.values() for follower, _ in kept.followers}
        waiting = {(self.keys[key].run, waiter) for key, waiter, _ in self.waiting if key in self.keys}
        return sorted({other for tie in followed | waiting if run in tie for other in tie} - {run})

    def deletions(self) -> list[tuple[str, int]]:
        return [
            (run, generation) for run, (_, generation) in sorted(self.begun.items(), key=lambda one: (one[1][0], one))
        ]

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

    def asking(self) -> list[str]:
        rows = [kept for kept in self.kept.values() if kept.row.status not in ENDED]
        return sorted(kept.row.id for kept in rows if any(one.kind == "approval_asked" for one in kept.history()))

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        holds = [one for one in self.holds() if one.reason == "diverged" and one.workflow in workflows]
        return list(dict.fromkeys(one.run for one in holds))[:limit]

    def effect(self, key: str) -> keys.EffectRow | None:
        return self.keys.get(key)

    def effects(self, filter: keys.EffectFilter) -> list[keys.EffectRow]:
        meant = [
            row
            for row in self.keys.values()
            if row.key.startswith(filter.prefix)
            and filter.run in (None, row.run)
            and filter.step in (None, row.step)
            and filter.state in (None, row.state)
        ]
        meant.sort(key=lambda row: (-row.changed_at, row.key))
        return meant[filter.offset : filter.offset + filter.limit]

    def old_keys(self, before: int) -> int:
        return len(self._old_keys(before))

    def waiters(self, key: str) -> list[tuple[str, int]]:
        return sorted((run, call) for one, run, call in self.waiting if one == key)

    def notifications(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        rows = [row for row in self.notes.values() if run in (None, row.run)]
        if undelivered_only:
            is_open = {one.id for one in self.holds()}
            rows = [row for row in rows if row.state in ("pending", "given up") and row.hold in is_open]
        return sorted(rows, key=by_creation)

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        pending = [row for row in self.notes.values() if (row.state, row.target) == ("pending", target)]
        meant = [row for row in pending if row.next_at <= at or self._is_abandoned(row)]
        return sorted(meant, key=lambda row: (row.next_at > at, row.next_at, row.id))[:limit]

    def next_notification(self, *, target: str) -> int | None:
        pending = [row for row in self.notes.values() if (row.state, row.target) == ("pending", target)]
        return min((row.next_at for row in pending), default=None)

    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        return [row for one, row in sorted(self.plans.items()) if name in (None, one)]

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        known = [row for row in self.schedules() if row.workflow in workflows]
        due = sorted((row for row in known if earlier(row.next_at, at)), key=lambda row: (row.next_at or 0, row.name))
        waiting = [row for row in known if row.waits and not earlier(row.next_at, at)]
        return due[:limit] + waiting[:limit]

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        return earliest(row.next_at for row in self.plans.values() if row.workflow in workflows)

    def queues(self) -> list[QueueRow]:
        return [row for _, row in sorted(self.settings.items())]

    def queue_counts(self) -> list[QueueCount]:
        found: list[QueueCount] = []
        for name in sorted({row.queue for row in self._all()}):
            rows, begun = self._in_line(name), self._with_slot(name)
            ready = [row.created_at for row in rows if row.wake_at is None]
            if rows or begun:
                found.append(QueueCount(name, len(ready), len(rows) - len(ready), len(begun), min(ready, default=None)))
        return found

    def queue_room(self, *, at: int, worker: str, queues: Sequence[str] | None = None) -> list[QueueRoom]:
        found: list[QueueRoom] = []
        for name in sorted({row.queue for row in self._all()}):
            rows, begun = self._in_line(name), self._with_slot(name)
            due_at = earliest(row.wake_at for row in rows)
            if not rows or (queues is not None and name not in queues):
                continue
            if all(row.wake_at is not None for row in rows) and not earlier(due_at, at):
                found.append(QueueRoom(name, 0, due_at))
                continue
            own = [row for row in begun if row.owner == worker in self.workers_]
            room, next_at = room_of(self.settings.get(("queue", name)), at, len(begun), len(own))
            is_later = next_at is None and due_at is not None and due_at > at
            found.append(QueueRoom(name, room, due_at if is_later else next_at))
        return found

    def queued(self, queue: str, *, at: int, workflows: Sequence[str], limit: int) -> list[str]:
        settings = self.settings.get(("queue", queue))
        per_key = settings.per_key if settings is not None else None
        used = Counter(key_of(row.tags) for row in self._with_slot(queue))

        def has_room(row: RunRow, spare: int) -> bool:
            key = key_of(row.tags)
            return per_key is None or key is None or used[key] + spare <= per_key

        known = [row for row in self._in_line(queue) if row.workflow in workflows and has_room(row, 1)]
        ready = sorted((row for row in known if row.wake_at is None), key=by_urgency)[:limit]
        late = sorted((row for row in known if earlier(row.wake_at, at)), key=by_wake)[:limit]
        chosen: list[str] = []
        for row in sorted([*ready, *late], key=by_urgency):
            used[key_of(row.tags)] += 1
            chosen += [row.id] if has_room(row, 0) else []
        return chosen[:limit]

    def slots(self) -> list[SlotRow]:
        living = [one for one in self.taken.values() if one.worker in self.workers_]
        return sorted(living, key=lambda one: (one.name, one.since, one.run, one.call))

    # -- finding work -------------------------------------------------------------------------------------------------
    def due(
        self,
        *,
        at: int,
        workflows: Sequence[str],
        worker: str,
        everyone: bool,
        limit: int,
        queues: Sequence[str] | None = None,
    ) -> list[str]:
        known = [row for row in self._all() if row.workflow in workflows]
        known = [row for row in known if queues is None or row.queue in queues or row.owner == worker]
        free = [row for row in known if everyone and row.owner != worker and self._is_free(row)]
        own = [row for row in known if row.owner == worker]
        ready = [row for row in free if row.status in ("queued", "running") and row not in self._in_line(row.queue)]
        waiting = [row for row in (*own, *free) if row.status == "waiting"]
        timers = [row for row in waiting if earlier(row.wake_at, at)]
        arrived = [row for row in waiting if self.inbox(row.id)]
        chosen = sorted(ready, key=by_urgency)[:limit] + sorted(timers, key=by_wake)[:limit]
        chosen += sorted(arrived, key=lambda row: self.inbox(row.id)[0].number)[:limit]
        return list(dict.fromkeys(row.id for row in sorted(chosen, key=by_urgency)))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        waiting = [row for row in self._all() if row.status == "waiting"]
        return earliest(row.wake_at for row in waiting if row.owner == worker or (everyone and self._is_free(row)))

    def pending(self, worker: str) -> list[str]:
        owned = [row.id for row in self._all() if row.owner == worker and self.inbox(row.id)]
        return sorted(owned, key=lambda run: self.inbox(run)[0].number)


DO: dict[type, Callable[[Model, Any], Verdict]] = {
    StartRun: Model._start,
    RestartRun: Model._restart,
    Append: Model._append,
    Post: Model._post,
    Claim: Model._claim,
    Release: Model._release,
    RepairRun: Model._repair,
    MarkRestored: Model._mark_restored,
    ClaimFamily: Model._claim_family,
    DeletePart: Model._delete,
    keys.SettleKey: Model._settle_key,
    keys.ForgetKeys: Model._forget_keys,
    TakeNotification: Model._take_notification,
    SettleNotification: Model._settle_notification,
    ChangeSchedule: Model._change_schedule,
    ChangeQueue: Model._change_queue,
    TakeSlot: Model._take_slot,
    FreeSlot: Model._free_slot,
}


def by_age(row: RunRow) -> tuple[int, str]:
    return row.created_at, row.id


def by_creation(one: HoldRow | NotificationRow) -> tuple[int, str]:
    return one.created_at, one.id


def by_urgency(row: RunRow) -> tuple[int, int, str]:
    return -row.priority, row.created_at, row.id


def by_wake(row: RunRow) -> tuple[int, str]:
    return row.wake_at or 0, row.id


def is_found(text: str, row: RunRow) -> bool:
    """Tell whether a run has a text where a search looks for it."""
    tags = [f"{name}={value}" for name, value in row.tags.items()]
    return any(text.translate(SMALL) in one.translate(SMALL) for one in (row.id, row.workflow, row.preview, *tags))


def earlier(time: int | None, at: int) -> bool:
    return time is not None and time <= at


def earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)
