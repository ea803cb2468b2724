"""Every error of Everstep, in one tree.

    Error
    ├── Misuse                  the caller's mistake: what was wrong, and the right way
    │   ├── OutsideInWorkflow   a workflow body touched the outside: files, network, threads, processes
    │   ├── NotEncodable        a value that could not be stored and restored
    │   ├── WrongType           a value that is not of the type that the run's code declares for it
    │   ├── UnknownWorkflow     a run's workflow is not declared in this process
    │   ├── UnknownRun          there is no run with this id
    │   │   └── BeingDeleted    the run is being deleted: what is left of it is not whole
    │   ├── UnknownSchedule     there is no schedule of this name
    │   ├── UnknownQueue        there is no queue or limit with this name
    │   ├── IdConflict          the id belongs to a run with another workflow or other arguments, or another request
    │   ├── KeyConflict         the key belongs to another action: another step, or other arguments
    │   ├── HoldConflict        a hold is ambiguous, unknown or already resolved
    │   ├── CompensationBegun   what the run did is being undone, or was: it cannot be retried or rolled back
    │   └── Uncompensated       a rollback would leave effects that must not happen twice
    ├── NotDecodable            stored bytes are not of the type that the code expects now
    ├── RunActive               the run has not ended, so it cannot be restarted or retried
    ├── ThreadActive            another call runs this thread of an agent framework, here or in another process
    ├── WorkerAlive             the worker gave a sign of life, so it is not gone
    ├── WorkerGone              this worker was declared gone, so it stops
    ├── CrossesOnce             a retry would go back over effects that must not happen twice
    ├── RunEnded                the run has ended, so it cannot be signalled, cancelled, …
    ├── RunFailed               the run failed with an error that is not restorable here
    ├── RunCancelled            the run was cancelled
    ├── RunTimedOut             the run took longer than its timeout
    ├── RunHeld                 the run waits for a person
    ├── StreamLimit             an entry or a stream is larger than is allowed
    ├── NoAnswer                the run has not answered a request in time; it keeps the request
    ├── RequestRefused          the run refused a request, or its value was of another type than it asks for
    ├── StepError               a step failed with an exception type that is not restorable here
    ├── StepTimedOut            an attempt took longer than its timeout
    ├── NotDone                 raise it in a step: the effect certainly did not happen; another attempt is fine
    ├── Fatal                   raise it in a step: another attempt is useless
    ├── DatabaseFailed          the database of an atomic step could not be used, or refused the COMMIT
    ├── FileChanged             a file is not as a file effect expects it; it was left alone
    ├── FolderBusy              another process holds the folder of a file effect; nothing was changed
    ├── Drift                   the outside is not as the run remembers it, and the run was to fail then
    ├── NotGenuine              a request to a webhook's receiver is not signed with its secret, or is too old
    ├── GraphStuck              a graph cannot go on: no edge holds, a limit is reached, or two nodes disagree
    ├── BudgetExceeded          the run's budget has no room for a step, and it was to fail then
    └── StoreError              the database
        ├── StoreFull           no room on the disk: work pauses and resumes when there is room
        ├── StoreBusy           the database did not take a write just now: work pauses, and it is tried again
        ├── StoreUnreachable    the server cannot be reached, or takes no connections yet
        ├── StoreReadOnly       the file or its folder cannot be written, or the role may not: work pauses until it can
        ├── StoreUnusable       not a store, damaged, or made by a newer release
        ├── StoreFailed         a write failed in a way after which nothing may be assumed
        │   └── StoreMoved      the store's file was moved, removed or replaced while it was open
        ├── NotReadable         a history is sound, and this process cannot read it: another one can
        │   ├── ChainKeyMissing a history was made with a chain key that is not here, or without one
        │   ├── NewerHistory    a history has events of a newer release
        │   └── SecretsLeftOut  a history was exported without its secrets: it can be looked at, and not go on
        └── Damaged             a history does not match its digests

    Evicted (a BaseException)   unwinds workflow code that leaves memory; it is not a failure and must not be caught

Each has a stable `code` such as `everstep.run.held`. Messages say whose fault it is and what to do, and never contain
a payload.
"""

