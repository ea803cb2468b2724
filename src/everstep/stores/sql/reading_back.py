"""Reading back after an unknown commit: what an operation has written that no other operation could have written."""

from collections.abc import Callable
from typing import Any

from everstep.stores.protocol import (
    Accepted,
    Append,
    Claim,
    Claimed,
    MarkRestored,
    Operation,
    Post,
    Posted,
    Release,
    RepairRun,
    RestartRun,
    StartRun,
    Verdict,
)
from everstep.stores.rows.keys import ForgetKeys, SettleKey
from everstep.stores.rows.notifications import SettleNotification, TakeNotification
from everstep.stores.rows.queues import ChangeQueue, FreeSlot, TakeSlot
from everstep.stores.rows.schedules import ChangeSchedule
from everstep.stores.rows.transfer import ClaimFamily, DeletePart, ImportRuns

RowOf = Callable[..., tuple[Any, ...]]
"""Returns the first row of a named statement, or an empty tuple."""


def is_there(row_of: RowOf, operation: Operation, verdict: Verdict) -> bool:
    """Return True if a transaction with this operation was committed, as far as this operation can tell."""
    match operation, verdict:
        case Append(events=[*_, last]), Accepted():
            return row_of("event_digest", operation.run, operation.generation, last.seq) == (last.digest,)
        case Append(), _:
            return False
        case Post(), Posted(duplicate=False):
            wanted = (operation.run, operation.kind, operation.name, operation.id, operation.value, operation.at)
            return row_of("delivery_at", verdict.number) == wanted
        case Claim(), Claimed():
            return row_of("lease_of_run", operation.run) == (verdict.row.epoch, operation.worker)
        case ClaimFamily(epochs=epochs), Accepted():
            return all(row_of("lease_of_run", run) == (epoch + 1, operation.worker) for run, epoch in epochs.items())
        case SettleKey(), Accepted():
            row = row_of("effect", operation.key)
            return bool(row) and (row[11], row[12], row[13]) == (operation.at, operation.by, operation.note)
        case RepairRun(), Accepted():
            return row_of("archived_at", operation.row.id, operation.at) != (0,)
        case MarkRestored(), Accepted():
            return row_of("restores") == (operation.expected + 1,)
        case TakeNotification(), Accepted():
            claim = row_of("notification_claim", operation.id)
            return claim == (operation.attempt, operation.worker, operation.until)
        case ChangeSchedule(row=row), Accepted() if row is not None:
            return row_of("schedule_revision", operation.name) == (row.revision,)
        case ChangeSchedule(), _:
            return False
        case ((Post() | Claim() | Release() | SettleKey() | ForgetKeys() | RepairRun() | MarkRestored()), _):
            return False
        case ImportRuns(dumps=[first, *_]), Accepted():
            return row_of("run_head", first.row.id) != ()
        case ((TakeNotification() | SettleNotification() | ImportRuns() | ClaimFamily() | DeletePart()), _):
            return False
        case ((ChangeQueue() | TakeSlot() | FreeSlot()), _):  # repeated, they change nothing except a token
            return False
        case ((StartRun() | RestartRun()), Accepted()):
            new, event = operation.new.row, operation.new.event
            return row_of("event_digest", new.id, new.generation, event.seq) == (event.digest,)
    return False  # repeated, what frameworks save changes nothing
