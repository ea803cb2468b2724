"""Group commit: everything that is ready, of all runs, goes into one transaction; then the waiters are woken.

A hop to another thread costs as much as a fast fsync. So while only one run is ready and commits are fast, the commit
is made on the application's loop; when there are several or the disk is slow, on the committer's thread: the
application's loop never waits long for a disk.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, Protocol, final

from everstep.engine.code.stops import EXITS, pass_on
from everstep.errors import Misuse, StoreBusy, StoreError
from everstep.model.untrusted import logger
from everstep.stores.brief import Busy
from everstep.stores.protocol import Append, Failed, Operation, Store, Verdict

log = logger("everstep.store")

QUICK_SECONDS: Final = 0.002
"""A commit that takes longer than this is not made on the application's loop."""
LINGER_SECONDS: Final = 0.001
"""How long events that no caller waits for may gather before their commit begins, in seconds."""
ROOM_SECONDS: Final = 0.5
"""How often a store that cannot be written is tried again."""
THREAD_SECONDS: Final = 0.05
"""How often to retry a commit that had to wait for another process, while the machine has no thread that could wait."""


class Source(Protocol):
    """A run that has something to write. It makes its unit when a transaction is assembled."""

    is_queued: bool
    """Whether it is in the committer's queue."""

    def unit(self) -> Append | None:
        """Return everything that is not saved yet, or None if that is nothing."""
        ...

    def settle(self, unit: Append, verdict: Verdict) -> None:
        """Take the verdict on a unit."""
        ...

    def fail(self, error: BaseException) -> None:
        """Handle the failure of the store."""
        ...

    def stumble(self, error: BaseException, *, is_own: bool) -> None:
        """Leave memory, because one of the above raised (`is_own`), or it is unknown whether the unit was written."""
        ...


@final
class _Request:
    """An operation of an application. It waits for its verdict, and fails at once when the disk is full."""

    __slots__ = ("future", "operation")

    def __init__(self, operation: Operation, future: "asyncio.Future[Verdict]") -> None:
        self.operation = operation
        self.future = future

    def settle(self, verdict: Verdict) -> None:
        if isinstance(verdict, Failed):
            self.fail(verdict.error)
        elif not self.future.done():
            self.future.set_result(verdict)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # no future takes these
            error = StoreError(f"The commit was interrupted ({type(error).__name__}): whether it was made is unknown.")
        if not self.future.done():
            self.future.set_exception(error)


_Entry = tuple[Source | _Request, Any]
"""A run with its unit, or a request with its operation."""
_operation_of: Final[Callable[[_Entry], Operation]] = itemgetter(1)


