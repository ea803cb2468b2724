"""The seam between the engine and a database.

A store is synchronous and knows nothing of workflows. The engine calls `commit` with everything that is ready, of all
runs, and the store does it in one transaction. Within it each operation is accepted or refused by itself: a fenced run
never stops another one. Everything a store is told carries the run's epoch and expected head, so a worker that lost
its lease changes nothing, whatever it still believes.

All times are microseconds since 1970, by the store's clock (`now`).

The inbox of a run is its rows in `signals`: messages (kind `signal`), `cancel`, `hold`, and the ends of other runs that
it follows (kind `child`). They are numbered per store in the order of arrival.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from everstep.errors import Misuse
from everstep.model.events import EventRow
from everstep.model.status import Status

# `gc=False` below: these are plain data in which no circle can arise, and there are very many of them. The garbage
# collector need not look at them.

DeliveryKind = Literal["signal", "cancel", "hold", "child"]


class RunRow(msgspec.Struct, kw_only=True, gc=False):
    """A run as the table `runs` has it."""

    id: str
    workflow: str
    version: str = ""
    semantics: int = 1
    status: Status = "queued"
    generation: int = 1
    head_seq: int = 0
    head_digest: bytes = b""
    epoch: int = 0
    owner: str | None = None
    wake_at: int | None = None
    queue: str = "default"
    priority: int = 0
    tags: dict[str, str] = {}
    parent: str | None = None
    arguments: str = ""
    """The digest of the run's arguments: what `attach` compares."""
    preview: str = ""
    outcome: bytes | None = None
    """The payload of the result, or of the error."""
    current_step: str = ""
    published: bytes | None = None
    """JSON: name to payload, of the values the run published."""
    budget: bytes | None = None
    """JSON: how the run's budget stands, if it has one. For people; decisions are made by the history."""
    deaths: int = 0
    """How often in a row the run's owner died while it drove this run and the head did not move."""
    created_at: int = 0
    updated_at: int = 0
    ended_at: int | None = None


class RowChange(msgspec.Struct, gc=False):
    """What an `Append` writes into the run's row beside the new head."""

    status: Status
    at: int
    wake_at: int | None = None
    current_step: str = ""
    published: bytes | None = None
    """New published values, or None to leave them."""
    outcome: bytes | None = None
    """Set with an end."""
    progress: bool = True
    """False when the events only begin again what a crash had cut off: such an append does not set `deaths` to 0."""
    budget: bytes | None = None
    """How the run's budget stands now, or None to leave it. With an end, what followers are told."""


class NewRun(msgspec.Struct, gc=False):
    """A run to be created, with its first event. `row.head_seq` and `row.head_digest` are that event's."""

    row: RunRow
    event: EventRow
    payloads: Sequence[tuple[str, bytes]] = ()
    follower: str | None = None
    """A run that is told of this one's end (its parent), in its inbox, under `follower_call`."""
    follower_call: int = 0


class Post(msgspec.Struct, gc=False):
    """Something for a run's inbox. With an `id`, a second one of the same kind and id is not delivered again.

    The id of a `child` delivery is a call, which comes again in a later generation, so it does not count here.
    """

    run: str
    kind: DeliveryKind
    name: str = ""
    id: str = ""
    value: bytes = b""
    at: int = 0


class Delivery(msgspec.Struct):
    """An inbox row."""

    number: int
    run: str
    kind: DeliveryKind
    name: str
    id: str
    value: bytes
    at: int
    state: Literal["pending", "consumed", "undelivered"] = "pending"


class HoldRow(msgspec.Struct, kw_only=True):
    """A question for a person about one run."""

    id: str
    run: str
    reason: str
    step: str = ""
    summary: str = ""
    report: bytes = b"{}"
    """JSON with the facts: what was recorded, what is now, resolutions and their consequences."""
    resolutions: list[str] = []
    created_at: int = 0
    resolved_at: int | None = None
    resolution: str = ""
    by: str = ""
    note: str = ""
    workflow: str = ""
    """Filled when read: the run's workflow."""


class StartRun(msgspec.Struct, gc=False):
    """Create a run. Verdict: `Accepted`, or `Existing` with the row that is there already; then nothing was changed."""

    new: NewRun


class RestartRun(msgspec.Struct, gc=False):
    """Begin a new generation of an ended run that was claimed at `epoch`; the old history stays readable.

    Pending inbox rows become `undelivered`. Verdict: `Accepted` or `Refused`.
    """

    epoch: int
    new: NewRun


