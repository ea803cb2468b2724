"""A store at one moment: its workers, its queues, what runs, what is held, and which runs no worker serves."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from everstep.engine.process.worker_row import Trouble, is_served, living, read_about
from everstep.model.status import ENDED
from everstep.stores.protocol import RunFilter, RunRow, Store, WorkerRow
from everstep.stores.rows.queues import QueueCount, QueueRow, SlotRow, tokens
from everstep.stores.sqlite.liveness import LiveLocks
from everstep.view.fields import made_of
from everstep.view.words import between

SHOWN_MAX = 20


def place_of(store: Store) -> str:
    """Return where a store is: the absolute path of its file, or its URL."""
    path: str = getattr(store, "path", store.url)
    return path


# -- workers -----------------------------------------------------------------------------------------------------------
class WorkerView(msgspec.Struct, kw_only=True):
    """A worker, and what it says about itself."""

    id: str
    pid: int
    host: str
    started_at: int
    lease_until: int
    is_late: bool
    draining: bool
    runs: int
    running: int
    concurrency: int
    saturation: float | None
    recovers: bool
    queues: list[str] | None
    left: list[str]
    not_claiming: str
    troubles: dict[str, Trouble]
    workflows: dict[str, str]

    @property
    def failing(self) -> list[str]:
        """The background work that fails just now."""
        return [name for name, trouble in self.troubles.items() if trouble.since]

    def sentences(self, now: int) -> list[str]:
        """Say which background work has failed, and whether it still does."""
        lines = []
        for name, one in sorted(self.troubles.items()):
            how = f"for {between(one.since, now)}, and is tried again" if one.since else "and works again"
            lines.append(f"{name} failed {one.failures} times ({one.error}), {how}; its log says why")
        if self.not_claiming:
            lines.append(f"it claims no more runs of others until that succeeds: {self.not_claiming}")
        return lines


def worker_view(row: WorkerRow) -> WorkerView:
    """Return a worker as its row describes it."""
    about = read_about(row)
    facts: dict[str, Any] = {"id": row.id, "pid": row.pid, "host": row.host, "started_at": row.started_at}
    facts |= {"lease_until": abs(row.lease_until), "is_late": not row.has_lease}
    facts["saturation"] = round(about.running / about.concurrency, 3) if about.concurrency else None
    facts["workflows"] = {name: version for name, (version, *_) in about.workflows.items()}
    return made_of(WorkerView, about, **facts)


def living_workers(store: Store) -> list[WorkerRow]:
    """Return the workers whose process lives."""
    path = getattr(store, "path", None)
    is_alive: Callable[[WorkerRow], bool] | None = getattr(store, "is_alive", None)
    if is_alive is not None:
        return [worker for worker in store.workers() if is_alive(worker)]
    if path is None:
        return [worker for worker in store.workers() if worker.has_lease]
    locks = LiveLocks(f"{path}-live")
    try:
        return [worker for worker in store.workers() if locks.is_held(worker.place)]
    finally:
        locks.close()


def unserved_among(store: Store, rows: Sequence[RunRow]) -> set[str]:
    """Return ids of the runs that want a driver and have none, and that no living worker would claim."""
    abouts = living(store.workers())
    waiting = [row for row in rows if row.owner is None and row.status in ("queued", "running")]
    return {row.id for row in waiting if not is_served(row.workflow, row.queue, abouts)}


def unserved(store: Store, limit: int = 1000) -> list[RunRow]:
    """Return runs that no worker serves, of the newest that wait."""
    rows = store.runs(RunFilter(status=("queued", "running"), limit=limit))
    lonely = unserved_among(store, rows)
    return [row for row in rows if row.id in lonely]


# -- queues and limits -------------------------------------------------------------------------------------------------
class QueueView(msgspec.Struct, kw_only=True):
    """A queue of runs, or a named limit of steps. What only one of them has is None in the other."""

    name: str
    kind: str
    paused: bool
    concurrency: int | None
    per_worker: int | None
    per_key: int | None
    rate: int | None
    seconds: float | None
    tokens: int | None
    begun: int
    waiting: int | None = None
    delayed: int | None = None
    oldest_at: int | None = None
    next: list[str] | None = None
    """The runs that begin next."""
    slots: list[SlotRow] | None = None

    @property
    def state(self) -> str:
        """Whether anything more may begin, or why not: open, paused, full, or rate."""
        if self.paused:
            return "paused"
        if self.concurrency is not None and self.begun >= self.concurrency:
            return "full"
        return "rate" if self.tokens == 0 else "open"

    @property
    def limits(self) -> str:
        """What limits it, in words."""
        named = ((self.concurrency, "at once"), (self.per_worker, "per worker"), (self.per_key, "per key"))
        parts = [f"{number} {words}" for number, words in named if number is not None]
        if self.rate is not None:
            parts.append(f"{self.rate} in {self.seconds:g} s")
        return ", ".join(parts) or "no limit"


def queue_views(store: Store, only: str | None = None) -> list[QueueView]:
    """Return all queues and limits; with `only` those of a name, with what is next and who has the slots."""
    said = {(row.kind, row.name): row for row in store.queues()}
    counts = {count.name: count for count in store.queue_counts()}
    slots, now = store.slots(), store.now()
    for name in counts:
        said.setdefault(("queue", name), QueueRow(kind="queue", name=name))
    found: list[QueueView] = []
    for (kind, name), row in sorted(said.items(), reverse=True):
        if only not in (None, name):
            continue
        count, taken = counts.get(name, QueueCount(name)), [slot for slot in slots if slot.name == name]
        facts: dict[str, Any] = {"begun": count.begun if kind == "queue" else len(taken)}
        facts["seconds"] = row.seconds if row.rate is not None else None
        facts["tokens"] = tokens(row, now) if row.rate is not None else None
        one = made_of(QueueView, row, **facts)
        if kind == "queue":
            one.waiting, one.delayed, one.oldest_at = count.waiting, count.delayed, count.oldest_at
            one.next = _next(store, name) if only is not None else None
        elif only is not None:
            one.slots = taken
        found.append(one)
    return found


def _next(store: Store, queue: str) -> list[str]:
    """Return which runs begin next, as far as their workflows are known to the store."""
    rows = store.runs(RunFilter(status=("queued",), limit=1000))
    workflows = sorted({row.workflow for row in rows if row.queue == queue})
    return list(store.queued(queue, at=store.now(), workflows=workflows, limit=5))


# -- all of it ---------------------------------------------------------------------------------------------------------
class RunningView(msgspec.Struct):
    """A run that is driven just now."""

    id: str
    workflow: str
    step: str
    worker: str | None
    events: int
    updated_at: int


class OpenHold(msgspec.Struct):
    """A hold that waits for an answer."""

    id: str
    run: str
    reason: str
    step: str
    created_at: int


class Rates(msgspec.Struct):
    """What happened in a second: starts and ends of runs, and events of those that were running."""

    started: float
    ended: float
    events: float


class StoreView(msgspec.Struct, kw_only=True):
    """What is going on in a store."""

    store: str
    at: int
    runs: dict[str, int]
    """How many there are, by status."""
    workers: list[WorkerView]
    running: list[RunningView]
    queues: list[QueueView]
    holds: list[OpenHold]
    open_holds: int
    rates: Rates | None = None


def store_view(store: Store, before: StoreView | None = None) -> StoreView:
    """Return what is going on. With an earlier view, also the rates since."""
    rows, holds = store.runs(RunFilter(status=("running",), limit=SHOWN_MAX)), store.holds()
    view = StoreView(
        store=place_of(store),
        at=store.now(),
        runs=store.counts(),
        workers=[worker_view(row) for row in store.workers()],
        running=[
            made_of(RunningView, row, step=row.current_step, worker=row.owner, events=row.head_seq) for row in rows
        ],
        queues=queue_views(store),
        holds=[made_of(OpenHold, one) for one in holds[:SHOWN_MAX]],
        open_holds=len(holds),
    )
    view.rates = _rates(view, before) if before is not None else None
    return view


def _rates(view: StoreView, before: StoreView) -> Rates:
    seconds = max((view.at - before.at) / 1e6, 0.001)
    old = {one.id: one.events for one in before.running}
    events = sum(max(0, one.events - old[one.id]) for one in view.running if one.id in old)
    started = sum(view.runs.values()) - sum(before.runs.values())
    ended = sum(view.runs.get(status, 0) - before.runs.get(status, 0) for status in ENDED)
    return Rates(max(0, started) / seconds, max(0, ended) / seconds, events / seconds)