class Committer:
    """The only writer of runs in this process."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        has_failed: Callable[[BaseException], Any] = lambda error: None,
        works: Callable[[], Any] = lambda: None,
    ) -> None:
        self.store = store
        self.commits = 0
        self.full = False
        """Whether work pauses because the disk is full, or because the store cannot be written for another reason."""
        self._loop = loop
        self._has_failed = has_failed
        """Called when commits fail, or have no thread; `works` when they succeed again."""
        self._works = works
        self._is_in_trouble = self._is_threadless = False
        self._queue: deque[Source | _Request] = deque()
        self._stalled: list[_Entry] = []
        self._waited_for = False
        self._flush_soon: asyncio.Handle | None = None
        self._flush_later: asyncio.TimerHandle | None = None
        self._busy = False
        self._is_settling = False
        self._closed = False
        self._seconds = 0.0
        self._batches: queue.SimpleQueue[list[list[_Entry]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle: asyncio.Future[None] | None = None

    # -- what comes in ---------------------------------------------------------------------------------------------
    def ready(self, source: Source, *, waited_for: bool) -> None:
        """Queue a run that has something to write; `waited_for` if something waits until it is durable."""
        if not source.is_queued:
            source.is_queued = True
            self._queue.append(source)
        if waited_for:
            self._soon()
        elif self._flush_later is None and self._flush_soon is None:
            self._flush_later = self._loop.call_later(LINGER_SECONDS, self._flush_lingering)

    def submit(self, operation: Operation) -> "asyncio.Future[Verdict]":
        """Do one operation in the next transaction; the future has its verdict when it is durable."""
        if self._closed:
            raise Misuse("The app was closed.")
        future: asyncio.Future[Verdict] = self._loop.create_future()
        self._soon()  # first, because an error here must leave nothing in the queue that would be done all the same
        self._queue.append(_Request(operation, future))
        return future

    def _soon(self) -> None:
        self._waited_for = True
        if self._flush_soon is None and not self._busy:
            self._flush_soon = self._loop.call_soon(self._flush)

    def _flush_lingering(self) -> None:
        self._flush_later = None
        if not self._busy:
            self._flush()

    def commit_now(self) -> None:
        """Commit at once, without a turn of the loop: for an app whose only run waits for exactly this."""
        if self._waited_for and not self._busy and not self._is_settling:
            self._flush()

    # -- one transaction -------------------------------------------------------------------------------------------
    def _flush(self) -> None:
        if self._flush_soon is not None:
            self._flush_soon.cancel()
            self._flush_soon = None
        if self._busy or self._closed:
            return
        batch = self._take_batch() if self._queue or self._stalled else []
        if not batch:
            self._now_idle()
            return
        here = self._waited_for and len(batch) == 1 and self._seconds < QUICK_SECONDS and not self.full
        self._waited_for = False
        if here:
            self._commit_here(batch)
        else:
            self._commit_elsewhere(batch)

    def _take_batch(self) -> list[_Entry]:
        """Take what is ready."""
        batch: list[_Entry] = list(self._stalled)
        self._stalled.clear()
        entries, self._queue = self._queue, deque()
        stalled = [entry[0] for entry in batch] if batch else ()
        for entry in entries:
            if type(entry) is _Request:
                batch.append((entry, entry.operation))
                continue
            entry.is_queued = False
            if entry in stalled:
                self.ready(entry, waited_for=True)  # its next unit is made when the verdict on this one is known
            else:
                try:
                    unit = entry.unit()
                except BaseException as error:  # noqa: BLE001  # it reaches this run alone
                    self._let_stumble(entry, error)
                    pass_on(error, self._loop)  # a signal that ends the process does so when the others are committed
                    continue
                if unit is not None:
                    batch.append((entry, unit))
        if self._flush_later is not None:
            self._flush_later.cancel()
            self._flush_later = None
        return batch

    def _commit_here(self, batch: list[_Entry]) -> None:
        began = time.perf_counter()
        try:
            verdicts = self.store.commit(list(map(_operation_of, batch)), patient=False)
        except Busy:
            self._commit_elsewhere(batch)
            return
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise  # this process is to stop
            return
        self._seconds += (time.perf_counter() - began - self._seconds) / 8
        self._settle(batch, verdicts)

    def _commit_elsewhere(self, batch: list[_Entry]) -> None:
        """Commit on the committer's thread."""
        self._busy = True
        box = [batch]
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="everstep-committer", daemon=True)
                thread.start()
                self._thread, self._is_threadless = thread, False
            self._batches.put(box)
        except EXITS:
            self._batches.put(box)  # a signal: if it came after that, the thread finds the box empty
            raise
        except (RuntimeError, MemoryError) as error:
            if not self._is_threadless:
                self._is_threadless = True
                self._note_failure(error)
            self._commit_without_thread(batch)

    def _commit_without_thread(self, batch: list[_Entry]) -> None:
        """Commit right here because the machine has no thread. If another process is writing, try again soon."""
        try:
            verdicts = self.store.commit(list(map(_operation_of, batch)), patient=False)
        except Busy:
            self._loop.call_later(THREAD_SECONDS, self._commit_elsewhere, batch)
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._busy = False
            self._settle(batch, verdicts)

    def _work(self) -> None:
        """The committer's thread."""
        while (box := self._batches.get()) is not None:
            if not box:
                continue
            batch, began = box.pop(), time.perf_counter()
            try:
                verdicts = self.store.commit(list(map(_operation_of, batch)))
            except BaseException as error:  # noqa: BLE001  # every failure goes to those that wait for the commit
                self._tell(self._fail, batch, error)
            else:
                self._tell(self._done_elsewhere, batch, verdicts, time.perf_counter() - began)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        while not self._loop.is_closed():  # otherwise nothing waits for it
            try:
                self._loop.call_soon_threadsafe(callback, *args)
                return
            except (RuntimeError, MemoryError):
                time.sleep(LINGER_SECONDS)  # it is being closed, or there is no memory: runs wait for this

    def _done_elsewhere(self, batch: list[_Entry], verdicts: Sequence[Verdict], seconds: float) -> None:
        self._busy = False
        self._seconds += (seconds / len(batch) - self._seconds) / 8
        self._settle(batch, verdicts)

    def _settle(self, batch: list[_Entry], verdicts: Sequence[Verdict]) -> None:
        if len(verdicts) != len(batch):
            self._fail(batch, RuntimeError(f"{len(verdicts)} verdicts on {len(batch)} operations"))
            return
        self.commits += 1
        if self._is_in_trouble and not self._is_threadless:
            self._is_in_trouble = False
            self._works()
        if self.full:
            self.full = False
            log.warning("The store takes writes again: work continues.")
        self._is_settling = True
        paused: Exception | None = None
        stop: BaseException | None = None
        for (target, operation), verdict in zip(batch, verdicts, strict=True):
            try:
                if type(target) is _Request:
                    target.settle(verdict)
                elif type(verdict) is Failed and _pauses(verdict.error):
                    self._stalled.append((target, operation))
                    paused = verdict.error
                else:
                    target.settle(operation, verdict)
            except BaseException as error:  # noqa: BLE001  # it reaches this run alone: the others are settled
                stop = self._let_stumble(target, error) or stop
        self._is_settling = False
        if self._stalled:
            self._wait_for_room(paused or StoreBusy("The store cannot be written."))
        if self._queue or self._idle is not None:
            self._go_on()
        if stop is not None:
            raise stop

    def _let_stumble(
        self, target: Source | _Request, error: BaseException, *, is_own: bool = True
    ) -> BaseException | None:
        """Report to a run that its callback raised. Returns the error if it must stop this process."""
        try:
            if type(target) is _Request:
                log.error("An operation could not be told its verdict", exc_info=error)
            else:
                target.stumble(error, is_own=is_own)
        except Exception:
            log.exception("A run could not be told that it failed (%s)", type(error).__name__)
        return None if isinstance(error, Exception) else error

    def _note_failure(self, error: BaseException) -> None:
        self._is_in_trouble = True
        self._has_failed(error)

    def _go_on(self) -> None:
        if not self._queue:
            if self._idle is not None:
                self._now_idle()
        elif self._waited_for:
            self._soon()
        elif self._flush_later is None and not self._busy:
            self._flush_later = self._loop.call_later(LINGER_SECONDS, self._flush_lingering)

    def _fail(self, batch: list[_Entry], error: BaseException) -> None:
        """Keep the units of runs until the store can be written, and fail direct requests. Other errors stop the runs.

        An error that is not the store's, such as refused memory, does not say what was written: the runs are read
        again.
        """
        self._busy = False
        pauses, is_known = _pauses(error), isinstance(error, StoreError | Misuse)
        if not pauses:
            self._note_failure(error)
        for target, unit in batch:
            try:
                if type(target) is _Request:
                    target.fail(error)
                elif pauses:
                    self._stalled.append((target, unit))
                elif is_known:
                    target.fail(error)
                else:
                    self._let_stumble(target, error, is_own=False)
            except BaseException as raised:  # noqa: BLE001  # it reaches this run alone
                self._let_stumble(target, raised)
                pass_on(raised, self._loop)
        if self._stalled:
            self._wait_for_room(error)
            self._now_idle()
        else:
            self._go_on()  # also if only requests found no room: runs that became ready meanwhile wait for a commit

    def _wait_for_room(self, error: BaseException) -> None:
        if not self.full:
            self.full = True
            self._note_failure(error)
            log.error("%s Work pauses, and continues by itself when that is repaired.", error)
        if self._flush_later is None:
            self._flush_later = self._loop.call_later(ROOM_SECONDS, self._flush_lingering)

    # -- the end ---------------------------------------------------------------------------------------------------
    def _now_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def drained(self) -> None:
        """Wait until everything that came in is durable (or, on a full disk, until it cannot be for now).

        A signal whose handler raises may have cut off the flush that was wanted, before it began: so it is wanted anew.
        """
        while (self._queue or self._busy) and not self.full:
            self._idle = self._loop.create_future()
            if self._flush_soon is not None:
                self._flush_soon.cancel()
                self._flush_soon = None
            self._soon()
            await self._idle

    def stop(self) -> None:
        """Write nothing more. Waiting operations are refused; the thread ends after its present write."""
        self._closed = True
        if self._flush_later is not None:
            self._flush_later.cancel()
        for entry in self._queue:
            if type(entry) is _Request:
                entry.fail(Misuse("The app was closed."))
        self._queue.clear()
        if self._thread is not None:
            self._batches.put(None)

    async def close(self) -> None:
        """Save what is left, then stop the thread."""
        await self.drained()
        self.stop()
        if self._thread is not None:
            while self._thread.is_alive():  # noqa: ASYNC110  # not `join` on another thread: there may be none
                await asyncio.sleep(LINGER_SECONDS)


def _pauses(error: BaseException) -> bool:
    """Return True if a commit has certainly written nothing, and may be repeated when the cause is gone."""
    return isinstance(error, StoreError) and error.pauses
