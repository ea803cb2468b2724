"""The seam between the engine and a database.

A store is synchronous and knows nothing of workflows. The engine calls `commit` with everything that is ready, of all
runs, and the store does it in one transaction. Within it each operation is accepted or refused by itself: a fenced run
never stops another one. Every write carries the run's epoch and expected head, so a worker that lost its lease changes
nothing, whatever it still believes.

All times are microseconds since 1970, by the store's clock (`now`).

The inbox of a run is its rows in `signals`: messages (kind `signal`), questions that want an answer (kind `request`),
`cancel`, `hold`, the ends of other runs that it follows (kind `child`), and the message that a key which it waits for
has changed (kind `key`). They are numbered per store in the order of arrival.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec

from everstep.errors import Misuse
from everstep.model.chains import ChainKeys
from everstep.model.events import EventRow
from everstep.model.status import Status
from everstep.stores.rows.answers_and_streams import AnswerRow, ApprovalStore, Beside, EntryRow
from everstep.stores.rows.archive import ArchiveRow
from everstep.stores.rows.keys import ForgetKeys, Forgotten, KeyChanges, KeyStore, SettleKey
from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, NoSlot, QueueStore, TakeSlot
from everstep.stores.rows.runs import (
    CheckpointRow,
    ClaimedPast,
    Delivery,
    HoldRow,
    LostTail,
    NewRun,
    Post,
    RowChange,
    RunFilter,
    RunRow,
)
from everstep.stores.rows.saved import SavedOperation, SavedReads, Taken
from everstep.stores.rows.schedules import ChangeSchedule, Schedules
from everstep.stores.rows.transfer import Arrival, ClaimFamily, Deleted, DeletePart, ImportRuns, RunDump
from everstep.stores.rows.workers import GoneKind, GoneRow, WorkerRow

# `gc=False` below: these are plain data without reference cycles, and there are very many of them. The garbage
# collector need not scan them.

LAST: Final = 2**63 - 1
"""Greater than the number of any event."""


class Needs(msgspec.Struct, gc=False):
    """What must still exist when a fork is created: its source, runs that it would follow, keys that it would share."""

    runs: Sequence[str]
    keys: Sequence[str] = ()


class StartRun(msgspec.Struct, gc=False):
    """Create a run. Verdict: `Accepted`, or `Existing` with the row that is there already; then nothing was changed.

    With `needs`: `Refused("missing")` if one of the runs is gone or being deleted, `Refused("key")` if a key is gone.
    """

    new: NewRun
    needs: Needs | None = None


class RestartRun(msgspec.Struct, gc=False):
    """Begin a new generation of an ended run that was claimed at `epoch`; the old history stays readable.

    Inbox rows that are not consumed become `left`; signals and cancels give their ids back; keys are given back as by
    the end of a run. Verdict: `Accepted` or `Refused`. With `hold`, the resolution of the hold of a run whose history
    cannot be repaired, the run may be held instead.
    """

    epoch: int
    new: NewRun
    hold: HoldRow | None = None


class Append(msgspec.Struct, gc=False):
    """Everything that one run writes at once.

    Accepted only if the run's generation, epoch and head are the expected ones; otherwise `Refused("fenced")` when the
    epoch or generation is another, `Refused("head")` when only the head is. An append that ends the run is
    `Refused("inbox")` while a `cancel` that it does not consume is pending: a cancel is never lost.

    `starts`: child runs. One whose id exists already with the same workflow and arguments is followed instead (and if
    it has ended, its end is delivered at once); with others, the follower's inbox gets a `child` delivery with the
    status `refused`. A `child` delivery has the other run's id as `name`, the decimal call as `id`, and as value the
    JSON `{"status": …, "outcome": <the outcome's payload or null>}`, with `"budget": <the row's>` if it has one. An
    append that ends the run also delivers its end to all followers, marks pending inbox rows `undelivered`, sets
    `ended_at`, and gives the lease back. `payloads` are stored once per run by digest. `keys`: with a claim of a key
    that another step has, or a share of an outcome that is no longer shared, the append is `Refused("key")`, naming the
    calls that did not get theirs. An end settles a key and notifies the steps that wait for it. So does the end of a
    compensation, and an append that ends the run does so for its steps in progress that may be repeated.

    What `starts`, `posts` and ends deliver to a run that has ended already is kept as `undelivered`: no sender gets a
    verdict on it, so it stays visible. What they deliver to a run that does not exist is dropped.
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
    notifications: Sequence[NotificationRow] = ()
    """With a new hold: the targets to notify. When a hold is resolved, its pending notifications are dropped."""
    release: bool = False
    """Give the lease back (owner becomes None)."""
    keys: KeyChanges | None = None
    checkpoints: Sequence[CheckpointRow] = ()
    """New checkpoints, whose events are among `events`. The newest `checkpoints_kept` of the run's checkpoints stay."""
    checkpoints_kept: int = 3
    renewal: NewRun | None = None
    """The next generation, which begins as this one ends: its row replaces the run's, except for the epoch. The inbox
    and the followers stay as they are; the runs that the old generation followed are no longer followed.
    """
    archive: Sequence[ArchiveRow] = ()
    """Damaged rows. A checkpoint (`what` is `checkpoints`) is moved there from its table."""
    beside: Beside | None = None
    """Answers to requests, and entries of streams."""
    redeliver: bool = False
    """The run had ended and its code continues: its `undelivered` signals and requests are pending again."""
    plain: bool = False
    """A hint that the append has only events, for a run whose row `stays`, as nearly all do. It changes nothing but the
    time that the append takes.
    """