from typing import Any, ClassVar


class Error(Exception):
    """The root of all errors of Everstep."""

    code: ClassVar[str] = "everstep.error"


class Misuse(Error):
    """The caller's mistake."""

    code: ClassVar[str] = "everstep.misuse"


class OutsideInWorkflow(Misuse):
    """A workflow body touched the outside world. Workflow code is replayed, so this belongs in a step."""

    code: ClassVar[str] = "everstep.workflow.outside"


class NotEncodable(Misuse):
    """A value cannot be stored so that it comes back as itself. `path` names the offending part."""

    code: ClassVar[str] = "everstep.codec.not_encodable"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class WrongType(Misuse):
    """What was to be sent to a run is not of the type that its code declares. Nothing was sent, or started.

    The message names the type and the path of each wrong part, such as `$.lines[0].count`; `why` is that part of it.
    """

    code: ClassVar[str] = "everstep.wrong_type"

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message, why)
        self.why = why

    def __str__(self) -> str:
        return str(self.args[0])


class NotDecodable(Error):
    """Stored bytes do not decode as the type that the code expects now."""

    code: ClassVar[str] = "everstep.codec.not_decodable"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class UnknownWorkflow(Misuse):
    """The run's workflow is not declared in this process."""

    code: ClassVar[str] = "everstep.workflow.unknown"


class UnknownRun(Misuse):
    """There is no run with this id in the store."""

    code: ClassVar[str] = "everstep.run.unknown"


class BeingDeleted(UnknownRun):
    """The run has ended and is being deleted, because it was old enough: what is left of it is not whole."""

    code: ClassVar[str] = "everstep.run.being_deleted"


class UnknownSchedule(Misuse):
    """There is no schedule of this name in the store."""

    code: ClassVar[str] = "everstep.schedule.unknown"


class UnknownQueue(Misuse):
    """A queue or limit with this name was never configured, and no run is in it."""

    code: ClassVar[str] = "everstep.queue.unknown"


class IdConflict(Misuse):
    """The id belongs to another run: of another workflow, or with other arguments."""

    code: ClassVar[str] = "everstep.run.id_conflict"


class KeyConflict(Misuse):
    """The key belongs to another action: another step, or the same one with other arguments.

    `key` is the key, `run` the run that has it.
    """

    code: ClassVar[str] = "everstep.step.key_conflict"

    def __init__(self, message: str, key: str = "", run: str = "") -> None:
        super().__init__(message, key, run)
        self.key = key
        self.run = run

    def __str__(self) -> str:
        return str(self.args[0])


class RunEnded(Error):
    """The run has ended, so what was asked of it cannot be done. `status` says how it ended."""

    code: ClassVar[str] = "everstep.run.ended"

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class RunActive(Error):
    """The run has not ended, so it cannot be restarted or retried."""

    code: ClassVar[str] = "everstep.run.active"


class WorkerAlive(Error):
    """A worker that was to be declared gone has given a sign of life, or its process is seen to exist."""

    code: ClassVar[str] = "everstep.worker.alive"


class WorkerGone(Error):
    """A person or a program declared this worker, or its host, gone. It writes and begins nothing more.

    Stop its process.
    """

    code: ClassVar[str] = "everstep.worker.gone"


class ThreadActive(Error):
    """Another call runs this thread of an agent framework, here or in another process. `owner` names its worker."""

    code: ClassVar[str] = "everstep.thread.active"

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class CrossesOnce(Error):
    """A retry or a fork would go back over effects that have happened. `crossed` names them: run, step, event."""

    code: ClassVar[str] = "everstep.run.crosses_once"

    def __init__(self, message: str, crossed: Any = ()) -> None:
        super().__init__(message)
        self.crossed = list(crossed)


class RunFailed(Error):
    """The run failed. The message names the original error's type and text."""

    code: ClassVar[str] = "everstep.run.failed"


class RunCancelled(Error):
    """The run was cancelled."""

    code: ClassVar[str] = "everstep.run.cancelled"


