"""Changes of threads, each as one statement: what a framework saves with each step of an agent."""

from collections.abc import Sequence
from typing import Any, Final

from everstep.stores.postgres.direct import done_together, rows_of
from everstep.stores.postgres.transaction import PostgresStatements
from everstep.stores.protocol import Operation, Refused, Verdict
from everstep.stores.rows.saved import ChangeThread
from everstep.stores.sql.operations import ACCEPTED

PART_WIDTH: Final = 6
STATE_WIDTH: Final = 7
WRITE_WIDTH: Final = 8


def only_add(operations: Sequence[Operation]) -> bool:
    """Return True if all operations are changes of threads that only add."""
    return all(
        type(one) is ChangeThread and not (one.everything or one.rewrites or one.forgotten or one.unneeded)
        for one in operations
    )


def do_changes(statements: PostgresStatements, changes: Sequence[Any]) -> list[Verdict]:
    """Apply such changes in one transaction and one round trip. If a part exists already, nothing is done: an error."""
    change = statements.change_thread
    results = done_together(statements.connection, [(change, _values(one)) for one in changes])
    reasons = [rows_of(result, "t")[0][0] for result in results]
    return [ACCEPTED if why is None else Refused(why) for why in reasons]


def _values(change: ChangeThread) -> list[Any]:
    return [
        change.thread,
        change.worker,
        change.epoch,
        *_columns(change.parts, PART_WIDTH),
        *_columns(change.states, STATE_WIDTH),
        *_columns(change.writes, WRITE_WIDTH),
    ]


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