class Claim(msgspec.Struct, gc=False):
    """Take the right to drive a run: the epoch goes up by one and `worker` becomes the owner.

    Accepted (`Claimed`) only if the status is one of `statuses` and the run is free: no owner, the owner is `worker`
    itself, or the owner has no row in `workers` (it died), or its lease has lapsed (`lapse`). Otherwise `NotClaimed`.
    When the owner had died while the status was `running` or `queued`: `deaths` becomes `deaths + 1` if the head did
    not move since the last death, else 1. A claim by the present owner also raises the epoch. (An append with events
    that are progress sets `deaths` to 0.) The status stays as it is.
    """

    run: str
    worker: str
    at: int
    statuses: Sequence[Status]
    queued: bool = False
    """Whether a `queued` run must also wait for its turn in its queue, if that is not `default`: not before its
    `wake_at`, and only if its queue has room (see `room_of`, without the run itself) and `per_key` allows it. A token
    is taken then. Otherwise `NotClaimed`, and nothing changes.
    """
    queues: Sequence[str] | None = None
    """With `queued`: only if the run belongs to one of these, or to `default`."""
    deleting: bool = False
    """True to claim a run that is being deleted, to continue with that. Otherwise such a run is `NotClaimed`."""


class Release(msgspec.Struct, gc=False):
    """Give a run back without history, with `status` unless it has ended. Refused("fenced") if the epoch is another."""

    run: str
    epoch: int
    status: Status
    died: bool = False
    """Whether this counts as the death of its owner, if it has one: `deaths` becomes `deaths + 1`."""


class RepairRun(msgspec.Struct, gc=False):
    """Repair a damaged run from the part of its history that is good, and archive the rest.

    Accepted only if the run's epoch is the expected one and the run is free for `worker` at `at` (as for a `Claim`);
    otherwise `Refused("fenced")`. Then, in one transaction: the run's row as it is, its events of this generation after
    number `keep` (and of later generations, and with numbers below 1), the checkpoints at such events and the payloads
    named in `payloads` go into the archive, with the entries of streams that were written after that event; answers in
    those events are forgotten; the row becomes `row`, with its epoch raised by one and no owner; `event` is appended;
    the deliveries `pending`, consumed or undelivered, are pending again; `hold` is resolved. Keys of effects are left
    as they are.
    """

    epoch: int
    worker: str
    at: int
    row: RunRow
    keep: int
    event: EventRow | None = None
    payloads: Sequence[str] = ()
    pending: Sequence[int] = ()
    hold: HoldRow | None = None
    why: str = ""


