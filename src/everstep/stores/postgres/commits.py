"""Committing: one durable transaction for a batch, and what to do when it fails or the server goes away.

A batch of simple operations is one round trip, and commits with it. What concerns more than its own run is done
operation by operation, in a second transaction; so is a simple one that was not accepted, for then it is to be said
why. Each run's unit is whole either way, and nobody hears a verdict before both are durable.

A lost reply is an unknown commit. The connection is made anew, whatever the old session may still be doing is ended and
waited for, and then it is read back: for an `Append`, `StartRun` or `RestartRun` the digest of its last event, for a
`Post` the row with its number, for a `Claim` the epoch and owner, and so on. A transaction is atomic, so if one thing
is there, all of it is, and the verdicts stand that were reached within it. In the single round trip the verdicts are
lost with the reply: there each unit has its digest, and one that is not there is tried again, which its expected head
makes harmless. A `Release`, a `ForgetKeys`, an append without events and a settled notification write nothing that only
they could have written; doing them again changes nothing.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors

from everstep.errors import Damaged, Misuse, StoreError, StoreFull
from everstep.model.crash_points import crash_point
from everstep.model.status import ENDED
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import (
    Connection,
    Durability,
    Outage,
    Patience,
    close_quietly,
    connect,
    is_outage,
    translated,
)
from everstep.stores.postgres.heads import Heads
from everstep.stores.postgres.news import is_news
from everstep.stores.postgres.threads import do_changes, only_add
from everstep.stores.postgres.transaction import PostgresStatements, Transaction, UnitFails
from everstep.stores.protocol import (
    Accepted,
    Append,
    Busy,
    Claim,
    Claimed,
    Failed,
    Operation,
    Post,
    Refused,
    Release,
    StartRun,
    Verdict,
)
from everstep.stores.saved import ChangeThread
from everstep.stores.sql.batch import Batch, runs_mentioned
from everstep.stores.sql.reading_back import is_there

DEADLOCKS_MAX: Final = 20
"""So often in a row a transaction is tried again that was chosen to give way to another one."""

SLOW_SECONDS: Final = 0.9
"""After a commit that took longer it is asked whether its runs are still ours: the shortest lease is a second."""
WAIT_SECONDS: Final = 2.0
"""So long other transactions than commits wait for the connection."""


class Work:
    """A batch on its way: what is decided, and what may have been committed although nobody has heard so."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        self.verdicts: dict[int, Verdict] = {}
        self.is_doubtful = False
        """Whether units of it may have been written by a session that was lost."""
        self.reached: dict[int, Verdict] = {}
        """The verdicts of a transaction whose COMMIT was sent and not answered."""
        self.has_tried_simple = False

    def left(self) -> list[int]:
        """Return the places of what is not decided."""
        return [place for place in range(len(self.operations)) if place not in self.verdicts]


