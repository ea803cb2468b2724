"""Committing: one durable transaction for a batch, and what to do when it fails.

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
from typing import Any

import apsw

from everstep.errors import Damaged, Misuse, StoreError, StoreFailed
from everstep.model.crash_points import crash_point, unarmed
from everstep.stores.brief import Busy, refuse_when_brief
from everstep.stores.protocol import Failed, Operation, Verdict
from everstep.stores.sql.reading_back import is_there
from everstep.stores.sql.rows import Row
from everstep.stores.sqlite.connections import Identity, Patience, is_no_room, translated
from everstep.stores.sqlite.queries import query
from everstep.stores.sqlite.transaction import Transaction


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
    def commit(self, operations: Sequence[Operation], *, patient: bool) -> list[Verdict]:
        """Do a batch. See `Store.commit`."""
        if not operations:
            return []
        if not patient and self._identity.is_left_to_a_thread():
            raise Busy
        if not self._lock.acquire(blocking=patient):
            raise Busy
        try:
            done, verdicts = self._attempt(operations, patient)
            if not done:
                verdicts = self._commit_singly(operations)
            if (patient or self._identity.is_left) and (trouble := self._identity.look()) is not None:
                self._failure = trouble
                raise trouble
            return verdicts
        finally:
            self._lock.release()

    def refuse_if_moved(self, *, now: bool = False) -> None:
        """Raise `StoreMoved` if the path no longer leads to the open file: then nothing is acknowledged."""
        if (trouble := self._identity.look(now=now)) is not None:
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
