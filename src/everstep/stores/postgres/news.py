"""What other processes should hear of: a run that wants a driver, a delivery, an end, something to read.

The common append, a step of a run that goes on here, is no news, so that a busy worker does not wake all the others.
"""

from everstep.model.status import ENDED
from everstep.stores.keys import ForgetKeys
from everstep.stores.moving import DeletePart
from everstep.stores.notifications import SettleNotification, TakeNotification
from everstep.stores.protocol import Append, Claim, Failed, NotPosted, Operation, Refused, StartRun, Verdict
from everstep.stores.queues import TakeSlot
from everstep.stores.saved import ChangeItems, ChangeThread, FreeThread, TakeThread


def is_news(operation: Operation, verdict: Verdict) -> bool:
    """Tell whether others should look."""
    if isinstance(verdict, Refused | Failed | NotPosted):
        return False
    match operation:
        case Append():
            return _is_news_of_run(operation)
        case StartRun():
            return operation.new.row.owner is None
        case Claim() | ForgetKeys() | DeletePart() | TakeNotification() | SettleNotification() | TakeSlot():
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