class RunTimedOut(Error):
    """The run took longer than its timeout."""

    code: ClassVar[str] = "everstep.run.timed_out"


class RunHeld(Error):
    """The run waits for a person. `hold` is the hold's id, `reason` why; resolve it and ask again."""

    code: ClassVar[str] = "everstep.run.held"

    def __init__(self, message: str, hold: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.hold = hold
        self.reason = reason


class StreamLimit(Error):
    """An entry of a stream is too large, or a stream has too many entries, or a run has too many streams."""

    code: ClassVar[str] = "everstep.stream.limit"


class NoAnswer(Error, TimeoutError):
    """The run has not answered a request within `timeout=`. It keeps the request: ask again with its `id`."""

    code: ClassVar[str] = "everstep.request.unanswered"

    def __init__(self, message: str, id: str = "") -> None:
        super().__init__(message)
        self.id = id


class RequestRefused(Error):
    """The run refused a request (`request.refuse(reason)`), or its value is not of the type that the run asks for."""

    code: ClassVar[str] = "everstep.request.refused"


class StepError(Error):
    """A step failed with an exception that cannot be restored as itself: `type` is its name, `message` its text.

    It comes back as itself if its class is in a module that the step or the workflow has imported, in `raises=`, or
    registered with `everstep.register`. `remedy` says which is missing.
    """

    code: ClassVar[str] = "everstep.step.failed"

    def __init__(self, type: str = "", message: str = "", remedy: str = "") -> None:
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.type}: {self.message}" if self.message else self.type
        return f"{text} ({self.remedy})" if self.remedy else text


class StepTimedOut(Error, TimeoutError):
    """An attempt at a step took longer than its `timeout=`."""

    code: ClassVar[str] = "everstep.step.timed_out"


class NotDone(Error):
    """Raise it in a step when its effect certainly did not happen, so that another attempt is safe."""

    code: ClassVar[str] = "everstep.step.not_done"


class Fatal(Error):
    """Raise it in a step when it certainly failed and another attempt is useless."""

    code: ClassVar[str] = "everstep.step.fatal"


class DatabaseFailed(Error):
    """The database of an atomic step could not be used, or refused the COMMIT. The message says what was written."""

    code: ClassVar[str] = "everstep.database.failed"


class FileChanged(Error):
    """A file is not as a file effect expects it, so it was left alone. `path` names it."""

    code: ClassVar[str] = "everstep.files.changed"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class FolderBusy(Error):
    """Another process has held the lock of a file effect's folder for too long. Nothing was changed."""

    code: ClassVar[str] = "everstep.files.busy"


class Drift(Error):
    """The outside is not as the run remembers it (`on_drift="fail"`). `subject` names what has changed."""

    code: ClassVar[str] = "everstep.run.drift"

    def __init__(self, message: str, subject: str = "") -> None:
        super().__init__(message, subject)
        self.subject = subject

    def __str__(self) -> str:
        return str(self.args[0])


class NotGenuine(Error):
    """A request to the receiver of a webhook is not signed with its secret, or is too old: do not believe it."""

    code: ClassVar[str] = "everstep.webhook.not_genuine"


class GraphStuck(Error):
    """A graph cannot continue: no edge holds, a node was reached too often, or two nodes changed one field at once."""

    code: ClassVar[str] = "everstep.graph.stuck"


class BudgetExceeded(Error):
    """The run's budget has no room for a step (`then="fail"`), so its body was not started.

    `over` names what has run out (`usd`, `tokens`, `steps` or `seconds`), `limit` how much there was.
    """

    code: ClassVar[str] = "everstep.run.budget"

    def __init__(self, message: str, over: str = "", limit: float = 0) -> None:
        super().__init__(message, over, limit)
        self.over = over
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])


class HoldConflict(Misuse):
    """A hold is unknown, already resolved, ambiguous, or cannot be resolved in this way."""

    code: ClassVar[str] = "everstep.hold.conflict"


class ApprovalConflict(Misuse):
    """An approval is unknown, answered already, expired, about other arguments, or one of several that may be meant."""

    code: ClassVar[str] = "everstep.approval.conflict"