class Append(msgspec.Struct, kw_only=True, gc=False):
    """Everything that one run writes at once.

    Accepted only if the run's generation, epoch and head are the expected ones; otherwise `Refused("fenced")` when the
    epoch or generation is another, `Refused("head")` when only the head is. An append that ends the run is
    `Refused("inbox")` while a `cancel` that it does not consume is pending: a cancel is never lost.

    `starts`: child runs. One whose id exists already with the same workflow and arguments is followed instead (and if
    it has ended, the follower is told at once); with others, the follower's inbox gets a `child` delivery with the
    status `refused`. A `child` delivery has the other run's id as `name`, the decimal call as `id`, and as value the
    JSON `{"status": …, "outcome": <the outcome's payload or null>}`, with `"budget": <the row's>` if it has one. An
    append that ends the run also tells all
    followers, marks pending inbox rows `undelivered`, sets `ended_at`,
    and gives the lease back. `payloads` are stored once per run by digest.
    What `starts`, `posts` and ends deliver to a run that has ended already is kept as `undelivered`: nobody hears a
    verdict on it, so it stays visible. What they deliver to a run that is not there is dropped.
    """

    run: str
    generation: int
    epoch: int
    expected_seq: int
    expected_digest: bytes
    events: Sequence[EventRow]
    row: RowChange
    payloads: Sequence[tuple[str, bytes]] = ()
    consumed: Sequence[int] = ()
    starts: Sequence[NewRun] = ()
    posts: Sequence[Post] = ()
    hold: HoldRow | None = None
    """A new hold, or with `resolved_at` set the resolution of the one with this id."""
    release: bool = False
    """Give the lease back (owner becomes None)."""


class Claim(msgspec.Struct, gc=False):
    """Take the right to drive a run: the epoch goes up by one and `worker` becomes the owner.

    Accepted (`Claimed`) only if the status is one of `statuses` and the run is free: no owner, the owner is `worker`
    itself, or the owner has no row in `workers` (it died), or its lease has lapsed at `at`. Otherwise `NotClaimed`.
    When the owner had died while the status was `running` or `queued`: `deaths` becomes `deaths + 1` if the head did
    not move since the last death, else 1. A claim by the present owner also raises the epoch. (An append with events
    that are progress sets `deaths` to 0.) A lease has lapsed when `lease_until <= at`. The status stays as it is.
    """

    run: str
    worker: str
    at: int
    statuses: Sequence[Status]


class Release(msgspec.Struct, gc=False):
    """Give a run back without writing history. Refused("fenced") if the epoch is another.

    Its status becomes `status`, unless it has ended.
    """

    run: str
    epoch: int
    status: Status


Operation = StartRun | RestartRun | Append | Post | Claim | Release


class Accepted(NamedTuple):
    """The operation was done."""


class Existing(NamedTuple):
    """A run with this id exists."""

    row: RunRow


class Refused(NamedTuple):
    """The operation was not done and changed nothing."""

    why: Literal["fenced", "head", "inbox", "missing"]


class Posted(NamedTuple):
    """The delivery is in the inbox; `duplicate` when it had been there already."""

    number: int
    duplicate: bool = False


class NotPosted(NamedTuple):
    """There is no such run (`status` None), or it has ended."""

    status: Status | None


class Claimed(NamedTuple):
    """The run is ours; `row` is the row after the claim."""

    row: RunRow


class NotClaimed(NamedTuple):
    """Somebody else drives it, or its status does not allow it."""

    row: RunRow | None


class Failed(NamedTuple):
    """The operation was not done and changed nothing: it fails by itself, as with a payload that cannot be stored."""

    error: Exception


Verdict = Accepted | Existing | Refused | Posted | NotPosted | Claimed | NotClaimed | Failed


class RunFilter(msgspec.Struct, kw_only=True):
    """Which runs to list. Newest first. `before` is a `created_at`/id pair to page on."""

    status: Sequence[Status] = ()
    workflow: str | None = None
    parent: str | None = None
    tags: dict[str, str] = {}
    limit: int = 100
    offset: int = 0


class WorkerRow(msgspec.Struct):
    """A process that drives runs. `place` is its byte in the file of liveness locks."""

    id: str
    place: int
    pid: int
    host: str
    started_at: int
    lease_until: int


