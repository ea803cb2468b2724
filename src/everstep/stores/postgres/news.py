"""Which operations other processes are notified of: a run that needs a driver, a delivery, an end, something to read.

The common append, a step of a run that continues here, is not announced, so that a busy worker does not wake all the
others.
"""

from everstep.model.status import ENDED
from everstep.stores.protocol import (
    Append,
    Claim,
    Failed,
    MarkRestored,
    NotPosted,
    Operation,
    Refused,
    Release,
    RepairRun,
    RestartRun,
    StartRun,
    Verdict,
)
from everstep.stores.rows.keys import ForgetKeys
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import TakeSlot
from everstep.stores.rows.saved import ChangeItems, ChangeThread, FreeThread, TakeThread
from everstep.stores.rows.transfer import ClaimFamily, DeletePart, ImportRuns


def is_news(operation: Operation, verdict: Verdict) -> bool:
    """Return True if other processes should look."""
    if isinstance(verdict, Refused | Failed | NotPosted):
        return False
    match operation:
        case Append():
            return _is_news_of_run(operation)
        case StartRun():
            return operation.new.row.owner is None
        case Claim() | ForgetKeys() | ClaimFamily() | DeletePart():
            return False
        case TakeNotification() | SettleNotification() | TakeSlot():
            return False
        case ChangeThread() | TakeThread() | FreeThread() | ChangeItems():
            return False
    return True


def _is_news_of_run(append: Append) -> bool:
    row = append.row
    if row.status in ENDED or row.status == "held" or append.release or append.keys is not None:
        return True
    if append.starts or append.posts or append.hold is not None or append.renewal is not None:
        return True
    return append.beside is not None or row.published is not None


def puts_back(operation: Operation) -> bool:
    """Return True if an operation may free runs that come before others which wait: then looks begin at the front."""
    match operation:
        case Append():
            return operation.redeliver or (operation.release and operation.row.status in ("queued", "running"))
        case StartRun():
            row = operation.new.row
            return row.owner is None and row.created_at < row.updated_at
        case Release() | RestartRun() | RepairRun() | ImportRuns() | MarkRestored():
            return True
    return False
