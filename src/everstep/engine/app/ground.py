"""The base of an adapter for a framework: a store, a worker of its own, and the threads that it runs.

A framework calls its saver from any thread and any loop, so the app of a ground has a loop and a thread of its own.
Blocking code writes to the store on the caller's own thread, because a hop to another one costs as much as a fast
commit. Async code reads and writes on a thread, whatever that costs.
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final, TypeVar
from weakref import ref

import msgspec

from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp
from everstep.engine.app.framework_steps import Lending
from everstep.engine.app.opening import open as open_app
from everstep.engine.process.elsewhere import on_a_thread
from everstep.engine.process.leases import outwait
from everstep.errors import Misuse, StoreError, ThreadActive
from everstep.model.untrusted import logger
from everstep.stores.protocol import Failed, Refused, Store, Verdict, WorkerRow
from everstep.stores.rows.saved import FreeThread, SavedOperation, SavedReads, Taken, TakeThread, ThreadOwner

log = logger("everstep.adapters")

R = TypeVar("R")

BURY_SECONDS_MAX: Final = 3.0
BURY_PAUSE_SECONDS: Final = 0.05
LEFT_SECONDS: Final = 1.0
"""How long a stream that may have been abandoned has time to close before another call is refused, in seconds."""
RETURNS: Final = "threads to give back"
THREADS_MAX: Final = 32
"""The maximum number of async calls that use the store at the same time. Further calls wait for their turn."""


class Offer(msgspec.Struct):
    """An operation of a caller, and its verdict."""

    operation: SavedOperation
    verdict: Verdict | None = None
    settled: threading.Event | None = None
    """For a caller that lingers."""


_operation_of: Final[Callable[[Offer], SavedOperation]] = attrgetter("operation")


class Right:
    """The right to run a thread, and the call that has it."""

    def __init__(
        self, thread: str, by: object, on: asyncio.AbstractEventLoop | None = None, *, may_be_left: bool = False
    ) -> None:
        self.thread = thread
        self._by = ref(by)
        self._on = on
        self.may_be_left = may_be_left
        """Whether the call is a stream: one that is not read to its end is closed a moment after it was abandoned."""
        self.epoch = 0
        self.born = 0
        """When the thread was begun. It tells the thread apart from a deleted one of the same name."""
        self.ended = threading.Event()

    @property
    def is_held(self) -> bool:
        """Whether the call may still continue: neither it nor its loop is gone."""
        is_cut_off = self._on is not None and self._on.is_closed()
        return not self.ended.is_set() and not is_cut_off and self._by() is not None

    def is_of(self, by: object) -> bool:
        """Return True if this call has the right."""
        return self._by() is by


class Ground:
    """A store that an adapter writes to, and its app."""

    def __init__(self, blocking: "BlockingApp", *, owned: bool) -> None:
        self.blocking = blocking
        self._owned = owned
        self._taking = [threading.Lock() for _ in range(64)]
        self._committing = threading.Lock()
        self._offers: deque[Offer] = deque()
        self._rights: dict[str, Right] = {}
        """The threads that run here."""
        self._owed: dict[str, Right] = {}
        """The rights of threads that no longer run here and that the store has not taken back."""
        self._threads = ThreadPoolExecutor(THREADS_MAX, "everstep-saver")

    # An app that is opened while a loop runs is not ready at once: see `ground_of`.
    @cached_property
    def app(self) -> "App":
        """The app."""
        return self.blocking.inner

    @cached_property
    def store(self) -> Store:
        """The store of the app."""
        return self.app.store

    @cached_property
    def now(self) -> Callable[[], int]:
        """The app's clock."""
        return self.app.clock.now

    @cached_property
    def random_bits(self) -> Callable[[int], int]:
        """The app's randomness."""
        return self.app.randomness.getrandbits

    @cached_property
    def steps(self) -> Lending:
        """The runs of steps that the framework calls."""
        return Lending(self.blocking)

    @property
    def saved(self) -> SavedReads:
        """Reads about threads and items."""
        self.blocking.refuse_elsewhere()
        return self.store.saved

    @property
    def worker(self) -> str:
        """This process's worker; empty if it is not one yet."""
        return self.app.worker

    async def opened(self) -> None:
        """Wait until the store is open. Raises the error if it cannot be opened."""
        await self.soon(lambda: self.app)

    def close(self) -> None:
        """Give everything back. A shared app stays open."""
        if self._owned and not self.blocking.is_elsewhere:
            self._owned = False
            self._rights.clear()  # a worker that leaves runs nothing
            self.blocking.close()
            self._threads.shutdown(wait=False)

    # -- writing --------------------------------------------------------------------------------------------------
    def commit(self, operation: SavedOperation, linger_seconds: float = 0.0) -> Verdict:
        """Do an operation; it is durable on return.

        What several threads write at the same time goes into one transaction: the first that gets the lock commits the
        operations of all. A lingering one waits a moment for others to come. (The committer would do the same on the
        app's loop, but the hop there and back costs as much as a fast commit.)
        """
        self.blocking.refuse_elsewhere()
        offer = Offer(operation)
        if linger_seconds:
            offer.settled = threading.Event()
            self._offers.append(offer)
            offer.settled.wait(linger_seconds)
        else:
            self._offers.append(offer)
        if offer.verdict is None:
            with self._committing:
                if offer.verdict is None:
                    self._commit_offers()
        verdict = offer.verdict
        assert verdict is not None
        if isinstance(verdict, Failed):
            raise verdict.error
        return verdict

    def _commit_offers(self) -> None:
        offers: list[Offer] = []
        verdicts: Sequence[Verdict] = ()
        try:
            while self._offers:
                offers.append(self._offers.popleft())
            verdicts = self.store.commit(list(map(_operation_of, offers)))
        except BaseException as error:
            said = error if isinstance(error, Exception) else StoreError("The commit was cut off.")
            verdicts = [Failed(said)] * len(offers)
            raise
        finally:
            for offer, verdict in zip(offers, verdicts, strict=True):
                offer.verdict = verdict
                if offer.settled is not None:
                    offer.settled.set()

    async def soon(self, function: Callable[..., R], /, *args: Any) -> R:
        """Call a function that may use the store, on a thread: the loop of an application waits for no store.

        The threads are the ground's own: when the store does not answer, those of the application stay free.
        """
        call = partial(contextvars.copy_context().run, function, *args)
        try:
            waiting = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError:
            _ = self.blocking.loop  # it raises if it is closed
            raise
        return await waiting

    # -- running threads ------------------------------------------------------------------------------------------
    def take(self, right: Right) -> Right:
        """Take the right to run a thread. Raises `ThreadActive` while another call has it, here or elsewhere.

        The call has it until it is given back, or until the call or its loop is gone.
        """
        thread = right.thread
        if not self.worker:
            self.blocking.wait(self.app.become_worker())
        there = self._rights.get(thread)
        if there is not None and there.may_be_left and there.is_held:
            there.ended.wait(LEFT_SECONDS)
        with self._lock_of(thread):
            there = self._rights.get(thread)
            # A call that was cut off meanwhile takes nothing: its end has been noticed already.
            if right.ended.is_set() or (there is not None and there.is_held):
                raise self._active_here(thread)
            verdict = self._try_to_take(thread)
            if not isinstance(verdict, Taken):
                self._bury(self.saved.owner(thread))
                verdict = self._try_to_take(thread)
            if isinstance(verdict, Taken):
                right.epoch, right.born = verdict.epoch, verdict.born
                self._rights[thread] = right
                if self._owed.get(thread) is not right:  # otherwise it was cut off just now
                    self._owed.pop(thread, None)
                return right
        raise self.active(thread)

    def _lock_of(self, thread: str) -> threading.Lock:
        return self._taking[hash(thread) % len(self._taking)]

    def _bury(self, there: ThreadOwner | None) -> None:
        """Remove dead workers, and watch an owner that seems stopped. On a server a death is certain only after a
        moment.
        """
        self.store.bury_dead(self.now())
        is_alive: Callable[[WorkerRow], bool] | None = getattr(self.store, "is_alive", None)
        until = time.monotonic() + BURY_SECONDS_MAX
        while is_alive is not None and there is not None and time.monotonic() < until:
            owners = [row for row in self.store.workers() if row.id == there.owner]
            if not owners or is_alive(owners[0]):
                break
            time.sleep(BURY_PAUSE_SECONDS)
            self.store.bury_dead(self.now())
        if there is not None and there.owner is not None:
            outwait(self.store, self.app.clock, there.owner)

    def _try_to_take(self, thread: str) -> Verdict:
        return self.commit(TakeThread(thread, self.worker, self.now()))

    def free(self, right: Right) -> None:
        """Give a right back: its call has ended."""
        right.ended.set()
        if self.blocking.is_elsewhere:
            return  # the call that has it still runs it
        with self._lock_of(right.thread):
            try:
                self._give_back(right)
            except StoreError as error:
                log.error("The thread %s cannot be given back just now: %s", right.thread, error)
                self.free_later(right)
            except Misuse:
                pass  # the app is closed, and with its worker all threads are free

    def free_later(self, right: Right) -> None:
        """Give a right back in the background, until the store takes it: no other process could run the thread
        otherwise.

        This takes no locks, so the garbage collector may call it.
        """
        right.ended.set()
        if self.blocking.is_elsewhere:
            return
        self._owed[right.thread] = right
        try:
            self.app.loop.call_soon_threadsafe(self.app.background.keep, RETURNS, self._free_again)
        except RuntimeError:
            pass  # the app is closed, and with its worker all threads are free

    def _give_back(self, right: Right) -> None:
        if self._rights.get(right.thread) is right:
            del self._rights[right.thread]
            self.commit(FreeThread(right.thread, self.worker, right.epoch))

    async def _free_again(self) -> None:
        await on_a_thread(self._free_owed)

    def _free_owed(self) -> None:
        for thread, right in list(self._owed.items()):
            with self._lock_of(thread):
                if self._owed.get(thread) is not right:
                    continue  # it was taken again meanwhile, at the same epoch
                if self._rights.get(thread) in (right, None):
                    self._rights.pop(thread, None)
                    self.commit(FreeThread(thread, self.worker, right.epoch))
                del self._owed[thread]

    def is_run(self, thread: str, by: object = None) -> bool:
        """Return True if a call runs a thread here; with `by`, if this call does."""
        there = self._rights.get(thread)
        return there is not None and there.is_held and (by is None or there.is_of(by))

    def refuse_if_run(self, thread: str) -> None:
        """Raise `ThreadActive` if a call runs a thread here: what another process may not do, other calls here may
        not do either.
        """
        if self.is_run(thread):
            raise self._active_here(thread)

    def born(self, thread: str) -> int:
        """Return when a thread that runs here was begun. It tells the thread apart from a deleted one of the same
        name.
        """
        there = self._rights.get(thread)
        return there.born if there is not None else 0

    def epoch_of(self, thread: str) -> int:
        """Return the epoch at which this process runs a thread; 0 if it does not."""
        there = self._rights.get(thread)
        return there.epoch if there is not None else 0

    def _active_here(self, thread: str) -> ThreadActive:
        return ThreadActive(
            f"The thread {thread!r} is being run by another call in this process ({self.worker}). Wait until that has "
            "ended: a thread is run by one call at a time. A stream that is not read to its end runs until it is "
            "closed.",
            self.worker,
        )

    def active(self, thread: str, verdict: Refused | None = None) -> ThreadActive:
        """Return the error for a caller that wants a thread which another one has."""
        there = self.saved.owner(thread)
        owner = (there.owner if there is not None else None) or "another process"
        if verdict is not None and verdict.why == "fenced":
            said = f"The thread {thread!r} was taken over by {owner}: this process was thought to be gone. Nothing"
            return ThreadActive(f"{said} of it was written from here, and {owner} continues it.", owner)
        return ThreadActive(
            f"The thread {thread!r} is being run by {owner} in {self.store.url}. Wait until it has ended, or ask that "
            "process: a thread is run by one call at a time.",
            owner,
        )


def ground_of(where: Any, **options: Any) -> Ground:
    """Return a ground: on an open app, or on a new one for a URL.

    Where a loop runs, that app is opened meanwhile on its own thread: its first user waits for it, or gets the error if
    it cannot be opened.
    """
    if isinstance(where, BlockingApp):
        if where.ground is None:
            where.ground = Ground(where, owned=False)
        return where.ground
    if where is not None and not isinstance(where, str):
        raise Misuse(
            f"A {type(where).__name__} cannot be shared: give the URL of the store, or the app of "
            "`with everstep.open() as app:`, which has a thread of its own."
        )
    waits = asyncio._get_running_loop() is None
    return Ground(BlockingApp(open_app(where, **options).make, waits=waits), owned=True)
