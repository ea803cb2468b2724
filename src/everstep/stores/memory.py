"""The in-memory store. It is for tests: everything is gone when the process ends.

It is also the reference: short, obvious, and what every other store is compared with.
"""

import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy

from everstep.errors import Misuse
from everstep.model.events import EventRow
from everstep.model.status import ENDED
from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    Delivery,
    Existing,
    Failed,
    HoldRow,
    NewRun,
    NotClaimed,
    NotPosted,
    Operation,
    Post,
    Posted,
    Refused,
    Release,
    RestartRun,
    RowChange,
    RunFilter,
    RunRow,
    StartRun,
    Verdict,
    WorkerRow,
    check_events,
    child_value,
    pages,
)


class MemoryStore:
    """A store in plain dicts under one lock. For tests; nothing survives the process."""

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        self.url = "memory:"
        self.is_new = True
        self._clock = clock or (lambda: time.time_ns() // 1000)
        self._lock = threading.RLock()
        self._runs: dict[str, RunRow] = {}
        self._events: dict[tuple[str, int], list[EventRow]] = {}
        self._payloads: dict[tuple[str, str], bytes] = {}
        self._signals: dict[int, Delivery] = {}
        self._followers: set[tuple[str, str, int]] = set()
        self._holds: dict[str, HoldRow] = {}
        self._workers: dict[str, WorkerRow] = {}
        self._dead: set[str] = set()

    def now(self) -> int:
        """Return the store's clock."""
        return self._clock()

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

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
                    return self._start(operation.new)
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this operation only
            return Failed(error)

    def _start(self, new: NewRun) -> Verdict:
        check_events(new)
        if new.row.id in self._runs:
            return Existing(self._runs[new.row.id])
        self._create(new)
        return Accepted()

    def _create(self, new: NewRun) -> None:
        run = new.row
        self._runs[run.id] = run
        self._events[run.id, run.generation] = [new.event]
        self._keep_payloads(run.id, new.payloads)
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
        if row.epoch != operation.epoch or row.status not in ENDED or new.row.generation != row.generation + 1:
            return Refused("fenced")
        new.row.epoch = row.epoch  # Epochs never go down, whatever the new row says.
        self._settle_inbox(row.id)
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
            if isinstance(verdict := self._post(post), NotPosted) and verdict.status is not None:
                self._deliver(post)  # Nobody hears this verdict, so what came too late stays visible.
        if hold is not None:
            self._hold(hold)
        if ended:
            self._end(row, operation.row)
        return Accepted()

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
        self._settle_inbox(row.id)

    def _settle_inbox(self, run: str) -> None:
        for delivery in self._pending(run):
            delivery.state = "undelivered"

    def _tell(self, follower: str, run: str, call: int, value: bytes, at: int) -> None:
        if follower in self._runs:
            self._deliver(Post(run=follower, kind="child", name=run, id=str(call), value=value, at=at))

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

    def _post(self, post: Post) -> Verdict:
        # A call comes again in a later generation, so the id of a `child` delivery does not make it a duplicate.
        if post.id and post.kind != "child":
            for there in self._signals.values():
                if (there.run, there.kind, there.id) == (post.run, post.kind, post.id):
                    return Posted(there.number, duplicate=True)
        row = self._runs.get(post.run)
        if row is None or row.status in ENDED:
            return NotPosted(row.status if row else None)
        return Posted(self._deliver(post))

    def _deliver(self, post: Post) -> int:
        number = len(self._signals) + 1
        delivery = Delivery(number, post.run, post.kind, post.name, post.id, post.value, post.at)
        if self._runs[post.run].status in ENDED:
            delivery.state = "undelivered"
        self._signals[number] = delivery
        return number

    def _claim(self, operation: Claim) -> Verdict:
        row = self._runs.get(operation.run)
        if row is None or row.status not in operation.statuses:
            return NotClaimed(row)
        if row.owner != operation.worker and not self._is_free(row, operation.at):
            return NotClaimed(row)
        died = row.owner not in (None, operation.worker) and row.owner not in self._workers
        if died and row.status in ("running", "queued"):
            row.deaths += 1  # An append that moves the head sets it to 0.
        row.epoch += 1
        row.owner = operation.worker
        return Claimed(row)

    def _is_free(self, row: RunRow, at: int) -> bool:
        if row.owner is None or row.owner not in self._workers:
            return True
        return self._workers[row.owner].lease_until <= at

    def _release(self, operation: Release) -> Verdict:
        row = self._runs.get(operation.run)
        if row is None:
            return Refused("missing")
        if row.epoch != operation.epoch:
            return Refused("fenced")
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
            )

        with self._lock:
            rows = sorted(self._runs.values(), key=lambda row: (row.created_at, row.id), reverse=True)
            return deepcopy(pages([row for row in rows if is_meant(row)], filter))

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status that any run has."""
        with self._lock:
            statuses = [row.status for row in self._runs.values()]
            return {status: statuses.count(status) for status in sorted(set(statuses))}

    def events(self, run: str, generation: int) -> list[EventRow]:
        """Return a history."""
        with self._lock:
            return list(self._events.get((run, generation), ()))

    def payload(self, run: str, digest: str) -> bytes | None:
        """Return a payload that was stored beside the history."""
        with self._lock:
            return self._payloads.get((run, digest))

    def _pending(self, run: str) -> list[Delivery]:
        return [d for d in self._signals.values() if d.run == run and d.state == "pending"]

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

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]:
        """Return holds, oldest first."""
        with self._lock:
            holds = [hold for hold in deepcopy(list(self._holds.values())) if run in (None, hold.run)]
            for hold in holds:
                hold.workflow = self._runs[hold.run].workflow
            meant = [hold for hold in holds if hold.resolved_at is None or not open_only]
            return sorted(meant, key=lambda hold: (hold.created_at, hold.id))

    # -- finding work --------------------------------------------------------------------------------------------
    def due(self, *, at: int, workflows: Sequence[str], worker: str, everyone: bool, limit: int) -> list[str]:
        """Return ids of runs that want a driver now: by priority, then age.

        When there are more than `limit`, the longest overdue timers and the oldest deliveries are considered first.
        """
        with self._lock:
            known = [row for row in self._runs.values() if row.workflow in workflows]
            free = [row for row in known if everyone and row.owner != worker and self._is_free(row, at)]
            ready = [row for row in free if row.status in ("queued", "running")]
            waiting = [row for row in known if row.status == "waiting" and (row.owner == worker or row in free)]
            timers = [(row.wake_at, row.id) for row in waiting if row.wake_at is not None and row.wake_at <= at]
            arrived = [(box[0].number, row.id) for row in waiting if (box := self._pending(row.id))]
            chosen = {row.id for row in sorted(ready, key=urgency)[:limit]}
            chosen |= {id for _, id in sorted(timers)[:limit]} | {id for _, id in sorted(arrived)[:limit]}
            return [row.id for row in sorted((self._runs[id] for id in chosen), key=urgency)[:limit]]

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, by its arrival."""
        with self._lock:
            pending = (delivery.run for delivery in self._signals.values() if delivery.state == "pending")
            return [run for run in dict.fromkeys(pending) if self._runs[run].owner == worker]

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`, the oldest hold first."""
        with self._lock:
            holds = [hold for hold in self.holds() if hold.reason == "diverged" and hold.workflow in workflows]
            return list(dict.fromkeys(hold.run for hold in holds))[:limit]

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        with self._lock:
            at = self.now()
            waiting = [row for row in self._runs.values() if row.status == "waiting"]
            ours = [row for row in waiting if row.owner == worker or (everyone and self._is_free(row, at))]
            return min((row.wake_at for row in ours if row.wake_at is not None), default=None)

    def changed(self) -> bool:
        """Return False: nobody else can write here."""
        return False

    # -- workers -------------------------------------------------------------------------------------------------
    def register_worker(self, worker: str, pid: int, host: str, lease_until: int) -> WorkerRow:
        """Enter a worker. It lives until `leave` or `kill_worker`."""
        with self._lock:
            if worker in self._workers and worker not in self._dead:
                raise Misuse(f"There is a live worker {worker} already.")
            self._workers.pop(worker, None)
            self._dead.discard(worker)
            taken = {row.place for row in self._workers.values()}
            place = next(place for place in range(1, len(taken) + 2) if place not in taken)
            row = WorkerRow(worker, place, pid, host, self.now(), lease_until)
            self._workers[worker] = row
            return deepcopy(row)

    def kill_worker(self, worker: str) -> None:
        """For tests: let a worker's process be gone, so that `bury_dead` finds it."""
        self._dead.add(worker)

    def renew(self, worker: str, lease_until: int) -> bool:
        """Prolong a worker's lease; False if it had been buried."""
        with self._lock:
            if worker not in self._workers:
                return False
            self._workers[worker].lease_until = lease_until
            return True

    def workers(self) -> list[WorkerRow]:
        """Return all workers, by their places."""
        with self._lock:
            return deepcopy(sorted(self._workers.values(), key=lambda row: row.place))

    def bury_dead(self, at: int) -> list[str]:
        """Remove killed workers."""
        with self._lock:
            buried = [row.id for row in self.workers() if row.id in self._dead]
            for worker in buried:
                del self._workers[worker]
            self._dead.clear()
            return buried

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker and remove it."""
        with self._lock:
            for row in self._runs.values():
                if row.owner == worker:
                    row.owner = None
                    row.status = "queued" if row.status == "running" else row.status
            self._workers.pop(worker, None)


def urgency(row: RunRow) -> tuple[int, int, str]:
    """Return a sort key: the highest priority first, then the oldest."""
    return (-row.priority, row.created_at, row.id)
