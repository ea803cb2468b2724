"""Operations inside an open transaction.

`Operations.one` does an operation by itself and is the specification. `Transaction.together` does the same for a batch
of one or many with a handful of statements, provided that all of it is accepted, which is the rule; otherwise the
caller rolls back and does the operations one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import apsw

from everstep.model.status import Status
from everstep.stores.protocol import Append, Operation, RunRow, StartRun, Verdict, child_value
from everstep.stores.sql.batch import Batch, has_more
from everstep.stores.sql.operations import ACCEPTED, Operations
from everstep.stores.sql.rows import (
    Row,
    as_json,
    change_values,
    head_values,
    run_values,
    stays,
)
from everstep.stores.sqlite.queries import ROWS_MAX, Texts, for_rows

HEAD_WIDTH: Final = 10
CHANGE_WIDTH: Final = 16
EVENT_WIDTH: Final = 8
TEXTS: Final = Texts("queries.sql", "queues.sql", "moving.sql", "saved.sql")
WITH_KEYS: Final = 2
"""The value of `entangled` for a run whose steps have keys."""


class SqliteStatements:
    """The statements of queries.sql and the other .sql files, on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()
        self._texts = TEXTS

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
        self.cursor.executemany(self._texts[name], rows)

    def insert(self, name: str, width: int, rows: Sequence[Row]) -> int:
        """Insert rows and return how many were new."""
        return self.write_flat(name, width, list(chain.from_iterable(rows))) if rows else 0

    def write_flat(self, name: str, width: int, values: Sequence[Any]) -> int:
        """Do a statement for rows of parameters in one flat list. Returns how many rows it changed."""
        rows = len(values) // width
        if rows in (1, 2):
            self.cursor.execute(for_rows(name, rows), values)
            return self.connection.changes()
        changed = done = 0
        while done < rows:
            # For 1, 2, 4, 8, 16 or 32 rows: so there are few statements, all of them prepared once and kept by APSW.
            count = min(ROWS_MAX, 1 << ((rows - done).bit_length() - 1))
            self.cursor.execute(for_rows(name, count), values[done * width : (done + count) * width])
            changed += self.connection.changes()
            done += count
        return changed

    def replace_run(self, row: RunRow) -> None:
        """Replace a run's row. (Triggers update its tags.)"""
        self.run("restart_run", *run_values(row))

    def lock_keys(self, keys: Sequence[str]) -> None:
        """Do nothing, because one transaction writes at a time."""

    def texts(self, values: Sequence[str]) -> str:
        """Return a JSON array."""
        return as_json(values)

    def numbers(self, values: Sequence[int]) -> str:
        """Return a JSON array."""
        return as_json(values)

    def statuses(self, values: Sequence[Status]) -> Sequence[Any]:
        """Return seven parameters, one for each possible status."""
        return [*dict.fromkeys(values), *[None] * 7][:7]


class Transaction(Operations):
    """A connection's operations within a transaction, which the caller begins and ends."""

    _statements: SqliteStatements

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        super().__init__(SqliteStatements(connection))

    # -- a whole batch --------------------------------------------------------------------------------------------
    def together(self, operations: Sequence[Operation]) -> list[Verdict] | None:
        """Do a batch with few statements, or return None if some operation would be refused; the caller then rolls
        back.
        """
        batch = Batch(operations)
        if batch.has_keys and self._keys.concern_others(operations):
            return [self.one(operation) for operation in operations]
        if batch.ends:
            entangled = self._all("entangled", as_json(batch.ends))
            if any(kind == WITH_KEYS for _, kind in entangled):
                return [self.one(operation) for operation in operations]
            batch.set_apart({run for run, _ in entangled}, {run for run, is_followed in entangled if not is_followed})
        if batch.starts and not self._begin_runs(batch.starts):
            return None
        if batch.appends and not self._move(batch.appends):
            return None
        if batch.followed:
            self._tell_followers(batch.followed)
        verdicts: list[Verdict] = [ACCEPTED] * len(operations)
        for place, operation in batch.others:
            verdicts[place] = self.one(operation)
        return verdicts

    def _begin_runs(self, starts: Sequence[StartRun]) -> bool:
        """Create runs with their histories; False if not all of them are new."""
        if self._insert("create_runs", 25, [run_values(start.new.row) for start in starts]) != len(starts):
            return False
        self._begin_histories([start.new for start in starts])
        return True

    def _move(self, appends: Sequence[Append]) -> bool:
        """Move heads and append events with their attachments; False if not all runs were as expected."""
        heads: list[Any] = []
        changes: list[Any] = []
        events: list[Any] = []
        more: list[Append] = []
        for append in appends:
            if append.plain or stays(append):
                heads += head_values(append)
            else:
                changes += change_values(append)
            whose = append.run, append.generation
            for event in append.events:
                events += whose + event
            if not append.plain and has_more(append):
                more.append(append)
        moved, write = 0, self._statements.write_flat
        if heads:
            moved = write("move_head" if len(heads) == HEAD_WIDTH else "move_heads", HEAD_WIDTH, heads)
        if changes:
            moved += write("change_row" if len(changes) == CHANGE_WIDTH else "change_rows", CHANGE_WIDTH, changes)
        if moved != len(appends):
            return False
        if events:
            write("append_events", EVENT_WIDTH, events)
        if more:
            self._keep_more(more)
        return True

    def _tell_followers(self, ends: Sequence[Append]) -> None:
        told = [
            (place, append.run, child_value(append.row.status, append.row.outcome, append.row.budget), append.row.at)
            for place, append in enumerate(ends)
        ]
        self._insert("tell_followers", 4, told)
        self._run("forget_followers", as_json([append.run for append in ends]))