class Refused(Error):
    """A person refused the approval of a call, so the call was not made."""

    code: ClassVar[str] = "everstep.approval.refused"


class CompensationBegun(Misuse):
    """What the run did is being undone, or has been, so it cannot be retried, nor rolled back once more."""

    code: ClassVar[str] = "everstep.run.compensation_begun"


class Uncompensated(Misuse):
    """A rollback would leave effects that must not happen twice and have no compensation. `steps` names them."""

    code: ClassVar[str] = "everstep.run.uncompensated"

    def __init__(self, message: str, steps: list[str] | None = None) -> None:
        super().__init__(message)
        self.steps = steps or []


class StoreError(Error):
    """The base of errors about the database and what is stored in it."""

    code: ClassVar[str] = "everstep.store"
    pauses: ClassVar[bool] = False
    """Whether a commit that raises it has written nothing, so that its runs wait and it is tried again."""


class StoreFull(StoreError):
    """There is no room on the disk. Runs pause, and resume by themselves when there is room."""

    code: ClassVar[str] = "everstep.store.full"
    pauses = True


class StoreBusy(StoreError):
    """The database did not take a write, for a reason that says nothing about the data. The write is retried."""

    code: ClassVar[str] = "everstep.store.busy"
    pauses = True


class StoreUnreachable(StoreError):
    """The server cannot be reached, or takes no connections yet. Nothing is wrong with the operation: retry it."""

    code: ClassVar[str] = "everstep.store.unreachable"


class StoreReadOnly(StoreError):
    """The store's file or folder cannot be written, or the role lacks the right. Runs pause until it can."""

    code: ClassVar[str] = "everstep.store.read_only"
    pauses = True


class StoreUnusable(StoreError):
    """The file is not a store, or a newer release made it, or it is on a file system that SQLite cannot trust."""

    code: ClassVar[str] = "everstep.store.unusable"
    pauses = True


class StoreFailed(StoreError):
    """A write failed in a way after which nothing may be assumed, so this process stops writing."""

    code: ClassVar[str] = "everstep.store.failed"


class StoreMoved(StoreFailed):
    """The store's file, `-wal` or `-shm` was moved, removed or replaced while it was open: nothing is acknowledged.

    What this process writes would not be found at the store's path. Stop it, put the files back (the store and its
    `-wal` together), and start again.
    """

    code: ClassVar[str] = "everstep.store.moved"


class NotReadable(StoreError):
    """A history is sound, and this process cannot read it. Nothing was changed: the run is left for one that can."""

    code: ClassVar[str] = "everstep.run.not_readable"


class NewerHistory(NotReadable):
    """A history has an event of a kind that this release does not know.

    Nothing was changed: the run is left for a worker of the newer release that wrote it.
    """

    code: ClassVar[str] = "everstep.run.newer"


class ChainKeyMissing(NotReadable):
    """A history was made with a chain key that this process does not have, or without one although it has one.

    Nothing was changed: the run is left for a process that has the key.
    """

    code: ClassVar[str] = "everstep.run.chain_key"


class SecretsLeftOut(NotReadable):
    """A run was exported without the secrets in its history (`secrets=True` and `--with-secrets` leave it in).

    It can be looked at. It cannot be retried, forked, rolled back or repaired: that needs what is missing. Nothing was
    changed.
    """

    code: ClassVar[str] = "everstep.run.secrets_left_out"


class Damaged(StoreError):
    """A history does not match its digests. `last_good` is the number of the last event that does."""

    code: ClassVar[str] = "everstep.run.damaged"

    def __init__(self, message: str, last_good: int = 0) -> None:
        super().__init__(message)
        self.last_good = last_good


class Evicted(BaseException):
    """Unwinds workflow code that leaves memory. It is not a failure: the run resumes later, from its history."""

    code: ClassVar[str] = "everstep.evicted"


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error as facts for `--json`: code, type, message."""
    return {"code": getattr(error, "code", ""), "type": type(error).__name__, "message": str(error)}