class Store(Protocol):
    """What the engine needs of a database. Methods may be called from any thread, one at a time per method family:
    `commit` only from the committer; the reading methods from anywhere (they use a connection of their own).
    """

    url: str
    is_new: bool
    """Whether this call created the store."""

    # -- writing ---------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, in order, each accepted or refused by itself.

        Raises `StoreFull` (nothing was done), `StoreFailed` (unknown; nothing may be assumed), `Busy` when not
        `patient` and another process is writing just now (nothing was done). Any other failure of the transaction is
        resolved inside: the store reads back what was done, then tries the operations singly.
        """
        ...

    def now(self) -> int:
        """Return the store's clock."""
        ...

    # -- reading ---------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None: ...

    def runs(self, filter: RunFilter) -> list[RunRow]: ...

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status."""
        ...

    def events(self, run: str, generation: int) -> list[EventRow]: ...

    def payload(self, run: str, digest: str) -> bytes | None: ...

    def inbox(self, run: str) -> list[Delivery]:
        """Return the pending deliveries, in the order of their numbers."""
        ...

    def signals(self, run: str) -> list[Delivery]:
        """Return all deliveries of the run that are kept, in order, with their states."""
        ...

    def children(self, run: str) -> list[RunRow]: ...

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]: ...

    # -- finding work ----------------------------------------------------------------------------------------------
    def due(self, *, at: int, workflows: Sequence[str], worker: str, everyone: bool, limit: int) -> list[str]:
        """Return ids of runs that want a driver now, the most urgent first.

        Those are: `queued` or `running` ones; `waiting` ones whose `wake_at` has come or that have a pending delivery.
        With `everyone`: the free ones (no owner, or a dead or lapsed one) and this worker's own waiting ones.
        Without: only this worker's own waiting ones. Only runs of the named workflows.
        """
        ...

    def pending(self, worker: str) -> list[str]:
        """Return ids of runs that this worker owns and that have a pending delivery, whatever their status."""
        ...

    def diverged(self, workflows: Sequence[str], limit: int) -> list[str]:
        """Return ids of runs with an open hold for the reason `diverged`."""
        ...

    def next_wake(self, *, worker: str, everyone: bool) -> int | None:
        """Return the earliest `wake_at` among the waiting runs that `due` could return later."""
        ...

    def changed(self) -> bool:
        """Tell whether another process (or another store object) has written since the last call. Very cheap."""
        ...

    # -- workers ---------------------------------------------------------------------------------------------------
    def register_worker(self, worker: str, pid: int, host: str, lease_until: int) -> WorkerRow:
        """Enter a worker and take its liveness lock, which the kernel frees when the process dies."""
        ...

    def renew(self, worker: str, lease_until: int) -> bool:
        """Prolong the worker's lease; False if it had been buried."""
        ...

    def workers(self) -> list[WorkerRow]: ...

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose process is gone (their liveness lock is free), and return their ids.

        A worker whose lease has lapsed but whose process lives is not buried: it may wake up and prolong its lease.
        """
        ...

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker (owner None; `running` becomes `queued`) and remove it."""
        ...

    def close(self) -> None: ...


class Busy(Exception):
    """Another process is writing just now. Only for the committer, which then tries again on its own thread."""


def child_value(status: str, outcome: bytes | None, budget: bytes | None = None) -> bytes:
    """Return the value of a `child` delivery."""
    used = b',"budget":' + budget if budget is not None else b""
    return b'{"status":"' + status.encode() + b'","outcome":' + (b"null" if outcome is None else outcome) + used + b"}"


def check_events(new: NewRun | Append) -> None:
    """Raise `Misuse` if the events do not fit the heads that they are said to lead from and to."""
    if isinstance(new, NewRun):
        sound = (new.event.seq, new.event.digest) == (new.row.head_seq, new.row.head_digest)
    else:
        sound = not new.events or (
            new.events[0].seq == new.expected_seq + 1 and new.events[-1].seq == new.expected_seq + len(new.events)
        )
    if not sound:
        raise Misuse("The events do not follow the head they are said to follow. This is a mistake in the engine.")


def pages(rows: Iterable[RunRow], filter: RunFilter) -> list[RunRow]:
    """Return the page of `rows` that a filter asks for (for stores that filter in memory)."""
    listed = list(rows)
    return listed[filter.offset : filter.offset + filter.limit]
