"""Committing: one durable transaction for a batch, and what to do when it fails or the server goes away.

A batch of simple operations is one round trip, and commits with it. An operation that concerns other runs is done by
itself, in a second transaction; so is a simple one that was not accepted, because its verdict needs the reason. Each
run's unit is whole either way, and no caller gets a verdict before both transactions are durable.

A lost reply is an unknown commit, and so is every error that says nothing about the data (see sqlstates.py): a
cancelled statement, a server without memory, and every unknown error. The writer reconnects, ends what the old session
may still be doing and waits for that, and then reads back: for an `Append`, `StartRun` or `RestartRun` the digest of
its last event, for a `Post` the row with its number, for a `Claim` the epoch and owner, and so on. A transaction is
atomic, so if one thing is there, all of it is, and the verdicts that were reached in it are returned. In the single
round trip the verdicts are lost with the reply: there each unit has its digest, and one that is missing is tried again,
which its expected head makes harmless. A `Release`, a `ForgetKeys`, an append without events and a settled notification
write nothing that no other operation could have written; repeating them changes nothing.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
import psycopg

from everstep.errors import Damaged, Misuse, StoreError
from everstep.model.crash_points import crash_point
from everstep.model.status import ENDED, UNFINISHED
from everstep.stores.brief import QUICK_SECONDS, Busy, briefly, refuse_when_brief
from everstep.stores.postgres.addresses import Address
from everstep.stores.postgres.connections import (
    PAUSE_SECONDS_MIN,
    Connection,
    Durability,
    Outage,
    Patience,
    PatienceWithSetbacks,
    Setback,
    Slow,
    begin,
    close_quietly,
    connect,
    outage_of,
    refused,
    translated,
)
from everstep.stores.postgres.heads import Heads
from everstep.stores.postgres.news import is_news, puts_back
from everstep.stores.postgres.threads import do_changes, only_add
from everstep.stores.postgres.transaction import PostgresStatements, Transaction, UnitFails
from everstep.stores.protocol import (
    Accepted,
    Append,
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
from everstep.stores.rows.saved import ChangeThread
from everstep.stores.sql.batch import Batch, runs_mentioned
from everstep.stores.sql.reading_back import is_there
from everstep.stores.sql.sqlstates import GIVE_WAY

R = TypeVar("R")

DEADLOCKS_MAX: Final = 20
"""The maximum number of immediate retries, in a row, of a transaction that gave way to another one."""
TOGETHER_MAX: Final = 2
"""After this many failures of a batch its operations are tried one by one: one of them may be too large to send."""
VALUE_BYTES_MAX: Final = (1 << 30) - (1 << 20)
"""The maximum size of a message. PostgreSQL ends the session of a client that sends a gigabyte in one message."""
SAME_SESSION_MAX: Final = 8
"""After this many failures of a batch in one session, the writer reconnects."""
ATTEMPTS_MAX: Final = 8
"""The maximum number of attempts at a transaction other than a commit; a lost connection counts as half of them."""

SLOW_SECONDS: Final = 0.9
"""After a commit that took longer than this (seconds), the writer checks whether it still owns the runs: the shortest
lease is a second.
"""
WAIT_SECONDS: Final = 2.0
"""How long transactions other than commits wait for the connection, in seconds."""


class Tell(Protocol):
    """Notifies other processes of a change; `returns`: runs were put back."""

    def __call__(self, *, returns: bool = False) -> None: ...


class Work:
    """A batch in progress: what is decided, and what may have been committed without an answer."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        self.began = time.monotonic()
        self.verdicts: dict[int, Verdict] = {}
        self.is_doubtful = False
        """Whether a session that was lost may have written some of its units."""
        self.reached: dict[int, Verdict] = {}
        """The verdicts of a transaction whose COMMIT was sent and not answered."""
        self.has_tried_simple = False
        self.failures = 0
        """How often its transaction failed for a reason that says nothing about it."""

    def left(self) -> list[int]:
        """Return the positions of the undecided operations."""
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
        tell: Tell,
    ) -> None:
        self.patience = patience
        self._address = address
        self.name = name
        self.session_name = name
        """What its next session is called: with the place of the worker that writes here, if there is one."""
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        self._durability: Durability = durability
        self._tell = tell
        self._connection: Connection | None = connection
        self._transaction = Transaction(address.schema, places, connection)
        self._statements: PostgresStatements = self._transaction._statements
        self._lock = threading.Lock()
        self._unfinished: Work | None = None
        self._setbacks = PatienceWithSetbacks(address.shown)
        self.heads = Heads()

    # -- batches ----------------------------------------------------------------------------------------------------
    def commit(self, operations: Sequence[Operation], *, patient: bool) -> list[Verdict]:
        """Do a batch. See `Store.commit`."""
        if not operations:
            return []
        if patient:
            began = time.monotonic()
            verdicts = self._commit(operations, patient=True)
            self.patience.is_slow = self.patience.is_slow and time.monotonic() - began > QUICK_SECONDS
            return verdicts
        if self.patience.is_slow:
            raise Busy
        return briefly(self._commit, operations, patient=False)

    def _commit(self, operations: Sequence[Operation], *, patient: bool) -> list[Verdict]:
        if not patient and self._lock.locked():
            raise Busy
        with self._lock:  # no `acquire` before a `try`: a signal's handler that raises in between would keep it
            work, compared = self._work_for(operations), self.heads.comparisons
            self._finish(work, patient)
            is_late = time.monotonic() - work.began > SLOW_SECONDS
            if is_late and not patient:
                self._unfinished = work
                raise Busy  # the next query may take long
            verdicts = [work.verdicts[place] for place in range(len(work.operations))]
            refused = self.heads.note(work.operations, verdicts)
            if refused or self.heads.comparisons != compared:
                verdicts = self._compared(work.operations, verdicts)
            if is_late:
                verdicts = self._rechecked(work.operations, verdicts)
        if any(map(is_news, work.operations, verdicts)):
            self._tell(returns=any(map(puts_back, work.operations)))
        return verdicts

    def _compared(self, operations: Sequence[Operation], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Compare with the server, because appends were refused, or some were accepted by a server that was replaced
        meanwhile.

        An append that was accepted and is lost by now is refused: no worker should act on it.
        """
        appends = {operation.run for operation in operations if isinstance(operation, Append)}
        try:
            lost = self.heads.compare(self._statements, sorted(appends))
        except (psycopg.Error, Slow):
            self.heads.forget_server()
            self._drop()  # the next connection compares all of them
            lost = set()
        return [
            Refused("head") if isinstance(operation, Append) and operation.run in lost else verdict
            for operation, verdict in zip(operations, verdicts, strict=True)
        ]

    def _rechecked(self, operations: Sequence[Operation], verdicts: list[Verdict]) -> list[Verdict]:
        """Refuse appends to runs that other workers have claimed since: the reply took longer than a lease.

        The events are in the history. But a worker that got this verdict would begin the body of a step that is another
        worker's by now.
        """
        appends = {
            place: operation
            for place, operation in enumerate(operations)
            if isinstance(operation, Append) and not operation.release and operation.row.status not in ENDED
        }
        if not appends:
            return verdicts
        epochs = dict(self._asked("epochs", [append.run for append in appends.values()]))
        return [
            Refused("fenced")
            if isinstance(verdict, Accepted)
            and place in appends
            and epochs.get(appends[place].run, 0) > appends[place].epoch
            else verdict
            for place, verdict in enumerate(verdicts)
        ]

    def _asked(self, name: str, *parameters: Any) -> list[Any]:
        """Run a query that must be answered before the verdicts are known, through any number of outages."""
        while True:
            try:
                self._connect(True)
                return self._statements.all(name, *parameters)
            except (psycopg.Error, Outage) as error:
                outage = outage_of(error, self._connection) or Setback(str(error))
                self._roll_back() if isinstance(outage, Setback) else self._drop()
                self._wait(outage)

    def _work_for(self, operations: Sequence[Operation]) -> Work:
        """Return the work that an impatient caller has left unfinished, if it is this batch."""
        work, self._unfinished = self._unfinished, None
        if work is not None and list(map(id, work.operations)) == list(map(id, operations)):
            return work
        return Work(operations)

    def _finish(self, work: Work, patient: bool) -> None:
        """Decide all operations of a batch, through any number of outages."""
        while True:
            try:
                self._connect(patient)
                if work.is_doubtful:
                    self._read_back(work)
                self._write(work)
            except Outage as outage:
                self._pause(work, outage, patient)
            except StoreError as error:
                if not work.is_doubtful and not work.verdicts:
                    raise  # nothing was done
                self._pause(work, Setback(str(error)), patient)
            else:
                self._setbacks.end()
                return

    def _pause(self, work: Work, outage: Outage, patient: bool) -> None:
        """Wait a little before a batch is tried again: in the same session, if that may still be useful."""
        self._roll_back() if isinstance(outage, Setback) and work.failures % SAME_SESSION_MAX else self._drop()
        if not patient:
            # The caller calls again, patiently, with the same operations.
            self._unfinished = work
            if isinstance(outage, Slow):
                self.patience.is_slow = True
            else:
                self._patience_with(outage).note(outage)
            raise Busy from outage
        self._wait(outage)

    def _write(self, work: Work) -> None:
        is_alone = work.failures > TOGETHER_MAX
        work.failures += 1
        if is_alone:
            self._fail_too_large(work)
        elif not work.has_tried_simple:
            self._write_changes(work)
            self._write_simple(work)
            work.has_tried_simple = True
        left = work.left()
        if left:
            # These may deliver to runs that were claimed before them: what the claims have read is outdated then.
            claims = {place: one.row for place, one in work.verdicts.items() if isinstance(one, Claimed)}
            work.verdicts |= {place: Claimed(row) for place, row in claims.items()}
        if left and (is_alone or not self._write_in_order(work, left)):
            for place in left:
                self._write_in_order(work, [place])

    def _write_changes(self, work: Work) -> None:
        """Apply changes of threads in one round trip. A change that was done before an outage is left undecided."""
        left = work.left()
        changes = [work.operations[place] for place in left]
        if not left or type(changes[0]) is not ChangeThread or not only_add(changes):
            return
        crash_point("store.commit.before")
        try:
            work.verdicts |= dict(zip(left, do_changes(self._statements, changes), strict=True))
        except Exception as error:  # noqa: BLE001 - also a value that cannot be sent
            self._raise_outage(error)
            self._roll_back()
            return  # each is tried by itself, and says what is wrong with it
        except BaseException:
            self._drop()  # an interruption: what the session does is unknown
            raise
        crash_point("store.commit.after")

    def _write_simple(self, work: Work) -> None:
        """Do the simple operations in one round trip. What is not accepted is left undecided."""
        places = {id(work.operations[place]): place for place in work.left()}
        try:
            batch = Batch([work.operations[place] for place in places.values()])
        except Misuse:
            return  # a mistake in the engine: each is tried by itself, and only one of them fails
        starts = [start for start in batch.starts if not start.new.entries]
        appends = batch.appends if len(starts) == len(batch.starts) else _not_of(batch.appends, batch.starts, starts)
        if batch.has_keys:
            # Whether an ending run has waited for a key, and gets its change, is decided by the order of the batch.
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
        except Exception as error:  # noqa: BLE001 - also a value that cannot be sent
            if not _gave_way(error):
                self._raise_outage(error)
            work.is_doubtful = False
            self._roll_back()
            trouble = translated(error, self._address.shown)
            if isinstance(trouble, StoreError) and not _gave_way(error):
                self._raise_if_nothing_is_done(work, trouble, error)
            return  # each is tried by itself, and says what is wrong with it
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
            except Exception as error:  # noqa: BLE001 - also a value that cannot be sent, or a mistake of the engine
                if not _gave_way(error):
                    self._raise_outage(error)
                self._roll_back()
                work.reached, work.is_doubtful = {}, False
                if not _gave_way(error):
                    return self._fail(work, places, translated(error, self._address.shown), error)
            except BaseException:
                self._drop()  # an interruption: what the session does is unknown
                raise
            else:
                return True
        raise Setback(f"it gave way to other transactions {DEADLOCKS_MAX} times")

    def _fail(self, work: Work, places: Sequence[int], trouble: Exception, cause: Exception) -> bool:
        """Record the result of operations whose transaction was rolled back."""
        is_of_store = isinstance(trouble, StoreError) and not isinstance(trouble, Damaged)
        if is_of_store:
            self._raise_if_nothing_is_done(work, trouble, cause)
        elif len(places) > 1:
            return False
        work.verdicts |= dict.fromkeys(places, Failed(trouble))
        return True

    def _raise_if_nothing_is_done(self, work: Work, trouble: Exception, cause: Exception) -> None:
        if not work.verdicts and not isinstance(trouble, Damaged):
            raise trouble from cause

    def _fail_too_large(self, work: Work) -> None:
        """Refuse operations that are too large to send: the server ends the session instead of saying so."""
        for place in work.left():
            if (size := _bytes_in(work.operations[place])) > VALUE_BYTES_MAX:
                work.verdicts[place] = Failed(ValueError(f"{size} bytes are more than PostgreSQL takes at once"))

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
    def transact(self, name: str, do: Callable[[PostgresStatements], R]) -> R:
        """Do something in a separate transaction. `name` is that of its crash points.

        It does not wait for the end of an outage, nor for a commit that does. A failure for a reason that says nothing
        about it is retried: `do` must have the same result when it is done twice.
        """
        refuse_when_brief()
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise translated(Outage("a commit is waiting for it"), self._address.shown)
        try:
            crash_point(f"store.{name}.before")
            attempts = ATTEMPTS_MAX
            while True:
                try:
                    self._connect(True)
                    self._begin()
                    answer = do(self._statements)
                    crash_point(f"store.{name}.written")
                    self._end()
                    break
                except (psycopg.Error, Outage) as error:
                    outage = outage_of(error, self._connection, self._address.schema)
                    is_lost = outage is not None and not isinstance(outage, Setback)
                    self._drop() if is_lost else self._roll_back()
                    attempts -= ATTEMPTS_MAX // 2 if is_lost else 1
                    if outage is None or attempts <= 0:
                        raise refused(outage or error, self._address.shown) from error
                    time.sleep(PAUSE_SECONDS_MIN / 2)
                except BaseException:
                    self._roll_back()
                    raise
            crash_point(f"store.{name}.after")
            return answer
        finally:
            self._lock.release()

    def name_session(self, statements: PostgresStatements, place: str = "") -> None:
        """Call this session, and those that follow it, after the place of the worker that writes here."""
        self.session_name = f"{self.name} {place}".rstrip()
        statements.all("name_session", self.session_name)

    def close(self) -> None:
        """Close the connection."""
        self.patience.is_over = True
        with self._lock:
            close_quietly(self._connection)
            self._connection = None

    # -- the connection ---------------------------------------------------------------------------------------------
    def _connect(self, patient: bool) -> None:
        """Make sure that there is a connection. A new one ends what the last one may still be doing."""
        if self._connection is not None and not self._connection.closed:
            return
        if self.patience.is_over:
            raise translated(psycopg.InterfaceError("closed"), self._address.shown)
        if not patient:
            raise Outage("it is not connected")
        connection = connect(self._address, self.session_name, durability=self._durability, writing=True)
        try:
            self._statements.connection = connection
            if self._address.pooler:
                self._statements.all("lock_writer", self._key)
            else:
                self._statements.all("end_other_sessions", self.name)
            self.heads.compare_if_other(self._statements)
        except psycopg.Error as error:
            outage = outage_of(error, connection)
            close_quietly(connection)
            raise outage or refused(error, self._address.shown) from error
        self._connection = connection
        self.patience.end()

    def _drop(self) -> None:
        close_quietly(self._connection)
        self._connection = None

    def _patience_with(self, outage: Outage) -> Patience:
        return self._setbacks if isinstance(outage, Setback) else self.patience

    def _wait(self, outage: Outage) -> None:
        if not self.patience.is_over:
            self._patience_with(outage).wait(outage, time.sleep)
        if self.patience.is_over:
            raise StoreError(
                f"{self._address.shown} cannot be reached ({outage}), and the store was closed. What was being written "
                "is unknown; every run is verified before it continues."
            ) from outage

    def _raise_outage(self, error: Exception) -> None:
        """Raise the outage that an error means, unless it is the fault of the data, the role or the schema."""
        if isinstance(error, StoreError):
            return
        if (outage := outage_of(error, self._connection, self._address.schema)) is not None:
            raise outage from error

    def _open_connection(self) -> Connection:
        if self._connection is None:
            raise Outage("its session could not be rolled back")
        return self._connection

    def _begin(self) -> None:
        begin(self._open_connection())

    def _end(self) -> None:
        self._open_connection().execute("COMMIT")

    def _roll_back(self) -> None:
        """Undo the transaction. A session that cannot is dropped: then the server undoes it."""
        try:
            if self._connection is not None and not self._connection.closed:
                self._connection.execute("ROLLBACK")
        except Exception:  # noqa: BLE001 - cancelled, lost, or in the middle of something else
            self._drop()

    # -- unknown commits --------------------------------------------------------------------------------------------
    def _read_back(self, work: Work) -> None:
        """Find out which operations of a batch a lost session has done."""
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
            raise outage_of(error, self._connection) or Setback(str(error)) from error

    def _is_written(self, operation: Operation) -> bool:
        """Return True if a simple operation was accepted. A run with the same beginning may still be another
        worker's.
        """
        if not isinstance(operation, Append | StartRun) or not is_there(self._row, operation, Accepted()):
            return False
        if isinstance(operation, Append):
            return True
        new = operation.new.row
        return self._row("lease_of_run", new.id) == (new.epoch, new.owner)

    def _row(self, name: str, *parameters: Any) -> tuple[Any, ...]:
        rows = self._statements.all(name, *parameters)
        return rows[0] if rows else ()


def _gave_way(error: Exception) -> bool:
    """Return True if a transaction gave way to another one, and so is certainly undone."""
    return isinstance(error, psycopg.Error) and error.sqlstate in GIVE_WAY


def _bytes_in(value: Any) -> int:
    """Return how many bytes of texts and blobs an operation has."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_bytes_in, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_in, value))
    if isinstance(value, msgspec.Struct):
        return sum(_bytes_in(getattr(value, name)) for name in value.__struct_fields__)
    return 0


def _simple_claims(batch: Batch) -> list[Claim]:
    """Return the claims of a worker that concern no other run of the batch.

    A claim of a run outside the queue `default` gets no verdict then, and is done in order.
    """
    if not any(type(one) is Claim for _, one in batch.others):
        return []
    if not all(isinstance(one, Append | StartRun | Post | Release | Claim) for _, one in batch.others):
        return []
    everything = (*batch.appends, *batch.starts, *(one for _, one in batch.others))
    mentioned = Counter(run for one in everything for run in runs_mentioned(one))
    claims = [one for _, one in batch.others if isinstance(one, Claim) and mentioned[one.run] == 1 and one.queued]
    claims = [one for one in claims if UNFINISHED.issuperset(one.statuses)]  # an ended run may be in deletion
    return [one for one in claims if (one.worker, one.statuses) == (claims[0].worker, claims[0].statuses)]


def _not_of(appends: Sequence[Append], all_starts: Sequence[StartRun], starts: Sequence[StartRun]) -> list[Append]:
    """Return the appends except those to runs whose start is done in order."""
    kept = {start.new.row.id for start in starts}
    left_out = {start.new.row.id for start in all_starts} - kept
    return [append for append in appends if append.run not in left_out]