class MarkRestored(msgspec.Struct, gc=False):
    """Record that the store was restored from a backup, once more than the `expected` times before.

    `Refused("fenced")` if the store counts another number, or while it has any worker.
    """

    expected: int


_OfWhole: TypeAlias = ImportRuns | ClaimFamily | DeletePart
_OfRuns: TypeAlias = StartRun | RestartRun | Append | Post | Claim | Release | RepairRun | _OfWhole
_OfOthers: TypeAlias = SettleKey | ForgetKeys | TakeNotification | SettleNotification | ChangeSchedule | MarkRestored
_OfOurs: TypeAlias = _OfRuns | _OfOthers | ChangeQueue | TakeSlot | FreeSlot
if TYPE_CHECKING:  # what frameworks save is loaded when the first framework saves something
    Operation: TypeAlias = _OfOurs | SavedOperation
else:
    Operation = _OfOurs


class Accepted(msgspec.Struct, frozen=True):
    """The operation was done."""


class Existing(msgspec.Struct, frozen=True):
    """A run with this id exists."""

    row: RunRow


class Refused(msgspec.Struct, frozen=True):
    """The operation was not done and changed nothing."""

    why: Literal["changed", "fenced", "head", "inbox", "missing", "key", "taken"]
    calls: tuple[int, ...] = ()
    """With `key`: the calls that did not get their keys or outcomes."""


class Posted(msgspec.Struct, frozen=True):
    """The delivery is in the inbox; `duplicate` if it had been there before, pending or consumed."""

    number: int
    duplicate: bool = False


class NotPosted(msgspec.Struct, frozen=True):
    """There is no such run (`status` None), or it has ended."""

    status: Status | None


class Claimed(msgspec.Struct, frozen=True):
    """The run is the worker's; `row` is the row after the claim."""

    row: RunRow
    past: ClaimedPast | None = None


class NotClaimed(msgspec.Struct, frozen=True):
    """Another worker drives the run, or its status does not allow a claim."""

    row: RunRow | None


class Failed(msgspec.Struct, frozen=True):
    """The operation was not done and changed nothing, because of its own content: for example a payload that cannot be
    stored.
    """

    error: Exception


_Done: TypeAlias = Accepted | Existing | Posted | Claimed | Forgotten | Deleted
_OnOurs: TypeAlias = _Done | Refused | NotPosted | NotClaimed | Failed | NoSlot
if TYPE_CHECKING:
    Verdict: TypeAlias = _OnOurs | Taken
else:
    Verdict = _OnOurs


