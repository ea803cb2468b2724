"""One attempt at an atomic step: its body's writes and its marker in one transaction, on one thread.

    begin  →  read the marker  →  there: adopt its outcome, the body does not run
                               →  not there: run the body, encode its outcome, write the marker, commit

Whoever else tries at the same time waits for the transaction, and then finds the marker. What raises is rolled back. An
error of the COMMIT itself does not say whether it happened, so the marker is read again. Only where that cannot be
done, or where the disk has failed, is the attempt undecided.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from everstep.codec import Types
from everstep.effects.body import Means
from everstep.effects.databases import Database, Transaction
from everstep.effects.databases import now as _now
from everstep.errors import (
    ChainKeyMissing,
    Damaged,
    DatabaseFailed,
    Misuse,
    NotDecodable,
    NotDone,
    NotEncodable,
    StepTimedOut,
)
from everstep.model.crash_points import crash_point
from everstep.model.markers import Marker, open_outcome, seal_outcome
from everstep.model.untrusted import described
from everstep.stores.protocol import Store

T = TypeVar("T")

PATIENCE_SECONDS: Final = 300.0
"""Time that an atomic step waits for other writers of its database before that counts as a failure."""
FIRST_PAUSE_SECONDS: Final = 0.0005
MOST_PAUSE_SECONDS: Final = 0.05


class Settled(NamedTuple):
    """What became of an attempt: an outcome, its own or adopted; or it was refused, and another one is useless."""

    payload: bytes = b""
    adopted: bool = False
    refused: Exception | None = None


class Undecided(Exception):
    """Nobody can say just now whether the step has happened. `is_lasting`: asking the database does not help."""

    def __init__(self, error: DatabaseFailed, *, is_lasting: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_lasting = is_lasting


class _Again(Exception):
    """Others were writing: nothing was done, and the same may be done again."""


class _Unreached(Exception):
    """The marker could not be read, so nothing was done in this attempt, and nothing is known of earlier ones."""


class _Lost(Exception):
    """The connection was lost while the body had it. Everything is rolled back."""

    def __init__(self, failure: DatabaseFailed, server: str, *, may_be_outage: bool) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.server = server
        self.may_be_outage = may_be_outage


class _Refused(Exception):
    """The body did what it must not, or returned what cannot be stored. Everything is rolled back."""

    def __init__(self, misuse: Misuse) -> None:
        super().__init__(str(misuse))
        self.misuse = misuse


class Permit:
    """Decides between an attempt that wants to commit and whoever gives up on it: the first of them wins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._withdrawn = threading.Event()
        self._stop: Callable[[], None] = _nothing

    def take(self) -> None:
        """The attempt is about to commit."""
        with self._lock:
            self.refuse_if_withdrawn()
            self._is_taken = True

    def give_back(self) -> None:
        """What was to be committed was not, for sure."""
        with self._lock:
            self._is_taken = False

    def withdraw(self) -> bool:
        """Give up on the attempt. False if it is about to commit: then its outcome counts."""
        with self._lock:
            if self._is_taken:
                return False
            self._withdrawn.set()
            self._stop()
            return True

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Any:
        """Within the block, `stop` is called when the permit is withdrawn."""
        with self._lock:
            self.refuse_if_withdrawn()
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = _nothing

    def pause(self, seconds: float) -> None:
        """Wait a little, unless the permit is withdrawn."""
        self._withdrawn.wait(seconds)
        self.refuse_if_withdrawn()

    def refuse_if_withdrawn(self) -> None:
        """Raise if nobody waits for the attempt any more."""
        if self._withdrawn.is_set():
            raise StepTimedOut("The attempt took too long, and was given up.")


def _nothing() -> None:
    """Stop nothing."""


class Work(msgspec.Struct, frozen=True):
    """All that one attempt needs."""

    database: Database[Any]
    body: Callable[[Any], Any]
    """The step's function with its arguments, but for the connection."""
    is_async: bool
    types: Types
    means: Means
    key: str
    run: str
    step: str
    attempt: int
    permit: Permit
    cut_off: bool = False
    """Whether an earlier attempt was cut off, so that it may have happened, or may even still act."""
    only_settle: bool = False
    """Whether to find out what became of earlier attempts, and to do nothing."""

    def marker(self, outcome: bytes | None) -> Marker:
        """Return the marker of this attempt."""
        kept = seal_outcome(self.means.store.chain, self.key, outcome) if outcome is not None else None
        return Marker(self.key, self.run, self.step, self.attempt, kept, self.means.now())


def perform(work: Work) -> Settled:
    """Make the attempt, on this thread and no other. An `async` body gets a loop of its own here."""
    return _run(_perform(work), with_a_loop=work.is_async or work.database.is_async)


def look(work: Work) -> bytes | None:
    """Return the outcome that the marker has, or None if there is none."""
    try:
        return _run(_patiently(work, _look), with_a_loop=work.database.is_async)
    except _Unreached as unreached:
        raise _failed(work.database, "could not be asked", unreached.__cause__) from unreached.__cause__


