"""Committing: one durable transaction for a batch, how little is written for it, and what to do when it fails.

`Operations.one` does an operation by itself and is the specification. `Transaction.together` does the same for a batch
of one or many with a handful of statements, provided that all of it is accepted, which is the rule; otherwise the
writer rolls back and does the operations one by one.

A failed commit is an unknown commit. The transaction is atomic, so reading back one thing that it wrote tells whether
all of it was done: then the verdicts that were reached in it are returned. If it was not done, each operation is tried
in a transaction of its own, and one that fails again has the verdict `Failed`.

What is read back: for an `Append`, `StartRun` or `RestartRun` the digest of its last event; for a `Post` the row with
its number; for a `Claim` the epoch and owner; for a `SettleKey` its row; for a notification that was taken, its worker
and attempt. A `Release`, a `ForgetKeys`, an append without events and a settled notification write nothing that no
other operation could have written, so they tell nothing; repeating them changes nothing either: the epoch, the expected
head or the attempt guards the second try.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import monotonic
from typing import Any, Final

import apsw

from everstep.errors import Damaged, Misuse, StoreError, StoreFailed
from everstep.model.crash_points import crash_point, unarmed
from everstep.model.status import Status
from everstep.stores.brief import Busy, refuse_when_brief
from everstep.stores.protocol import Append, Failed, Operation, RunRow, StartRun, Verdict, check_events, child_value
from everstep.stores.sql.batch import Batch, has_more
from everstep.stores.sql.operations import ACCEPTED, Operations
from everstep.stores.sql.reading_back import is_there
from everstep.stores.sql.rows import Row, as_json, change_values, run_values, stays
from everstep.stores.sqlite.connections import Identity, Patience, is_no_room, translated
from everstep.stores.sqlite.queries import ROWS_MAX, Texts, for_rows, query

TEXTS: Final = Texts("queries.sql", "queues.sql", "moving.sql", "saved.sql")
HEAD_WIDTH: Final = 10
CHANGE_WIDTH: Final = 16
EVENT_WIDTH: Final = 8
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
        rows, texts = len(values) // width, for_rows(name)
        if rows in texts:
            self.cursor.execute(texts[rows], values)
            return self.connection.changes()
        changed = done = 0
        while done < rows:
            count = min(ROWS_MAX, 1 << ((rows - done).bit_length() - 1))
            self.cursor.execute(texts[count], values[done * width : (done + count) * width])
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
        """Do a batch with few statements, or return None if some would be refused; then roll back."""
        if len(operations) == 1 and type(only := operations[0]) is Append and only.plain:
            return [ACCEPTED] if self._move([only]) else None  # most batches of one: nothing is to be sorted
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
                row, first, last = append.row, append.events[0], append.events[-1]
                if first[0] != append.expected_seq + 1 or last[0] != append.expected_seq + len(append.events):
                    check_events(append)  # it raises, and says why
                heads += (append.run, append.generation, append.epoch, append.expected_seq, append.expected_digest)
                heads += (row.at, row.current_step, row.published, last[0], last[5])
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


class Writer:
    """The one connection of a store that writes. Any thread may use it, one at a time."""

    def __init__(
        self, connection: apsw.Connection, patience: Patience, path: str, identity: Identity, lock: threading.Lock
    ) -> None:
        self.connection = connection
        self._patience = patience
        self._path = path
        self._identity = identity
        self._cursor = connection.cursor()
        self._transaction = Transaction(connection)
        self._lock = lock
        self._failure: StoreFailed | None = None
        self._data_version = self._read_data_version()

    # -- batches ----------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, each accepted or refused by itself: see `Store.commit`."""
        if not operations:
            return []
        if not patient and monotonic() >= self._identity.look_at and self._identity.is_left_to_a_thread():
            raise Busy
        if not self._lock.acquire(blocking=patient):
            raise Busy
        try:
            done, verdicts = self._attempt(operations, patient)
            if not done:
                verdicts = self._commit_singly(operations)
            if monotonic() >= self._identity.look_at and (patient or self._identity.is_left):
                self.refuse_if_moved()
            return verdicts
        finally:
            self._lock.release()

    def refuse_if_moved(self, *, now: bool = False) -> None:
        """Raise `StoreMoved` if the path no longer leads to the open file: then nothing is acknowledged."""
        is_due = now or monotonic() >= self._identity.look_at
        if is_due and (trouble := self._identity.look()) is not None:
            self._failure = trouble
            raise trouble

    def _commit_singly(self, operations: Sequence[Operation]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        anything_done = False
        for operation in operations:
            try:
                done, verdict = self._attempt([operation], True)
                anything_done = anything_done or done
                verdicts += verdict
            except StoreFailed:
                raise
            except StoreError as error:
                # "Nothing was done" would be wrong for the batch, so the message is about this operation only.
                if not anything_done and operation is operations[-1]:
                    raise
                verdicts.append(Failed(error))
        return verdicts

    def _attempt(self, operations: Sequence[Operation], patient: bool) -> tuple[bool, list[Verdict]]:
        """Try a batch once. Returns whether it was done and the verdicts, which are failures if it was not.

        Raises what stops the whole store, or this batch: no room, read-only, locked, failed.
        """
        if crash_point is not unarmed:
            crash_point("store.commit.before")
        verdicts: list[Verdict] | None = None
        try:
            self._begin(patient)
            verdicts = self._transaction.together(operations)
            if verdicts is None:  # one of them is refused: doing them one by one finds out which, and why
                self._cursor.execute("ROLLBACK")
                self._begin(patient)
                verdicts = [self._transaction.one(operation) for operation in operations]
            if crash_point is not unarmed:
                crash_point("store.commit.written")
            self._end()
            if crash_point is not unarmed:
                crash_point("store.commit.after")
            return True, verdicts
        except Exception as error:  # noqa: BLE001 - every failure of a commit is an unknown commit
            return self._after_failure(operations, verdicts, error)
        except BaseException:
            self._roll_back()
            raise

    def _after_failure(
        self, operations: Sequence[Operation], verdicts: list[Verdict] | None, error: Exception
    ) -> tuple[bool, list[Verdict]]:
        """Find out what was done. The verdicts are those that were reached before the failure, if there are any."""
        trouble = self._trouble(error)
        self._roll_back()
        if isinstance(trouble, StoreFailed | Busy):
            # After a failed sync even what can be read back may not be on the disk.
            raise trouble from (error if trouble is not error else error.__cause__)
        if verdicts is not None and self._was_done(operations, verdicts):
            return True, verdicts
        if isinstance(trouble, StoreError):
            raise trouble from (error if trouble is not error else error.__cause__)
        return False, [Failed(self._as_damage(trouble))] * len(operations)

    # -- other transactions -------------------------------------------------------------------------------------------
    @contextmanager
    def transaction(self, name: str) -> Iterator[apsw.Cursor]:
        """Begin a separate transaction and commit it at the end of the block. `name` is that of its crash points."""
        if self._identity.has_files:
            refuse_when_brief()  # a commit waits for the disk, and for other processes
        with self._lock:
            crash_point(f"store.{name}.before")
            self._begin(True)
            try:
                yield self._cursor
                crash_point(f"store.{name}.written")
                self._end()
            except Exception as error:  # noqa: BLE001 - raised again, as what it means
                trouble = self._trouble(error)
                self._roll_back()
                raise trouble from (error if trouble is not error else None)
            except BaseException:
                self._roll_back()
                raise
            crash_point(f"store.{name}.after")
            self.refuse_if_moved()

    def changed(self) -> bool:
        """Return True if another connection has written since the last call.

        SQLite counts the writes of all connections except the one that asks, so the writing connection must ask. While
        it is busy the answer is left to the next call.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure
            self.refuse_if_moved()
            version = self._read_data_version()
            changed, self._data_version = version != self._data_version, version
            return changed
        except apsw.BusyError as error:
            refuse_when_brief()
            raise translated(error, self._path, writing=False) from error
        except apsw.Error as error:
            raise translated(error, self._path, writing=False) from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self.connection.close()

    # -- parts --------------------------------------------------------------------------------------------------------
    def _read_data_version(self) -> int:
        version: int = self._row("data_version")[0]
        return version

    def _begin(self, patient: bool) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure
        self._patience.is_patient = patient
        try:
            self._cursor.execute("BEGIN IMMEDIATE")
        except apsw.BusyError as error:
            raise (translated(error, self._path, writing=True) if patient else Busy()) from error
        except apsw.Error as error:
            self._roll_back()  # one that was interrupted may have begun all the same
            raise self._trouble(error) from error
        finally:
            self._patience.is_patient = True

    def _end(self) -> None:
        self._cursor.execute("COMMIT")

    def _roll_back(self) -> None:
        """Undo the transaction, unless SQLite has done so already."""
        try:
            if self.connection.in_transaction:
                self._cursor.execute("ROLLBACK")
        except (apsw.ConnectionClosedError, apsw.CursorClosedError):
            raise Misuse(f"The store {self._path} has been closed.") from None
        except apsw.Error as error:
            self._failure = StoreFailed(f"A transaction in {self._path} could not be rolled back ({error}).")
            raise self._failure from error

    def _trouble(self, error: Exception) -> Exception:
        """Return what a failure means, and remember it if no write may follow it."""
        if is_no_room(error, self.connection):
            error = apsw.FullError()
        trouble = translated(error, self._path, writing=True)
        if isinstance(trouble, StoreFailed):
            self._failure = trouble
        return trouble

    def _as_damage(self, error: Exception) -> Exception:
        """Return a broken rule of the tables as damage: nothing that this package writes breaks one, unless a row is
        damaged.
        """
        if not isinstance(error, apsw.ConstraintError):
            return error
        return Damaged(
            f"{self._path} has rows that should not be there, so nothing was written ({error}). "
            "`everstep verify --all` finds them."
        )

    def _was_done(self, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> bool:
        """Read back whether the transaction with these verdicts was committed."""
        try:
            return any(is_there(self._row, *both) for both in zip(operations, verdicts, strict=True))
        except apsw.Error as error:
            self._failure = StoreFailed(f"A write to {self._path} failed and could not be read back ({error}).")
            raise self._failure from error

    def _row(self, name: str, *parameters: Any) -> Row:
        rows: list[Row] = self._cursor.execute(query(name), parameters).fetchall()
        return rows[0] if rows else ()


class WritingStore:
    """A store whose operations go through a `Writer`."""

    _writer: Writer

    def commit(self, operations: Sequence[Operation], *, patient: bool = True) -> list[Verdict]:
        """Do all operations in one durable transaction, each accepted or refused by itself."""
        return self._writer.commit(operations, patient=patient)
