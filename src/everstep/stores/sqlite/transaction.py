"""Operations, done inside an open transaction.

`Operations.one` does an operation by itself and is the specification. `Transaction.together` does the same for a whole
batch with a handful of statements, provided that all of it is accepted, which is the rule; if it is not, the caller
rolls back and does the operations one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import apsw

from everstep.model.status import Status
from everstep.stores.protocol import Append, Operation, RunRow, StartRun, Verdict, check_events, child_value
from everstep.stores.sql.batch import Batch, is_bare, is_move
from everstep.stores.sql.operations import ACCEPTED, Operations
from everstep.stores.sql.rows import (
    Row,
    as_json,
    change_values,
    head_values,
    move_values,
    run_values,
    stays,
)
from everstep.stores.sqlite.queries import LENGTHS, Texts, batches, filled_up

MOVE_WIDTH: Final = 28
START_WIDTH: Final = 31
TRIED_AGAIN_AFTER: Final = 32
"""Ends of runs that others follow, and starts of runs that exist, tend to come in a row, and what has to be done again
costs twice."""
WITH_KEYS: Final = 2
"""What `entangled` says of a run whose steps have keys."""


class SqliteStatements:
    """The statements of queries.sql and the files beside it, on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()
        self._texts = Texts("queries.sql", "queues.sql", "moving.sql", "saved.sql")

    def all(self, name: str, *parameters: Any) -> list[Row]:
        """Do a statement and return its rows."""
        rows: list[Row] = self.cursor.execute(self._texts[name], parameters).fetchall()
        return rows

    def run(self, name: str, *parameters: Any) -> int:
        """Do a statement and return how many rows it has changed."""
        self.cursor.execute(self._texts[name], parameters)
        return self.connection.changes()

    def many(self, name: str, rows: Sequence[Row]) -> None:
        """Do a statement once for each row of parameters."""
        self.cursor.executemany(self._texts[name], [tuple(row) for row in rows])

    def insert(self, name: str, width: int, rows: Sequence[Row]) -> int:
        """Insert rows and return how many were new."""
        return self.write_flat(name, width, list(chain.from_iterable(rows))) if rows else 0

    def write_flat(self, name: str, width: int, values: Sequence[Any]) -> int:
        """Do a statement for rows of parameters that stand one behind the other. Returns how many rows it changed."""
        changed = 0
        for sql, parameters in batches(name, width, values):
            self.cursor.execute(sql, parameters)
            changed += self.connection.changes()
        return changed

    def replace_run(self, row: RunRow) -> None:
        """Put another row in the place of a run's. (Triggers keep its tags.)"""
        self.run("restart_run", *run_values(row))

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Do nothing: one transaction writes at a time."""

    def texts(self, values: Sequence[str]) -> str:
        """Return a JSON array."""
        return as_json(values)

    def numbers(self, values: Sequence[int]) -> str:
        """Return a JSON array."""
        return as_json(values)

    def statuses(self, values: Sequence[Status]) -> Sequence[Any]:
        """Return seven parameters: there are no more statuses."""
        return [*dict.fromkeys(values), *[None] * 7][:7]


class Transaction(Operations):
    """What a connection does within a transaction. The caller begins and ends it."""

    _statements: SqliteStatements

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        self._not_tried = {"moves": 0, "starts": 0}
        """So many batches with more than plain moves are not tried at once: the last one was not as expected."""
        super().__init__(SqliteStatements(connection))

    # -- a whole batch --------------------------------------------------------------------------------------------
    def at_once(self, operations: Sequence[Operation]) -> bool:
        """Do a batch with one statement, which is a transaction by itself. If that cannot be, nothing was done."""
        if len(operations) > LENGTHS[-1]:
            return False
        if type(operations[0]) is StartRun:
            return self._start_at_once(operations)
        values: list[Any] = []
        runs: set[str] = set()
        is_plain = True
        for append in operations:
            if type(append) is not Append or not is_move(append):
                return False
            check_events(append)
            is_plain = is_plain and append.plain
            runs.add(append.run)
            values += move_values(append)
        if len(runs) < len(operations) or not (is_plain or len(runs) == 1 or self._is_worth_trying("moves")):
            return False
        return self._write_at_once("moves", MOVE_WIDTH, values)

    def _start_at_once(self, operations: Sequence[Operation]) -> bool:
        if not self._is_worth_trying("starts"):
            return False
        values: list[Any] = []
        for start in operations:
            if type(start) is not StartRun or start.needs is not None or not is_bare(start.new):
                return False
            check_events(start.new)
            values += run_values(start.new.row)
            values += start.new.event
        return self._write_at_once("starts", START_WIDTH, values)

    def _is_worth_trying(self, what: str) -> bool:
        """Whether a batch is tried that may be refused as a whole: then it has to be done again."""
        if not self._not_tried[what]:
            return True
        self._not_tried[what] -= 1
        return False

    def _write_at_once(self, what: str, width: int, values: list[Any]) -> bool:
        try:
            self._cursor.execute(*filled_up(what, width, values))
        except apsw.ConstraintError:
            self._not_tried[what] = TRIED_AGAIN_AFTER
            return False
        return True

    def together(self, operations: Sequence[Operation]) -> list[Verdict] | None:
        """Do a batch with few statements, or return None if some would be refused; then roll back."""
        batch = Batch(operations)
        if batch.has_keys and self._keys.concern_others(operations):
            return None
        if ends := batch.ending_runs():
            entangled = self._all("entangled", as_json(ends))
            if any(kind == WITH_KEYS for _, kind in entangled):
                return None
            batch.set_apart({run for run, _ in entangled}, {run for run, is_followed in entangled if not is_followed})
        if not self._write_simple(batch):
            return None
        verdicts: list[Verdict] = [ACCEPTED] * len(operations)
        for place, operation in batch.others:
            verdicts[place] = self.one(operation)
        return verdicts

    def _write_simple(self, batch: Batch) -> bool:
        """Write the simple operations of a batch; False if not all of them found their run as expected."""
        runs = [run_values(start.new.row) for start in batch.starts]
        if self._insert("create_runs", 25, runs) != len(runs):
            return False
        self._begin_histories([start.new for start in batch.starts])
        if not self._move(batch.appends):
            return False
        self._keep_more(batch.appends)
        if batch.followed:
            told = [
                (place, a.run, child_value(a.row.status, a.row.outcome, a.row.budget), a.row.at)
                for place, a in enumerate(batch.followed)
            ]
            self._insert("tell_followers", 4, told)
            self._run("forget_followers", as_json([append.run for append in batch.followed]))
        return True

    def _move(self, appends: Sequence[Append]) -> bool:
        """Move heads and append events; False if not all runs were as expected."""
        heads: list[Any] = []
        changes: list[Any] = []
        events: list[Any] = []
        for append in appends:
            if append.plain or stays(append):
                heads += head_values(append)
            else:
                changes += change_values(append)
            whose = append.run, append.generation
            for event in append.events:
                events += whose + event
        write = self._statements.write_flat
        if write("move_heads", 10, heads) + write("change_rows", 16, changes) != len(appends):
            return False
        write("append_events", 8, events)
        return True
