"""The seam between the engine and a database.

A store is synchronous and knows nothing of workflows. The engine calls `commit` with everything that is ready, of all
runs, and the store does it in one transaction. Within it each operation is accepted or refused by itself: a fenced run
never stops another one. Everything a store is told carries the run's epoch and expected head, so a worker that lost
its lease changes nothing, whatever it still believes.

All times are microseconds since 1970, by the store's clock (`now`).

The inbox of a run is its rows in `signals`: messages (kind `signal`), questions that want an answer (kind `request`),
`cancel`, `hold`, the ends of other runs that it follows (kind `child`), and the news that a key which it waits for has
changed (kind `key`). They are numbered per store in the order of arrival.
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

# `gc=False` below: these are plain data in which no circle can arise, and there are very many of them. The garbage
# collector need not look at them.

LAST: Final = 2**63 - 1
"""Greater than the number of any event."""


class Needs(msgspec.Struct, gc=False):
    """What a fork counts on: the run that it comes from, runs that it would follow, keys that it would share."""

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
    it has ended, the follower is told at once); with others, the follower's inbox gets a `child` delivery with the
    status `refused`. A `child` delivery has the other run's id as `name`, the decimal call as `id`, and as value the
    JSON `{"status": …, "outcome": <the outcome's payload or null>}`, with `"budget": <the row's>` if it has one. An
    append that ends the run also tells all followers, marks pending inbox rows `undelivered`, sets `ended_at`, and
    gives the lease back. `payloads` are stored once per run by digest. `keys`: with a claim of a key that another step
    has, or a share of an outcome that is shared no more, the append is `Refused("key")`, naming the calls that did not
    get theirs. An end settles a key and tells whoever waits for it. So does the end of undoing it, and an append that
    ends the run does so for its steps under way that may be repeated.
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
    notifications: Sequence[NotificationRow] = ()
    """With a new hold: who is to be told of it. When a hold is resolved, its pending ones are dropped."""
    release: bool = False
    """Give the lease back (owner becomes None)."""
    keys: KeyChanges | None = None
    checkpoints: Sequence[CheckpointRow] = ()
    """New checkpoints, whose events are among `events`. Of all that the run has, the newest `checkpoints_kept` stay."""
    checkpoints_kept: int = 3
    renewal: NewRun | None = None
    """The next generation, which begins as this one ends: its row takes the place of the run's, but for the epoch. The
    inbox stays as it is, and so do the followers; what the old generation itself followed is followed no more."""
    archive: Sequence[ArchiveRow] = ()
    """Damaged rows. A checkpoint (`what` is `checkpoints`) is moved there from its table."""
    beside: Beside | None = None
    """Answers to requests, and entries of streams."""
    redeliver: bool = False
    """The run had ended and its code goes on: its `undelivered` signals and requests are pending again."""
    plain: bool = False
    """Whether it is said to bring only events, to a run whose row `stays`: nearly all do. It makes no difference but to
    the time that takes."""


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
    is taken then. Otherwise `NotClaimed`, and nothing is changed."""
    queues: Sequence[str] | None = None
    """With `queued`: only if the run belongs to one of these, or to `default`."""
    deleting: bool = False
    """Whether a run is meant that is being deleted, to go on with that. Without it such a run is `NotClaimed`."""


class Release(msgspec.Struct, gc=False):
    """Give a run back without history, with `status` unless it has ended. Refused("fenced") if the epoch is another."""

    run: str
    epoch: int
    status: Status
    died: bool = False
    """Whether this counts as the death of its owner, if it has one: `deaths` becomes `deaths + 1`."""


