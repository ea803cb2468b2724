"""The in-memory store. It is for tests: everything is gone when the process ends.

It is also the reference: short, obvious, and what every other store is compared with.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final

from everstep.errors import Misuse
from everstep.model.events import EventRow
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.memory.keys import MemoryKeys
from everstep.stores.memory.repairs import MemoryRepairs
from everstep.stores.memory.transfer import MemoryMoving
from everstep.stores.memory.work import MemoryWork
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
    Needs,
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
    RowChange,
    RunFilter,
    RunRow,
    StartRun,
    Verdict,
    check_events,
    child_value,
)
from everstep.stores.rows.answers_and_streams import Beside
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import (
    EffectFilter,
    EffectRow,
    ForgetKeys,
    Forgotten,
    SettleKey,
    may_settle,
    newest_first,
)
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.runs import is_found, pages
from everstep.stores.rows.schedules import ChangeSchedule
from everstep.stores.rows.transfer import Arrival, ClaimFamily, DeletePart, ImportRuns, RunDump

_numbers: Final = itertools.count(1)


class MemoryStore(MemoryWork):
    """A store in plain dicts under one lock. For tests; nothing survives the process."""

    look_seconds = 0.0

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock or (lambda: time.time_ns() // 1000))
        self.entropy = os.urandom(16).hex()
        self._life = self.entropy[:16]
        self._arrivals: dict[str, Arrival] = {}
        self._keys = MemoryKeys(self._tell_of_key)
        self._repairs = MemoryRepairs(self)
        self._moving = MemoryMoving(self)
        self.last_number = 0
        self._beside: tuple[str, Any] | None = None
        """A SQLite database in memory for what atomic steps write: its name, and a connection that keeps it alive."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def connect(self) -> Any:
        """Return a new connection to a database in memory that belongs to this store."""
        import apsw

        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
        with self._lock:
            if self._beside is None:
                name = f"file:/everstep-{next(_numbers)}?vfs=memdb"
                self._beside = name, apsw.Connection(name, flags=flags)
        return apsw.Connection(self._beside[0], flags=flags)

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Refuse: what is here is in no database, so it cannot be in one transaction with anything."""
        raise Misuse("The in-memory store is in no database: for transaction= open a SQLite file.")

    # -- writing ------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in order, each accepted or refused by itself."""
        with self._lock:
            # Copied one by one: a row in a verdict is as it was then, whatever later operations do to it.
            return [deepcopy(self._verdict(deepcopy(operation))) for operation in operations]

    def _verdict(self, operation: Operation) -> Verdict:
        try:
            match operation:
                case StartRun():
                    return self._start(operation.new, operation.needs)
                case RestartRun():
                    return self._restart(operation)
                case Append():
                    return self._append(operation)
                case Post():
                    return self._post(operation)
                case Claim():
                    return self._claim(operation)
                case Release():
                    return self._release(operation)
                case TakeNotification():
                    return Accepted() if self._notifications.take(operation, self._workers) else Refused("taken")
                case SettleNotification():
                    return Accepted() if self._notifications.settle(operation) else Refused("taken")
                case SettleKey():
                    return self._settle_key(operation)
                case ForgetKeys():
                    return Forgotten(self._keys.forget(operation, self._moving.may_go_on))
                case RepairRun():
                    return self._repairs.repair(operation)
                case MarkRestored():
                    return self._repairs.mark_restored(operation)
                case ImportRuns():
                    return self._moving.accept(operation)
                case ClaimFamily():
                    return self._moving.claim(operation)
                case DeletePart():
                    return self._moving.delete(operation)
                case ChangeSchedule():
                    return self._change_schedule(operation)
                case ChangeQueue() | TakeSlot() | FreeSlot():
                    return self._queues.do(operation)
                case _:
                    return self._saved.do(operation)
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this operation only
            return Failed(error)

    def _start(self, new: NewRun, needs: Needs | None = None) -> Verdict:
        check_events(new)
        if new.row.id in self._runs:
            return Existing(self._runs[new.row.id])
        if needs is not None and any(one not in self._runs or self._moving.is_begun(one) for one in needs.runs):
            return Refused("missing")
        if needs is not None and any(key not in self._keys.rows for key in needs.keys):
            return Refused("key")
        self._create(new)
        self._keys.relied |= {(key, new.row.id) for key in needs.keys} if needs is not None else set()
        return Accepted()

    def _change_schedule(self, change: ChangeSchedule) -> Verdict:
        for new in change.starts:
            check_events(new)
        if not self._replace_schedule(change):
            return Refused("taken")
        for new in change.starts:
            self._start(new)
        for post in change.posts:
            self._post(post)
        return Accepted()

    def _create(self, new: NewRun) -> None:
        run = new.row
        self._runs[run.id] = run
        self._events[run.id, run.generation] = [new.event, *new.more]
        self._keep_payloads(run.id, new.payloads)
        self._keep_beside(Beside(entries=[*new.entries]))
        if new.follower is not None:
            self._followers.add((run.id, new.follower, new.follower_call))

    def _keep_payloads(self, run: str, payloads: Sequence[tuple[str, bytes]]) -> None:
        for digest, value in payloads:
            self._payloads.setdefault((run, digest), value)

    def _restart(self, operation: RestartRun) -> Verdict:
        check_events(operation.new)
        new, row = operation.new, self._runs.get(operation.new.row.id)
        if row is None:
            return Refused("missing")
        may_begin_again = row.status in ENDED or (row.status == "held" and operation.hold is not None)
        if row.epoch != operation.epoch or not may_begin_again or new.row.generation != row.generation + 1:
            return Refused("fenced")
        if operation.hold is not None:
            self._hold(operation.hold)
        new.row.epoch = row.epoch  # Epochs never go down, whatever the new row says.
        self._keys.end_run(row.id, row.generation, new.row.updated_at)
        self._leave_inbox(row.id)
        # What the old generation followed must not be taken for news about the new one's calls.
        self._followers = {entry for entry in self._followers if entry[1] != row.id}
        self._create(new)
        return Accepted()

    def _append(self, operation: Append) -> Verdict:
        check_events(operation)
        row = self._runs.get(operation.run)
        refusal = self._refusal(operation, row)
        if row is None or refusal is not None:
            return refusal or Refused("missing")
        hold = operation.hold
        if hold is not None and hold.resolved_at is None and hold.id in self._holds:
            raise Misuse(f"There is a hold {hold.id} already.")
        for new in operation.starts:
            check_events(new)
        if operation.renewal is not None:
            check_events(operation.renewal)
        ended = operation.row.status in ENDED
        self._move(row, operation, ended)
        self._events[row.id, row.generation].extend(operation.events)
        self._keep_payloads(row.id, operation.payloads)
        for number in operation.consumed:
            if number in self._signals and self._signals[number].run == row.id:
                self._signals[number].state = "consumed"
        for new in operation.starts:
            self._start_child(new, operation.row.at)
        for post in operation.posts:
            verdict = self._post(post)
            if isinstance(verdict, NotPosted) and verdict.status is not None and self._same(post) is None:
                self._deliver(post)  # Nobody hears this verdict, so what came too late stays visible.
        if hold is not None:
            self._hold(hold)
            self._notifications.add(operation.notifications)
        if operation.keys is not None:
            self._keys.apply(operation.keys, row.id, row.generation, operation.row.at)
        if operation.checkpoints:
            self._keep_checkpoints(operation)
        if operation.beside is not None:
            self._keep_beside(operation.beside)
        self._archive_rows(operation.archive)
        if operation.redeliver:
            self._redeliver(row.id)
        if operation.renewal is not None:
            self._renew(row, operation, operation.renewal)
        if ended:
            self._end(row, operation.row)
        return Accepted()

    def _renew(self, row: RunRow, operation: Append, new: NewRun) -> None:
        self._keys.end_run(row.id, row.generation, operation.row.at)
        self._followers = {entry for entry in self._followers if entry[1] != row.id}
        new.row.epoch = row.epoch
        self._create(new)

    def _keep_checkpoints(self, operation: Append) -> None:
        kept = self._checkpoints.setdefault((operation.run, operation.generation), {})
        for new in operation.checkpoints:
            kept.setdefault(new.seq, new)
        for seq in sorted(kept)[: -operation.checkpoints_kept]:
            del kept[seq]

    def _archive_rows(self, rows: Sequence[ArchiveRow]) -> None:
        for row in rows:
            self._repairs.rows.append(row)
            if row.what == "checkpoint":
                self._checkpoints.get((row.run, row.generation), {}).pop(row.seq, None)

    def _refusal(self, operation: Append, row: RunRow | None) -> Refused | None:
        if row is None:
            return Refused("missing")
        if (row.generation, row.epoch) != (operation.generation, operation.epoch):
            return Refused("fenced")
        if (row.head_seq, row.head_digest) != (operation.expected_seq, operation.expected_digest):
            return Refused("head")
        cancels = [d.number for d in self._pending(row.id) if d.kind == "cancel"]
        if operation.row.status in ENDED and not set(cancels) <= set(operation.consumed):
            return Refused("inbox")
        if operation.keys is not None and (calls := self._keys.lost(operation.keys, row.id, row.generation)):
            return Refused("key", calls)
        if operation.keys is not None and any(key not in self._keys.rows for key in operation.keys.relies):
            return Refused("key")
        return None

    def _move(self, row: RunRow, operation: Append, ended: bool) -> None:
        change = operation.row
        if operation.events:
            row.head_seq, row.head_digest = operation.events[-1].seq, operation.events[-1].digest
            row.deaths = 0 if change.progress else row.deaths
        row.status, row.updated_at, row.wake_at = change.status, change.at, change.wake_at
        row.current_step, row.outcome = change.current_step, change.outcome
        row.published = row.published if change.published is None else change.published
        row.budget = row.budget if change.budget is None else change.budget
        row.ended_at = change.at if ended else None
        row.owner = None if ended or operation.release else row.owner

    def _start_child(self, new: NewRun, at: int) -> None:
        there = self._runs.get(new.row.id)
        if there is None:
            self._create(new)
        elif new.follower is None:
            return
        elif (there.workflow, there.arguments) != (new.row.workflow, new.row.arguments):
            self._tell(new.follower, there.id, new.follower_call, child_value("refused", None), at)
        elif there.status in ENDED:
            self._tell(
                new.follower, there.id, new.follower_call, child_value(there.status, there.outcome, there.budget), at
            )
        else:
            self._followers.add((there.id, new.follower, new.follower_call))

    def _end(self, row: RunRow, change: RowChange) -> None:
        for entry in sorted(entry for entry in self._followers if entry[0] == row.id):
            self._followers.remove(entry)
            self._tell(entry[1], row.id, entry[2], child_value(row.status, row.outcome, change.budget), change.at)
        self._keys.end_run(row.id, row.generation, change.at)
        self._settle_inbox(row.id)

    def _settle_inbox(self, run: str) -> None:
        for delivery in self._pending(run):
            delivery.state = "undelivered"

    def _redeliver(self, run: str) -> None:
        for delivery in self._signals.values():
            if (delivery.run, delivery.state) == (run, "undelivered") and delivery.kind in ("signal", "request"):
                delivery.state = "pending"

    def _leave_inbox(self, run: str) -> None:
        for delivery in self._signals.values():
            if delivery.run == run:
                delivery.state = "consumed" if delivery.state == "consumed" else "left"
                delivery.id = "" if delivery.kind in ("signal", "cancel") else delivery.id

    def _tell(self, follower: str, run: str, call: int, value: bytes, at: int) -> None:
        if follower in self._runs:
            self._deliver(Post(run=follower, kind="child", name=run, id=str(call), value=value, at=at))

    def _tell_of_key(self, run: str, key: str, call: int, at: int) -> None:
        """A run that has ended no longer cares."""
        row = self._runs.get(run)
        if row is not None and row.status not in ENDED:
            self._deliver(Post(run=run, kind="key", name=key, id=str(call), at=at))

    def _settle_key(self, settle: SettleKey) -> Verdict:
        there = self._keys.rows.get(settle.key)
        owner = self._runs.get(there.run) if there is not None else None
        is_unfinished = owner is not None and owner.status not in ENDED
        is_active = is_unfinished and owner is not None and there is not None and owner.generation == there.generation
        if why := may_settle(there, settle, owner_is_active=is_active):
            return Refused(why)
        self._keys.settle(settle)
        return Accepted()

    def _hold(self, hold: HoldRow) -> None:
        if hold.resolved_at is None:
            self._holds[hold.id] = hold
            return
        there = self._holds.get(hold.id)
        if there is not None and there.run == hold.run and there.resolved_at is None:
            there.resolved_at, there.resolution, there.by, there.note = (
                hold.resolved_at,
                hold.resolution,
                hold.by,
                hold.note,
            )
            self._notifications.drop(hold.id)

    def _post(self, post: Post) -> Verdict:
        there = self._same(post)
        if there is not None and there.state != "undelivered":
            return Posted(there.number, duplicate=True)
        row = self._runs.get(post.run)
        if row is None or row.status in ENDED:
            return NotPosted(row.status if row else None)
        if there is not None:
            there.state, there.name, there.value, there.at = "pending", post.name, post.value, post.at
            return Posted(there.number)
        return Posted(self._deliver(post))

    def _same(self, post: Post) -> Delivery | None:
        """Return the delivery with this kind and id, if there is one: a call comes again, so its id does not count."""
        if not post.id or post.kind in ("child", "key"):
            return None
        wanted = (post.run, post.kind, post.id)
        return next((one for one in self._signals.values() if (one.run, one.kind, one.id) == wanted), None)

    def _deliver(self, post: Post) -> int:
        number = self.last_number = self.last_number + 1
        delivery = Delivery(number, post.run, post.kind, post.name, post.id, post.value, post.at)
        if self._runs[post.run].status in ENDED:
            delivery.state = "undelivered"
        self._signals[number] = delivery
        return number

    def _claim(self, operation: Claim) -> Verdict:
        row = self._runs.get(operation.run)
        if row is None or row.status not in operation.statuses:
            return NotClaimed(row)
        may_have_ended = not UNFINISHED.issuperset(operation.statuses)
        if may_have_ended and self._moving.is_begun(row.id) != operation.deleting:
            return NotClaimed(row)
        if row.owner != operation.worker and not self._is_free(row):
            return NotClaimed(row)
        if operation.queued and not self._queues.may_claim(operation, row):
            return NotClaimed(row)
        died = row.owner not in (None, operation.worker) and row.owner not in self._workers
        if died and row.status in ("running", "queued"):
            row.deaths += 1  # An append that moves the head sets it to 0.
        row.epoch += 1
        row.owner = operation.worker
        return Claimed(row)

    def _release(self, operation: Release) -> Verdict:
        row = self._runs.get(operation.run)
        if row is None:
            return Refused("missing")
        if row.epoch != operation.epoch:
            return Refused("fenced")
        row.deaths += operation.died and row.owner is not None
        row.owner, row.status = None, row.status if row.status in ENDED else operation.status
        return Accepted()

    # -- reading ------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None:
        """Return a run's row."""
        with self._lock:
            return deepcopy(self._runs.get(id))

    def runs(self, filter: RunFilter) -> list[RunRow]:
        """Return the runs that a filter asks for, newest first."""

        def is_meant(row: RunRow) -> bool:
            return (
                (not filter.status or row.status in filter.status)
                and filter.workflow in (None, row.workflow)
                and filter.parent in (None, row.parent)
                and filter.tags.items() <= row.tags.items()
                and (filter.before is None or (row.created_at, row.id) < filter.before)
                and (not filter.text or is_found(filter.text, row))
            )

        with self._lock:
            rows = sorted(self._runs.values(), key=lambda row: (row.created_at, row.id), reverse=True)
            return deepcopy(pages([row for row in rows if is_meant(row)], filter))

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status that any run has."""
        with self._lock:
            statuses = [row.status for row in self._runs.values()]
            return {status: statuses.count(status) for status in sorted(set(statuses))}

    def runs_without_status(self, limit: int) -> list[str]:
        """Return nothing: here no row is ever damaged."""
        return []

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history, or a part of it."""
        with self._lock:
            part = [event for event in self._events.get((run, generation), ()) if first <= event.seq <= last]
            return [event for event in part if event.seq in only[:3]] if only else part

    def generations(self, run: str) -> list[int]:
        """Return the generations of which there are events."""
        with self._lock:
            return sorted(generation for id, generation in self._events if id == run)

    def strays(self) -> list[tuple[str, int]]:
        """Return nothing: here no history is ever without its row."""
        return []

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint whose event stands before this number."""
        with self._lock:
            kept = self._checkpoints.get((run, generation), {})
            newest = max((seq for seq in kept if seq < before), default=None)
            return None if newest is None else kept[newest]

    def payload(self, run: str, digest: str) -> bytes | None:
        """Return a payload that was stored beside the history."""
        with self._lock:
            return self._payloads.get((run, digest))

    def archived(self, run: str) -> list[ArchiveRow]:
        """Return what was archived of a run, the oldest first."""
        with self._lock:
            return deepcopy([row for row in self._repairs.rows if row.run == run])

    def dump(self, run: str) -> RunDump | None:
        """Return everything that there is of a run."""
        with self._lock:
            return self._moving.dump(run)

    def ties(self, run: str) -> list[str]:
        """Return the runs that an unfinished run is tied to: by following, or by waiting for a key."""
        with self._lock:
            return self._moving.ties(run)

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended, with the last generation that it is about."""
        with self._lock:
            begun = sorted((at, run, generation) for run, (at, generation) in self._moving.begun.items())
            return [(run, generation) for _, run, generation in begun]

    def is_being_deleted(self, run: str) -> bool:
        """Tell whether the deletion of a run has begun."""
        with self._lock:
            return self._moving.is_begun(run)

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Tell whether a run that is not among these may still need one of them."""
        with self._lock:
            return self._moving.is_needed(set(runs))

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        return self._repairs.restores

    def life(self) -> str:
        """Return the store's present life: another one after each restored backup, and no other store's."""
        return f"{self._life}.{self._repairs.restores}"

    def begin_life(self) -> None:
        """Tell histories that are written from here on from those before."""
        self._life = os.urandom(8).hex()

    def arrival(self, run: str) -> Arrival | None:
        """Return whether, and with which events, a run was imported."""
        return self._arrivals.get(run)

    def inbox(self, run: str) -> list[Delivery]:
        """Return the pending deliveries, in the order of their numbers."""
        with self._lock:
            return deepcopy(self._pending(run))

    def signals(self, run: str) -> list[Delivery]:
        """Return all deliveries of the run, in order, with their states."""
        with self._lock:
            return deepcopy([d for d in self._signals.values() if d.run == run])

    def children(self, run: str) -> list[RunRow]:
        """Return the runs whose parent is this one, oldest first."""
        with self._lock:
            rows = [row for row in self._runs.values() if row.parent == run]
            return deepcopy(sorted(rows, key=lambda row: (row.created_at, row.id)))

    def effect(self, key: str) -> EffectRow | None:
        """Return who has a key, and its outcome."""
        with self._lock:
            return deepcopy(self._keys.rows.get(key))

    def effects(self, filter: EffectFilter) -> list[EffectRow]:
        """Return keys, those that changed last first."""
        with self._lock:
            return deepcopy(newest_first(list(self._keys.rows.values()), filter))

    def old_keys(self, before: int) -> int:
        """Return how many keys are done or free and have not changed since."""
        with self._lock:
            return len(self._keys.old(before, self._moving.may_go_on))

    def waiters(self, key: str) -> list[tuple[str, int]]:
        """Return who waits for a key: runs and their calls."""
        with self._lock:
            return self._keys.waiting_for(key)