def in_transaction(
    database: Database[Any], store: "Store", function: Callable[[Transaction[Any]], Any], *, commits: bool = False
) -> Any:
    """Do something else in a transaction of a database, on this thread; with `commits` it is made durable."""

    async def once() -> Any:
        transaction: Transaction[Any] | None = None
        try:
            transaction = await _now(database.begin(store))
            value = await _now(function(transaction))
            if commits:
                await _now(transaction.commit())
        except Exception as error:
            if database.meaning(error) == "again":
                raise _Again from error
            raise _failed(database, "could not be used", error) from error
        finally:
            if transaction is not None:
                await _now(transaction.close())
        return value

    going = _wait_out(database, Permit(), once)
    try:
        return _run(going, with_a_loop=database.is_async)
    except _Unreached as unreached:
        raise _failed(database, "could not be used", unreached.__cause__) from unreached.__cause__


async def _perform(work: Work) -> Settled:
    if work.only_settle:
        settled = await _void(work)
        return settled or Settled(refused=NotDone(f"{work.step} has not happened, and was cancelled."))
    lost: list[_Lost] = []
    try:
        return await _patiently(work, lambda work: _try(work, lost))
    except Undecided:
        raise
    except _Unreached as unreached:
        error = _failed(work.database, "could not be asked", unreached.__cause__)
        raise (Undecided(error) if work.cut_off else error) from unreached.__cause__
    except BaseException as error:  # whatever a body raises is its outcome
        work.permit.refuse_if_withdrawn()
        settled = await _void(work) if work.cut_off else None
        if settled is not None:
            return settled
        if isinstance(error, _Refused):
            return Settled(refused=error.misuse)
        raise


async def _patiently(work: Work, attempt: Callable[[Work], Awaitable[T]]) -> T:
    spread = 0.75 + int(work.key[:4], 16) / 131_072  # so that two who wait do not meet again and again
    return await _wait_out(work.database, work.permit, lambda: attempt(work), spread)


async def _wait_out(
    database: Database[Any], permit: Permit, attempt: Callable[[], Awaitable[T]], spread: float = 1.0
) -> T:
    """Do something until nobody else is in the way. That is no failure, and nobody counts it."""
    until = time.monotonic() + PATIENCE_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except _Again as again:
            if time.monotonic() > until:
                error = _failed(database, f"was locked by others for {PATIENCE_SECONDS:.0f} s", again.__cause__)
                raise _Unreached from error
        permit.pause(pause * spread)
        pause = min(pause * 1.5, MOST_PAUSE_SECONDS)


async def _try(work: Work, ended: list[_Lost]) -> Settled:
    """Make the attempt once. `ended`: the session that the last body lost, if that may have been an outage.

    If the server is still the same, it was none: what has ended one session may end each, so it counts as an attempt.
    """
    crash_point("transaction.before")
    lost: Exception | None = None
    async with _begun(work) as (transaction, marker):
        if marker is not None and marker.outcome is not None:
            return _adopted(work, marker)
        if marker is not None and marker.attempt >= work.attempt:
            raise _overtaken(work)
        if ended and (last := ended.pop()).server == getattr(transaction, "server", ""):
            raise last.failure
        try:
            payload = await _run_body(work, transaction)
            await _mark(work, transaction, payload)
        except _Lost as loss:
            if not loss.may_be_outage:
                raise loss.failure from loss.failure.__cause__
            ended.append(loss)
            raise _Again from loss.failure
        crash_point("transaction.written")
        work.permit.take()
        try:
            await _now(transaction.commit())
        except Exception as error:  # noqa: BLE001 - every failure of a commit is an unknown commit
            lost = error
    if lost is not None:
        return await _read_back(work, lost)
    crash_point("transaction.after")
    return Settled(payload)


async def _run_body(work: Work, transaction: Transaction[Any]) -> bytes:
    """Run the body and return its outcome, encoded: what cannot be stored is noticed before anything is committed."""
    try:
        with work.permit.stopping(_stop_of(work, transaction)):
            value = work.body(transaction.lend())
            value = await value if work.is_async else value
        broke = await _now(transaction.take_back(returned=True))
    except Exception as error:
        if broke := await _now(transaction.take_back(returned=False)) or _told(transaction, "forbidden_by", error):
            raise _broken(work, broke) from error
        _raise_if_lost(work, transaction, error)
        if work.database.meaning(error) == "again":
            raise _Again from error
        raise
    if broke:
        raise _broken(work, broke)
    try:
        return work.means.codec.encode(value, work.types, work.step)
    except NotEncodable as refused:
        raise _Refused(refused) from refused


async def _mark(work: Work, transaction: Transaction[Any], payload: bytes) -> None:
    try:
        await _now(transaction.write_marker(work.marker(payload)))
    except Misuse as broke:  # only now it was seen that the body has ended the transaction
        raise _broken(work, str(broke)) from broke
    except Exception as error:
        _raise_if_lost(work, transaction, error)
        if work.database.meaning(error) == "again":
            raise _Again from error
        raise _failed(work.database, "did not take the marker, and everything was rolled back", error) from error


