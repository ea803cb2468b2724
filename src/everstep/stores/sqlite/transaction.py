"""Operations, done inside an open transaction.

`Operations.one` does an operation by itself and is the specification. `Transaction.together` does the same for a whole
batch with a handful of statements, provided that all of it is accepted, which is the rule; if it is not, the caller
rolls back and does the operations one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import apsw

from everstep.model.status import ENDED, Status
from everstep.stores.protocol import Append, NewRun, Operation, RunRow, Verdict, child_value
from everstep.stores.sql.batch import Batch, is_simple, keeps_running
from everstep.stores.sql.operations import ACCEPTED, Operations
from everstep.stores.sql.rows import Row, as_json, change_values, head_values, run_values, tag_values
from everstep.stores.sqlite.queries import batches, query, statements

WITH_KEYS: Final = 2
"""What `entangled` says of a run whose steps have keys."""
JOIN_ROWS_MIN = 4
"""Joining `runs` with a list of rows costs as much as this many plain updates."""


class SqliteStatements:
    """The statements of queries.sql and moving.sql, on one connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.cursor = connection.cursor()
        self._texts = {**statements("queries.sql"), **statements("moving.sql")}

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
        return self.insert_flat(name, width, list(chain.from_iterable(rows))) if rows else 0

    def insert_flat(self, name: str, width: int, values: Sequence[Any]) -> int:
        """Insert rows that stand one behind the other, and return how many were new."""
        inserted = 0
        for sql, parameters in batches(name, width, values):
            self.cursor.execute(sql, parameters)
            inserted += self.connection.changes()
        return inserted

    def replace_run(self, row: RunRow) -> None:
        """Put another row in the place of a run's. (Triggers keep its tags.)"""
        self.run("restart_run", *run_values(row))

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
        super().__init__(SqliteStatements(connection))

    # -- a whole batch --------------------------------------------------------------------------------------------
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
        heads: list[Append] = []
        changes: list[Append] = []
        for append in batch.appends:
            (heads if keeps_running(append) else changes).append(append)
        found = self._update("move_head", "move_heads", [head_values(append) for append in heads])
        if found != len(heads):
            # Some were not `running` before. Those that moved just now no longer have the expected head.
            changes += heads
        rows = [change_values(append, append.row.status in ENDED) for append in changes]
        found += self._update("change_row", "change_rows", rows)
        if found != len(batch.appends):
            return False
        self._append_events(batch.appends, [start.new for start in batch.starts])
        for append in batch.appends:
            if append.consumed:
                self._consume(append)
        if batch.followed:
            told = [
                (place, a.run, child_value(a.row.status, a.row.outcome, a.row.budget), a.row.at)
                for place, a in enumerate(batch.followed)
            ]
            self._insert("tell_followers", 4, told)
            self._run("forget_followers", as_json([append.run for append in batch.followed]))
        return True

    # -- parts ------------------------------------------------------------------------------------------------------
    def _append_alone(self, append: Append, ended: bool) -> bool:
        if not is_simple(append) or (ended and self._all("entangled", as_json([append.run]))):
            return False
        found = self._update("move_head", "move_heads", [head_values(append)]) if keeps_running(append) else 0
        found = found or self._update("change_row", "change_rows", [change_values(append, ended)])
        if found:
            self._append_events([append], [])
            self._consume(append)
        return bool(found)

    def _insert_history(self, appends: Sequence[Append], news: Sequence[NewRun]) -> None:
        events: list[Any] = []
        payloads: list[Row] = []
        tags: list[Row] = []
        for a in appends:
            run, generation = a.run, a.generation
            for event in a.events:
                events += (run, generation, *event)
            if a.payloads:
                payloads += [(run, digest, value) for digest, value in a.payloads]
        for new in news:
            for event in (new.event, *new.more):
                events += (new.row.id, new.row.generation, *event)
            payloads += [(new.row.id, digest, value) for digest, value in new.payloads]
            if new.row.tags:
                tags += tag_values(new.row)
            if new.entries:
                self._insert("keep_entries", 12, new.entries)
        self._statements.insert_flat("append_events", 8, events)
        self._insert("keep_payloads", 3, payloads)
        self._insert("keep_tags", 4, tags)

    def _update(self, one: str, many: str, rows: Sequence[Row]) -> int:
        """Update a row of `runs` for each row of parameters, and return how many were as expected."""
        found = 0
        if len(rows) < JOIN_ROWS_MIN:
            for row in rows:
                self._cursor.execute(query(one), row)
                found += self._connection.changes()
            return found
        for sql, parameters in batches(many, len(rows[0]), list(chain.from_iterable(rows))):
            self._cursor.execute(sql, parameters)
            found += self._connection.changes()
        return found