class Writer:
    """The one connection of a store that writes. Any thread may use it, one at a time."""

    def __init__(
        self,
        address: Address,
        connection: Connection,
        *,
        name: str,
        places: int,
        durability: Durability,
        patience: Patience,
        tell: Callable[[], None],
    ) -> None:
        self.patience = patience
        self._address = address
        self._name = name
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        self._durability: Durability = durability
        self._tell = tell
        self._connection: Connection | None = connection
        self._transaction = Transaction(address.schema, places, connection)
        self._statements: PostgresStatements = self._transaction._statements
        self._lock = threading.Lock()
        self._unfinished: Work | None = None
        self.heads = Heads()

    # -- batches ----------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool) -> list[Verdict]:
        """Do a batch. See `Store.commit`."""
        if not operations:
            return []
        began = time.monotonic()
        if not self._lock.acquire(blocking=patient):
            raise Busy
        try:
            work, compared = self._work_for(operations), self.heads.comparisons
            self._finish(work, patient)
            verdicts = [work.verdicts[place] for place in range(len(work.operations))]
            refused = self.heads.note(work.operations, verdicts)
            if refused or self.heads.comparisons != compared:
                verdicts = self._compared(work.operations, verdicts)
            if time.monotonic() - began > SLOW_SECONDS:
                verdicts = self._rechecked(work.operations, verdicts)
        finally:
            self._lock.release()
        if any(map(is_news, work.operations, verdicts)):
            self._tell()
        return verdicts

    def _compared(self, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Appends were refused, or some were accepted by a server that was replaced while the others were done.

        What was accepted and is lost by now is refused: nobody should act on it.
        """
        appends = {operation.run for operation in operations if isinstance(operation, Append)}
        try:
            lost = self.heads.compare(self._statements, sorted(appends))
        except psycopg.Error:
            self.heads.forget_server()
            self._drop()  # all are compared when there is a connection again
            lost = set()
        return [
            Refused("head") if isinstance(operation, Append) and operation.run in lost else verdict
            for operation, verdict in zip(operations, verdicts, strict=True)
        ]

    def _rechecked(self, operations: Sequence[Operation], verdicts: list[Verdict]) -> list[Verdict]:
        """Refuse appends to runs that others have claimed since: their reply was on its way for longer than a lease.

        They are in the history. But whoever hears that would begin the body of a step that is another worker's by now.
        """
        appends = {
            place: operation
            for place, operation in enumerate(operations)
            if isinstance(operation, Append) and not operation.release and operation.row.status not in ENDED
        }
        if not appends:
            return verdicts
        try:
            rows = self._statements.all("epochs", [append.run for append in appends.values()])
        except psycopg.Error:
            self._drop()
            return verdicts  # nobody knows; the next append is refused, if they are not ours
        epochs: dict[str, int] = dict(rows)
        return [
            Refused("fenced")
            if isinstance(verdict, Accepted)
            and place in appends
            and epochs.get(appends[place].run, 0) > appends[place].epoch
            else verdict
            for place, verdict in enumerate(verdicts)
        ]

    def _work_for(self, operations: Sequence[Operation]) -> Work:
        """Return the work that an impatient caller has left unfinished, if it is this one."""
        work, self._unfinished = self._unfinished, None
        if work is not None and list(map(id, work.operations)) == list(map(id, operations)):
            return work
        return Work(operations)

    def _finish(self, work: Work, patient: bool) -> None:
        """Decide about all operations of a batch, through any number of outages."""
        while True:
            try:
                self._connect(patient)
                if work.is_doubtful:
                    self._read_back(work)
                self._write(work)
            except Outage as outage:
                self._drop()
                if not patient:
                    # Whoever is not patient comes again, patiently, with the same operations.
                    self._unfinished = work
                    self.patience.note(outage)
                    raise Busy from outage
                self._wait(outage)
            else:
                return

    def _write(self, work: Work) -> None:
        if not work.has_tried_simple:
            self._write_changes(work)
            self._write_simple(work)
            work.has_tried_simple = True
        left = work.left()
        if left:
            # These may deliver to runs that were claimed before them: what the claims have read is older then.
            claims = {place: one.row for place, one in work.verdicts.items() if isinstance(one, Claimed)}
            work.verdicts |= {place: Claimed(row) for place, row in claims.items()}
        if left and not self._write_in_order(work, left):
            for place in left:
                self._write_in_order(work, [place])

    def _write_changes(self, work: Work) -> None:
        """Do changes of threads in one round trip. One that was done already, before an outage, is left undecided."""
        left = work.left()
        changes = [work.operations[place] for place in left]
        if not left or type(changes[0]) is not ChangeThread or not only_add(changes):
            return
        crash_point("store.commit.before")
        try:
            work.verdicts |= dict(zip(left, do_changes(self._statements, changes), strict=True))
        except psycopg.Error as error:
            self._raise_outage(error)
            self._roll_back()
            return  # each is tried by itself, and says what is wrong with it
        except Exception:  # noqa: BLE001 - a value that cannot be sent
            self._roll_back()
            return
        except BaseException:
            self._drop()  # an interruption: what the session does is unknown
            raise
        crash_point("store.commit.after")

    def _write_simple(self, work: Work) -> None:
        """Do what is simple in one round trip. What is not accepted is left undecided."""
        places = {id(work.operations[place]): place for place in work.left()}
        try:
            batch = Batch([work.operations[place] for place in places.values()])
        except Misuse:
            return  # a mistake of the engine: each is tried by itself, and only one of them fails
        starts = [start for start in batch.starts if not start.new.entries]
        appends = batch.appends if len(starts) == len(batch.starts) else _not_of(batch.appends, batch.starts, starts)
        if batch.has_keys:
            # Whether a run that ends has waited for a key, and is told of it, is decided by the order of the batch.
            appends = [append for append in appends if append.row.status not in ENDED]
        claims = _simple_claims(batch)
        if not starts and not appends and not claims:
            return
        crash_point("store.commit.before")
        together: list[Append | StartRun | Claim] = [*starts, *appends, *claims]
        try:
            work.is_doubtful = True
            verdicts = self._transaction.simple(appends, starts, claims)
            work.is_doubtful = False
        except psycopg.Error as error:
            self._raise_outage(error)
            work.is_doubtful = False
            self._roll_back()
            trouble = translated(error, self._address.shown)
            if isinstance(trouble, StoreFull):
                raise trouble from error
            return  # each is tried by itself, and says what is wrong with it
        except Exception:  # noqa: BLE001 - a value that cannot be sent
            work.is_doubtful = False
            self._roll_back()
            return
        except BaseException:
            self._drop()  # an interruption: what the session does is unknown
            raise
        for number, verdict in verdicts.items():
            work.verdicts[places[id(together[number])]] = verdict
        crash_point("store.commit.after")

    def _write_in_order(self, work: Work, places: Sequence[int]) -> bool:
        """Do operations in one transaction, in order; False if that failed and each should be tried by itself."""
        for _ in range(DEADLOCKS_MAX):
            try:
                work.verdicts |= self._transact(work, places)
            except (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable):
                self._roll_back()
                continue
            except psycopg.Error as error:
                self._raise_outage(error)
                self._roll_back()
                return self._fail(work, places, translated(error, self._address.shown), error)
            except Exception as error:  # noqa: BLE001 - a value that cannot be sent, or a mistake of the engine
                self._roll_back()
                return self._fail(work, places, error, error)
            except BaseException:
                self._roll_back()
                raise
            return True
        return self._fail(work, places, StoreError(f"{self._address.shown} is too busy."), None)

    def _fail(self, work: Work, places: Sequence[int], trouble: Exception, cause: Exception | None) -> bool:
        """Say what became of operations whose transaction was rolled back."""
        if isinstance(trouble, StoreError) and not isinstance(trouble, Damaged) and not work.verdicts:
            raise trouble from cause  # nothing was done
        if len(places) > 1:
            return False
        work.verdicts[places[0]] = Failed(trouble)
        return True

    def _transact(self, work: Work, places: Sequence[int]) -> dict[int, Verdict]:
        crash_point("store.commit.before")
        self._begin()
        if self._address.pooler:
            self._statements.all("lock_writer", self._key)
        operations = [work.operations[place] for place in places]
        self._transaction.prepare(operations)
        verdicts: dict[int, Verdict] = {}
        for place, operation in zip(places, operations, strict=True):
            try:
                verdicts[place] = self._transaction.one(operation)
            except UnitFails as failure:
                verdicts[place] = Failed(failure.error)
        crash_point("store.commit.written")
        work.reached, work.is_doubtful = verdicts, True
        self._end()
        work.reached, work.is_doubtful = {}, False
        crash_point("store.commit.after")
        return verdicts

    # -- other transactions -----------------------------------------------------------------------------------------
    @contextmanager
    def transaction(self, name: str) -> Iterator[PostgresStatements]:
        """Begin a transaction of its own and commit it at the end of the block. `name` is that of its crash points.

        It does not wait out an outage, nor for a commit that does, but makes the connection anew once.
        """
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise translated(Outage("a commit is waiting for it"), self._address.shown)
        try:
            crash_point(f"store.{name}.before")
            try:
                self._begin_again()
                yield self._statements
                crash_point(f"store.{name}.written")
                self._end()
            except (psycopg.Error, Outage) as error:
                is_lost = is_outage(error, self._connection)
                self._drop() if is_lost else self._roll_back()
                trouble = translated(Outage(str(error)) if is_lost else error, self._address.shown)
                raise trouble from error
            except BaseException:
                self._roll_back()
                raise
            crash_point(f"store.{name}.after")
        finally:
            self._lock.release()

    def _begin_again(self) -> None:
        """Begin a transaction; if the connection turns out to be lost, on a new one."""
        try:
            self._connect(True)
            self._begin()
        except psycopg.Error as error:
            if not is_outage(error, self._connection):
                raise
            self._drop()
            self._connect(True)
            self._begin()

    def close(self) -> None:
        """Close the connection."""
        self.patience.is_over = True
        with self._lock:
            close_quietly(self._connection)
            self._connection = None

    # -- the connection ---------------------------------------------------------------------------------------------
    def _connect(self, patient: bool) -> None:
        """Make sure that there is a connection. A new one ends whatever the last one may still be doing."""
        if self._connection is not None and not self._connection.closed:
            return
        if self.patience.is_over:
            raise translated(psycopg.InterfaceError("closed"), self._address.shown)
        if not patient:
            raise Outage("it is not connected")
        connection = connect(self._address, self._name, durability=self._durability, writing=True)
        try:
            self._statements.connection = connection
            if self._address.pooler:
                self._statements.all("lock_writer", self._key)
            else:
                self._statements.all("end_other_sessions", self._name)
            self.heads.compare_if_other(self._statements)
        except psycopg.Error as error:
            close_quietly(connection)
            raise Outage(str(error)) from error
        self._connection = connection
        self.patience.end()

    def _drop(self) -> None:
        close_quietly(self._connection)
        self._connection = None

    def _wait(self, outage: Outage) -> None:
        if not self.patience.is_over:
            self.patience.wait(outage, time.sleep)
        if self.patience.is_over:
            raise StoreError(
                f"{self._address.shown} cannot be reached ({outage}), and the store was closed. What was being written "
                "is unknown; every run is verified before it goes on."
            ) from outage

    def _raise_outage(self, error: psycopg.Error) -> None:
        if is_outage(error, self._connection):
            raise Outage(" ".join(str(error).split())) from error

    def _begin(self) -> None:
        assert self._connection is not None
        self._connection.execute("BEGIN")

    def _end(self) -> None:
        assert self._connection is not None
        self._connection.execute("COMMIT")

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and not self._connection.closed:
                self._connection.execute("ROLLBACK")
        except psycopg.Error:
            self._drop()  # the server rolls back by itself

    # -- unknown commits --------------------------------------------------------------------------------------------
    def _read_back(self, work: Work) -> None:
        """Find out what of a batch was done by a session that was lost."""
        try:
            if work.reached:
                if any(is_there(self._row, work.operations[place], one) for place, one in work.reached.items()):
                    work.verdicts |= work.reached
            else:
                for place in work.left():
                    if self._is_written(work.operations[place]):
                        work.verdicts[place] = Accepted()
                work.has_tried_simple = False
            work.reached, work.is_doubtful = {}, False
        except psycopg.Error as error:
            self._raise_outage(error)
            raise translated(error, self._address.shown) from error

    def _is_written(self, operation: Operation) -> bool:
        """Tell whether a simple operation was accepted. A run with the same beginning may yet be somebody else's."""
        if not isinstance(operation, Append | StartRun) or not is_there(self._row, operation, Accepted()):
            return False
        if isinstance(operation, Append):
            return True
        new = operation.new.row
        return self._row("lease_of_run", new.id) == (new.epoch, new.owner)

    def _row(self, name: str, *parameters: Any) -> tuple[Any, ...]:
        rows = self._statements.all(name, *parameters)
        return rows[0] if rows else ()


def _simple_claims(batch: Batch) -> list[Claim]:
    """Return the claims of a worker that concern no run which anything else in the batch mentions.

    One of a run that is not in the queue `default` has no verdict then, and is done in order.
    """
    if not any(type(one) is Claim for _, one in batch.others):
        return []
    if not all(isinstance(one, Append | StartRun | Post | Release | Claim) for _, one in batch.others):
        return []
    everything = (*batch.appends, *batch.starts, *(one for _, one in batch.others))
    mentioned = Counter(run for one in everything for run in runs_mentioned(one))
    claims = [one for _, one in batch.others if isinstance(one, Claim) and mentioned[one.run] == 1 and one.queued]
    return [one for one in claims if (one.worker, one.statuses) == (claims[0].worker, claims[0].statuses)]


def _not_of(appends: Sequence[Append], all_starts: Sequence[StartRun], starts: Sequence[StartRun]) -> list[Append]:
    """Return the appends that are not to runs whose start is done otherwise."""
    kept = {start.new.row.id for start in starts}
    left_out = {start.new.row.id for start in all_starts} - kept
    return [append for append in appends if append.run not in left_out]