def _raise_if_lost(work: Work, transaction: Transaction[Any], error: Exception) -> None:
    """Raise `_Lost` if the connection was lost while the body had it, or was cut off by a limit of the database."""
    if why := _told(transaction, "why_lost", error):
        what = f"cut off the transaction of {work.step}, {why}. Everything was rolled back"
        failure = _failed(work.database, what, error)
        may_be_outage = work.database.meaning(error) == "again" and not _told(transaction, "limit_passed", error)
        raise _Lost(failure, getattr(transaction, "server", ""), may_be_outage=may_be_outage) from error


def _told(transaction: Transaction[Any], question: str, error: Exception) -> str:
    """Ask a transaction about an error, if it is of a kind that knows."""
    answer: str = getattr(transaction, question, lambda _: "")(error)
    return answer


def _stop_of(work: Work, transaction: Transaction[Any]) -> Callable[[], None]:
    """Return what stops a body, as far as that is possible: its statement, and the task of an `async` one."""
    if not work.is_async:
        return transaction.interrupt
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop() -> None:
        transaction.interrupt()
        loop.call_soon_threadsafe(task.cancel)

    return stop


def _broken(work: Work, broke: str) -> _Refused:
    return _Refused(Misuse(f"{work.step}: {broke}. Everything was rolled back."))


def _adopted(work: Work, marker: Marker) -> Settled:
    """An earlier attempt has committed: its outcome counts."""
    assert marker.outcome is not None
    try:
        outcome = open_outcome(work.means.store.chain, work.key, marker.outcome)
        work.means.codec.decode(outcome, work.types)
    except (NotDecodable, Damaged, ChainKeyMissing) as error:
        raise Undecided(_failed(work.database, "has a marker that cannot be read", error), is_lasting=True) from error
    return Settled(outcome, adopted=marker.attempt != work.attempt)


async def _read_back(work: Work, error: Exception) -> Settled:
    """A COMMIT raised: find out whether it happened."""
    meaning = work.database.meaning(error)
    if meaning == "unknown":
        raise Undecided(_failed(work.database, "failed while it was written to", error), is_lasting=True) from error
    try:
        outcome = await _patiently(work, _look)
    except _Unreached as unreached:
        told = _failed(work.database, "could not be asked whether a COMMIT happened", unreached.__cause__)
        raise Undecided(told) from error
    if outcome is not None:
        crash_point("transaction.after")
        return Settled(outcome)
    work.permit.give_back()
    if meaning == "again":
        raise _Again from error
    raise _failed(work.database, "refused the COMMIT, and everything was rolled back", error) from error


async def _look(work: Work) -> bytes | None:
    async with _begun(work) as (_, marker):
        return None if marker is None or marker.outcome is None else _adopted(work, marker).payload


async def _void(work: Work) -> Settled | None:
    """See to it that no attempt up to this one can commit any more; or return what one of them has committed."""
    try:
        return await _patiently(work, _void_once)
    except _Unreached as unreached:
        raise Undecided(_failed(work.database, "could not be asked", unreached.__cause__)) from unreached.__cause__


async def _void_once(work: Work) -> Settled | None:
    crash_point("transaction.void.before")
    async with _begun(work) as (transaction, marker):
        if marker is not None and marker.outcome is not None:
            return _adopted(work, marker)
        if marker is not None and marker.attempt >= work.attempt:
            return None
        try:
            await _now(transaction.write_marker(work.marker(None)))
            crash_point("transaction.void.written")
            await _now(transaction.commit())
        except Exception as error:  # done again, it changes nothing
            raise (_Again if work.database.meaning(error) == "again" else _Unreached) from error
    crash_point("transaction.void.after")
    return None


@contextlib.asynccontextmanager
async def _begun(work: Work) -> Any:
    """Begin a transaction and read the marker in it. What is not committed at the end of the block is rolled back."""
    work.permit.refuse_if_withdrawn()
    transaction: Transaction[Any] | None = None
    try:
        try:
            transaction = await _now(work.database.begin(work.means.store))
            marker = await _now(transaction.read_marker(work.key))
        except Exception as error:
            if isinstance(error, Misuse) and not work.cut_off:
                raise
            raise (_Again if work.database.meaning(error) == "again" else _Unreached) from error
        yield transaction, marker
    finally:
        if transaction is not None:
            await _now(transaction.close())


def _overtaken(work: Work) -> DatabaseFailed:
    return DatabaseFailed(f"{work.step}: attempt {work.attempt} was given up by another process. Nothing was written.")


def _failed(database: Database[Any], what: str, cause: BaseException | None) -> DatabaseFailed:
    if isinstance(cause, DatabaseFailed):
        return cause
    why = f" ({described(cause)})" if cause is not None else ""
    error = DatabaseFailed(f"The database {database.name} {what}{why}.")
    error.__cause__ = cause
    return error


def _run(going: Coroutine[Any, Any, T], *, with_a_loop: bool) -> T:
    """Run a coroutine to its end, on this thread. Without a loop it must be one that waits for nothing."""
    if with_a_loop:
        with asyncio.Runner() as runner:
            return runner.run(going)
    try:
        going.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    going.close()
    raise Misuse("A database whose methods are coroutines says so: is_async = True.")