class Store(Schedules, QueueStore, KeyStore, ApprovalStore, Protocol):
    """What the engine needs of a database. Methods may be called from any thread, one at a time per method family.

    `commit` is called only by the committer; the reading methods from any thread (they use a connection of their own).
    On the thread of an application's loop they are called within `briefly` (see brief.py).
    """

    url: str
    is_new: bool
    """Whether this call created the store."""
    entropy: str
    """128 random bits of this store, from which the keys of shared actions derive."""
    noted: int
    """The latest time that any worker had recorded before this store object was opened; 0 if none had."""
    look_seconds: float
    """How often a worker looks for work that no notification announced, in seconds. (Timers are known beforehand.)"""
    chain: ChainKeys
    """The chain keys of this process, for the code that makes and verifies histories. The store does not use them."""

    @property
    def saved(self) -> "SavedReads":
        """What frameworks have saved here."""
        ...

    # -- writing ---------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, in order, each accepted or refused by itself.

        What concerns other runs may go into a second transaction. The results are returned when all are durable.

        Raises `StoreFull` (nothing was done), `StoreFailed` (unknown; nothing may be assumed), `Busy` when not
        `patient` and it would have to wait, for another process or for a server that does not answer: then the caller
        calls again, patiently, with the same operations. Any other failure of the transaction is resolved inside: the
        store reads back what was done, then tries the operations singly.
        """
        ...

    def now(self) -> int:
        """Return the time by the store's clock.

        It is never behind a time that a worker has recorded, also if the machine's clock was set back, because
        deadlines go by it.
        """
        ...

    def connect(self) -> Any:
        """Return a new connection to the store's database, for an atomic step that writes tables of its own there.

        It never waits: `BEGIN IMMEDIATE` raises at once while another connection writes. The caller closes it.
        """
        ...

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Do operations in the open transaction of a caller's own connection to this store's database.

        They are done if and only if the caller commits. The verdicts are as of now, in that transaction. A failure
        raises the database's own error, and leaves the transaction without any of these operations. `Misuse` if the
        connection leads to another database, or has no open transaction. Called on the thread that has the connection.
        """
        ...

    # -- reading ---------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None: ...

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of the named runs that exist, in any order."""
        ...

    def runs(self, filter: RunFilter) -> list[RunRow]: ...

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status."""
        ...

    def runs_without_status(self, limit: int) -> list[str]:
        """Return ids of runs whose status is not a valid one: their rows are damaged."""
        ...

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history as it is stored, or the part of it between two numbers, both included.

        only: of that part, the events with these numbers, at most three.
        """
        ...

    def generations(self, run: str) -> list[int]:
        """Return the generations that have events."""
        ...

    def strays(self) -> list[tuple[str, int]]:
        """Return histories without a row of their run, as run and generation."""
        ...

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint whose event is before this number."""
        ...

    def payload(self, run: str, digest: str) -> bytes | None: ...

    def answer(self, run: str, number: int) -> AnswerRow | None:
        """Return which event holds the answer to a request, by the request's number in the inbox."""
        ...

    def stream(self, run: str, generation: int, name: str, after: int = 0, limit: int = 1000) -> list[EntryRow]:
        """Return entries of a stream after a position, in order."""
        ...

    def stream_head(self, run: str, generation: int, name: str) -> EntryRow | None:
        """Return the newest entry of a stream."""
        ...

    def streams(self, run: str, generation: int) -> list[tuple[str, int]]:
        """Return the names of a run's streams, and the position of the newest entry of each."""
        ...

    def archived(self, run: str) -> list[ArchiveRow]:
        """Return what was archived of a run, the oldest first."""
        ...

    def dump(self, run: str) -> RunDump | None:
        """Return everything of a run, as of one moment."""
        ...

    def ties(self, run: str) -> list[str]:
        """Return the runs that an unfinished run is tied to: by following, or by waiting for a key."""
        ...

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended, with the last generation to delete."""
        ...

    def is_being_deleted(self, run: str) -> bool:
        """Return True if the deletion of a run has begun."""
        ...

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Return True if a run that is not among these may still need one of them, so that none of them may be deleted.

        Their parents and children do. So does a run that may continue (it has not ended, or has failed and so may be
        retried) if it has one of them as a child, whichever run started that, or was forked from one of them, or from a
        run that has one of them as a child.
        """
        ...

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        ...

    def life(self) -> str:
        """Return the store's present life. Each restored backup begins a new one, and no two stores share one.

        It ends with a dot and the number of restores.
        """
        ...

    def arrival(self, run: str) -> Arrival | None:
        """Return whether, and with which events, a run was imported."""
        ...

    def lost_tails(self) -> Sequence[LostTail]:
        """Return runs that were found to have lost the end of their history, each once, before more was written to
        them. Very cheap.
        """
        ...

    def inbox(self, run: str) -> list[Delivery]:
        """Return the pending deliveries, in the order of their numbers."""
        ...

    def signals(self, run: str) -> list[Delivery]:
        """Return all deliveries of the run that are kept, in order, with their states."""
        ...

    def children(self, run: str) -> list[RunRow]: ...

    def holds(self, *, run: str | None = None, open_only: bool = True) -> list[HoldRow]: ...

    def notifications(self, *, run: str | None = None, undelivered_only: bool = True) -> list[NotificationRow]:
        """Return notifications, oldest first. Undelivered: pending or given up, of a hold that is open."""
        ...

    # -- finding work ----------------------------------------------------------------------------------------------
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
        """Return ids of runs that want a driver now, the most urgent first.

        Those are: `queued` or `running` ones; `waiting` ones whose `wake_at` has come or that have a pending delivery.
        With `everyone`: the free ones (no owner, or a dead or lapsed one) and this worker's own waiting ones.
        Without: only this worker's own waiting ones. Only runs of the named workflows, and of the named queues or the
        worker's own. A `queued` run without an owner in a queue other than `default` is not among them: see `queued`.
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

    def due_notifications(self, *, target: str, at: int, limit: int) -> list[NotificationRow]:
        """Return the pending notifications for a target that are free at a time, the longest due first."""
        ...

    def next_notification(self, *, target: str) -> int | None:
        """Return the earliest `next_at` among the pending notifications for a target."""
        ...

    def changed(self) -> bool:
        """Tell whether another process (or another store object) has written since the last call. Very cheap."""
        ...

    # -- workers ---------------------------------------------------------------------------------------------------
    def register_worker(
        self, worker: str, pid: int, host: str, lease_until: int, targets: Sequence[str] = (), about: bytes = b"{}"
    ) -> WorkerRow:
        """Register a worker and take its liveness lock, which the kernel frees when the process dies."""
        ...

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Renew the worker's lease, and record that it is `at` now. False if the worker was removed. None: `about`
        stays.

        `lease_until` in the worker's row changes with every call, also if the same number is given twice.
        """
        ...

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Mark a worker's lease as lapsed: others may claim its runs, until it renews the lease.

        For a caller that has watched the worker for a whole lease, by its own clock, and read this `lease_until` all
        the time. False if the worker has renewed its lease meanwhile, or is gone.
        """
        ...

    def workers(self) -> list[WorkerRow]: ...

    def neighbours(self, worker: str, limit: int) -> list[WorkerRow]:
        """Return the workers with a lease in the places after this worker's, in a circle."""
        ...

    def is_in_use(self) -> bool:
        """Return True if any process has this store open, registered as a worker or not."""
        ...

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose process is gone (their liveness lock is free), and return their ids.

        A worker whose lease has lapsed but whose process lives is not removed: it may wake up and renew its lease.
        """
        ...

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker (owner None; `running` becomes `queued`), remove it, and record its end.

        Only for a worker that has seen everything end that it had begun: see `has_ended`.
        """
        ...

    def has_ended(self, worker: str) -> bool:
        """Return True if a worker provably cannot act any more: it left, or the kernel says that its process is gone.

        Also if a person has said so: see `declare_gone`. A worker without a row, a lease or a session may still act.
        """
        ...

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Record that a worker or host is gone, and fence these workers: their runs are free, with epochs raised.

        A worker that was declared gone counts as ended (`has_ended`), and its lease is no longer renewed.
        """
        ...

    def gone(self, kind: GoneKind | None = None, name: str | None = None) -> list[GoneRow]:
        """Return what was declared gone, all or of one worker or host, the newest first."""
        ...

    def owners(self) -> list[str]:
        """Return the workers that own runs, whether or not they are registered."""
        ...

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Keep a worker's liveness lock after `close`, because something that it began still acts. Returns a function
        that frees the lock.

        A store whose locks end with its connection returns a function that does nothing.
        """
        ...

    def close(self) -> None: ...


def child_value(status: str, outcome: bytes | None, budget: bytes | None = None) -> bytes:
    """Return the value of a `child` delivery."""
    used = b',"budget":' + budget if budget is not None else b""
    return b'{"status":"' + status.encode() + b'","outcome":' + (b"null" if outcome is None else outcome) + used + b"}"


def check_events(new: NewRun | Append) -> None:
    """Raise `Misuse` if the events do not lead from the expected head to the new one."""
    if type(new) is Append:
        events, before = new.events, new.expected_seq
        sound = not events or (events[0][0] == before + 1 and events[-1][0] == before + len(events))
    else:
        assert isinstance(new, NewRun)
        last = new.more[-1] if new.more else new.event
        sound = (last.seq, last.digest) == (new.row.head_seq, new.row.head_digest) and len(new.more) == last.seq - 1
    if not sound:
        raise Misuse("The events do not follow the head they are said to follow. This is a mistake in the engine.")