class RepairRun(msgspec.Struct, gc=False):
    """Put a damaged run right, from the part of its history that is good, and archive the rest.

    Accepted only if the run's epoch is the expected one and the run is free for `worker` at `at` (as for a `Claim`);
    otherwise `Refused("fenced")`. Then, in one transaction: the run's row as it is, its events of this generation after
    number `keep` (and of later generations, and with numbers below 1), the checkpoints at such events and the payloads
    named in `payloads` go into the archive, with the entries of streams that were written after that event; answers
    that stand there are forgotten; the row becomes `row`, with its epoch raised by one and no owner; `event` is
    appended; the deliveries `pending`, consumed or undelivered, are pending again; `hold` is resolved. Keys of effects
    are left as they are.
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
    """Note that the store was restored from a backup, once more than the `expected` times before.

    Refused("fenced") if that is another number, or while there is any worker.
    """

    expected: int


_OfWhole: TypeAlias = ImportRuns | ClaimFamily | DeletePart
_OfRuns: TypeAlias = StartRun | RestartRun | Append | Post | Claim | Release | RepairRun | _OfWhole
_OfOthers: TypeAlias = SettleKey | ForgetKeys | TakeNotification | SettleNotification | ChangeSchedule | MarkRestored
_OfOurs: TypeAlias = _OfRuns | _OfOthers | ChangeQueue | TakeSlot | FreeSlot
if TYPE_CHECKING:  # what frameworks save is loaded when the first of them saves something
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
    """With `key`: the calls whose keys, or outcomes, are not theirs to have."""


class Posted(msgspec.Struct, frozen=True):
    """The delivery is in the inbox; `duplicate` when it had been there already, pending or consumed."""

    number: int
    duplicate: bool = False


class NotPosted(msgspec.Struct, frozen=True):
    """There is no such run (`status` None), or it has ended."""

    status: Status | None


class Claimed(msgspec.Struct, frozen=True):
    """The run is ours; `row` is the row after the claim."""

    row: RunRow
    past: ClaimedPast | None = None


class NotClaimed(msgspec.Struct, frozen=True):
    """Somebody else drives it, or its status does not allow it."""

    row: RunRow | None


class Failed(msgspec.Struct, frozen=True):
    """The operation was not done and changed nothing: it fails by itself, as with a payload that cannot be stored."""

    error: Exception


_Done: TypeAlias = Accepted | Existing | Posted | Claimed | Forgotten | Deleted
_OnOurs: TypeAlias = _Done | Refused | NotPosted | NotClaimed | Failed | NoSlot
if TYPE_CHECKING:
    Verdict: TypeAlias = _OnOurs | Taken
else:
    Verdict = _OnOurs


class Store(Schedules, QueueStore, KeyStore, ApprovalStore, Protocol):
    """What the engine needs of a database. Methods may be called from any thread, one at a time per method family:
    `commit` only from the committer; the reading methods from anywhere (they use a connection of their own). On the
    thread of an application's loop they are called within `briefly` (see brief.py).
    """

    url: str
    is_new: bool
    """Whether this call created the store."""
    entropy: str
    """128 random bits of the store's own, from which the keys of shared actions derive."""
    noted: int
    """The latest time that a worker had noted before this store object was opened; 0 if none had."""
    look_seconds: float
    """How often a worker looks for work although nobody has said that there is any. (Timers are known beforehand.)"""
    chain: ChainKeys
    """The chain keys of this process, for whoever makes and verifies histories. A store itself knows none."""

    @property
    def saved(self) -> "SavedReads":
        """What frameworks have saved here."""
        ...

    # -- writing ---------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, in order, each accepted or refused by itself.

        What concerns other runs may go into a second transaction. Nobody hears of any before all are durable.
        Raises `StoreFull` (nothing was done), `StoreFailed` (unknown; nothing may be assumed), `Busy` when not
        `patient` and it would have to wait, for another process or for a server that does not answer: then the caller
        comes again, patiently, with the same operations. Any other failure of the transaction is resolved inside: the
        store reads back what was done, then tries the operations singly.
        """
        ...

    def now(self) -> int:
        """Return the store's clock.

        It is not behind what workers said they have seen, also if the machine's clock was set back: deadlines are its.
        """
        ...

    def connect(self) -> Any:
        """Return a new connection to the store's database, for an atomic step that writes tables of its own there.

        It waits for nobody: `BEGIN IMMEDIATE` raises at once while somebody else writes. Whoever asks closes it.
        """
        ...

    def write_in(self, connection: Any, operations: Sequence[Operation]) -> list[Verdict]:
        """Do operations in the open transaction of a caller's own connection to this store's database.

        They are done if and only if the caller commits. The verdicts are as of now, in that transaction. What fails
        raises the database's own error, and leaves the transaction without any of these operations. `Misuse` if the
        connection is none to this database, or has no open transaction. Called on the thread that has the connection.
        """
        ...

    # -- reading ---------------------------------------------------------------------------------------------------
    def run(self, id: str) -> RunRow | None: ...

    def rows(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the rows of those runs that there are, in any order."""
        ...

    def runs(self, filter: RunFilter) -> list[RunRow]: ...

    def counts(self) -> dict[str, int]:
        """Return how many runs there are in each status."""
        ...

    def runs_without_status(self, limit: int) -> list[str]:
        """Return ids of runs whose status is none that a run can have: their rows are damaged."""
        ...

    def events(
        self, run: str, generation: int, first: int = 1, last: int = LAST, *, only: Sequence[int] = ()
    ) -> list[EventRow]:
        """Return a history as it is stored, or the part of it between two numbers, both included.

        only: of that part, the events with these numbers, at most three.
        """
        ...

    def generations(self, run: str) -> list[int]:
        """Return the generations of which there are events."""
        ...

    def strays(self) -> list[tuple[str, int]]:
        """Return histories that no run's row knows, as run and generation."""
        ...

    def checkpoint(self, run: str, generation: int, before: int = LAST) -> CheckpointRow | None:
        """Return the newest checkpoint whose event stands before this number."""
        ...

    def payload(self, run: str, digest: str) -> bytes | None: ...

    def answer(self, run: str, number: int) -> AnswerRow | None:
        """Return where the answer to a request stands, by the request's number in the inbox."""
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
        """Return everything that there is of a run, as of one moment."""
        ...

    def ties(self, run: str) -> list[str]:
        """Return the runs that an unfinished run is tied to: by following, or by waiting for a key."""
        ...

    def deletions(self) -> list[tuple[str, int]]:
        """Return runs whose deletion has begun and not ended, with the last generation that it is about."""
        ...

    def is_being_deleted(self, run: str) -> bool:
        """Tell whether the deletion of a run has begun."""
        ...

    def is_needed(self, runs: Sequence[str]) -> bool:
        """Tell whether a run that is not among these may still need one of them, so that none of them may be deleted.

        Their parents and children do. So does a run that may go on (it has not ended, or has failed and so may be
        retried) if it has one of them as a child, whoever started that, or was forked from one of them, or from a run
        that has one of them as a child.
        """
        ...

    def restores(self) -> int:
        """Return how often this store was restored from a backup."""
        ...

    def life(self) -> str:
        """Return the store's present life: another one after each restored backup, and no other store's.

        It ends with a dot and the number of restores.
        """
        ...

    def arrival(self, run: str) -> Arrival | None:
        """Return whether, and with which events, a run was imported."""
        ...

    def lost_tails(self) -> Sequence[LostTail]:
        """Return the runs that were found to have lost their tails, each once; before more was written. Very cheap."""
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
        """Enter a worker and take its liveness lock, which the kernel frees when the process dies."""
        ...

    def renew(self, worker: str, lease_until: int, at: int = 0, about: bytes | None = None) -> bool:
        """Prolong the worker's lease, and note that it is `at` now; False if it had been buried. None: as before.

        `lease_until` in the worker's row changes with every call, also if the same number is given twice.
        """
        ...

    def lapse(self, worker: str, lease_until: int) -> bool:
        """Let a worker's lease have lapsed: others may claim its runs, until it prolongs the lease again.

        For a caller that has watched the worker for a whole lease, by its own clock, and read this `lease_until` all
        the time. False if the worker has prolonged its lease meanwhile, or is gone.
        """
        ...

    def workers(self) -> list[WorkerRow]: ...

    def neighbours(self, worker: str, limit: int) -> list[WorkerRow]:
        """Return the workers with a lease whose places come next after a worker's, and then from the beginning."""
        ...

    def is_in_use(self) -> bool:
        """Tell whether any process is at work on this store, also one that is not among its workers."""
        ...

    def bury_dead(self, at: int) -> list[str]:
        """Remove workers whose process is gone (their liveness lock is free), and return their ids.

        A worker whose lease has lapsed but whose process lives is not buried: it may wake up and prolong its lease.
        """
        ...

    def leave(self, worker: str) -> None:
        """Give back all runs of a worker (owner None; `running` becomes `queued`), remove it, and note its end.

        Only for a worker that has seen everything end that it had begun: see `has_ended`.
        """
        ...

    def has_ended(self, worker: str) -> bool:
        """Tell whether a worker provably cannot act any more: it left, or the kernel says that its process is gone.

        Or somebody has said so: see `declare_gone`. That a worker has no row, no lease or no session proves nothing.
        """
        ...

    def declare_gone(self, gone: GoneRow, workers: Sequence[str]) -> None:
        """Note that a worker or host is gone, and fence these workers: their runs are free, with epochs of their own.

        A worker that was declared gone counts as ended (`has_ended`), and its lease is not prolonged any more.
        """
        ...

    def gone(self, kind: GoneKind | None = None, name: str | None = None) -> list[GoneRow]:
        """Return what was declared gone, all or of one worker or host, the newest first."""
        ...

    def owners(self) -> list[str]:
        """Return the workers that have runs, whether or not they are there."""
        ...

    def hand_over_lock(self, worker: str) -> Callable[[], None]:
        """Keep a worker's liveness lock beyond `close`: something that it began still acts. What is returned frees it.

        A store whose locks end with its connection returns a function that does nothing.
        """
        ...

    def close(self) -> None: ...


def child_value(status: str, outcome: bytes | None, budget: bytes | None = None) -> bytes:
    """Return the value of a `child` delivery."""
    used = b',"budget":' + budget if budget is not None else b""
    return b'{"status":"' + status.encode() + b'","outcome":' + (b"null" if outcome is None else outcome) + used + b"}"


def check_events(new: NewRun | Append) -> None:
    """Raise `Misuse` if the events do not fit the heads that they are said to lead from and to."""
    if type(new) is Append:
        events, before = new.events, new.expected_seq
        sound = not events or (events[0][0] == before + 1 and events[-1][0] == before + len(events))
    else:
        assert isinstance(new, NewRun)
        last = new.more[-1] if new.more else new.event
        sound = (last.seq, last.digest) == (new.row.head_seq, new.row.head_digest) and len(new.more) == last.seq - 1
    if not sound:
        raise Misuse("The events do not follow the head they are said to follow. This is a mistake in the engine.")
