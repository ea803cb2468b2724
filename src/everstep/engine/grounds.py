"""What an adapter for a framework stands on: a store, a worker of its own, and the threads that it runs.

A framework calls its saver from any thread and any loop, so the app of a ground has a loop and a thread of its own.
What is written goes to the store on the caller's own thread: a hop to another one costs as much as a fast commit.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from everstep.engine.background import on_a_thread
from everstep.engine.leases import outwait
from everstep.engine.lending import Lending
from everstep.errors import Misuse, StoreError, ThreadActive
from everstep.model.untrusted import logger
from everstep.stores.protocol import Busy, Failed, Refused, Verdict, WorkerRow
from everstep.stores.saved import FreeThread, SavedOperation, SavedReads, Taken, TakeThread, ThreadOwner

if TYPE_CHECKING:
    from everstep.engine.app import App
    from everstep.engine.blocking_app import BlockingApp

log = logger("everstep.adapters")

R = TypeVar("R")

BURY_SECONDS_MAX: Final = 3.0
BURY_PAUSE_SECONDS: Final = 0.05
RETURNS: Final = "threads to give back"
QUICK_SECONDS: Final = 0.002
"""What takes longer is not done on the loop of an application."""


class Offer:
    """An operation that somebody wants to be done, and what became of it."""

    def __init__(self, operation: SavedOperation) -> None:
        self.operation = operation
        self.settled = threading.Event()
        self._verdict: Verdict | None = None

    def settle(self, verdict: Verdict) -> None:
        """It was done, or refused, or has failed."""
        self._verdict = verdict
        self.settled.set()

    def result(self) -> Verdict:
        """Return the verdict, or raise why there is none."""
        assert self._verdict is not None
        if isinstance(self._verdict, Failed):
            raise self._verdict.error
        return self._verdict


class Ground:
    """A store that an adapter writes to, and the app that looks after it."""

    def __init__(self, blocking: "BlockingApp", *, owned: bool) -> None:
        self.blocking = blocking
        self.app: App = blocking.inner
        self.store = self.app.store
        self.now: Callable[[], int] = self.app.clock.now
        self.random_bits: Callable[[int], int] = self.app.randomness.getrandbits
        self._owned = owned
        self._lock = threading.Lock()
        self._taking = [threading.Lock() for _ in range(64)]
        self._committing = threading.Lock()
        self._offers: list[Offer] = []
        self._taken: dict[str, tuple[int, int]] = {}
        """The threads that run here: their epochs, and how many calls run each."""
        self._owed: dict[str, int] = {}
        """The epochs of threads that run here no more, and that the store has not taken back."""
        self.steps = Lending(blocking)
        self._born: dict[str, int] = {}
        self._calm = threading.local()
        self._seconds = 0.0

    @property
    def saved(self) -> SavedReads:
        """What the store has of threads and items."""
        self.blocking.refuse_elsewhere()
        return self.store.saved

    @property
    def worker(self) -> str:
        """This process among the workers, or nothing if it is not one yet."""
        return self.app.worker

    def close(self) -> None:
        """Give everything back. The app of somebody else stays open."""
        if self.blocking.is_elsewhere:
            return
        self._taken.clear()  # a worker that leaves runs nothing
        if self._owned:
            self._owned = False
            self.blocking.close()

    # -- writing --------------------------------------------------------------------------------------------------
    def commit(self, operation: SavedOperation, linger_seconds: float = 0.0, *, always: bool = False) -> Verdict:
        """Do an operation; it is durable on return. `always`: it waits for a busy store also on a loop.

        What several threads want to write at the same time goes into one transaction, by whoever of them comes first to
        it. One that lingers lets another come first for a moment.
        """
        self.blocking.refuse_elsewhere()
        offer, is_patient = Offer(operation), always or getattr(self._calm, "patient", True)
        with self._lock:
            self._offers.append(offer)
        if linger_seconds and is_patient and offer.settled.wait(linger_seconds):
            return offer.result()
        if not self._committing.acquire(blocking=is_patient):
            self._withdraw(offer)
            raise Busy
        try:
            if not offer.settled.is_set():
                self._commit_offers(offer, is_patient)
        finally:
            self._committing.release()
        return offer.result()

    def _commit_offers(self, own: "Offer", is_patient: bool) -> None:
        with self._lock:
            offers, self._offers = self._offers, []
        try:
            verdicts = self.store.commit([offer.operation for offer in offers], patient=is_patient)
        except Busy:
            with self._lock:
                self._offers[:0] = [offer for offer in offers if offer is not own]
            raise
        except BaseException as error:
            for offer in offers:
                offer.settle(Failed(error if isinstance(error, Exception) else StoreError("The commit was cut off.")))
            raise
        for offer, verdict in zip(offers, verdicts, strict=True):
            offer.settle(verdict)

    def _withdraw(self, own: "Offer") -> None:
        with self._lock:
            self._offers = [offer for offer in self._offers if offer is not own]

    async def soon(self, function: Callable[..., R], /, *args: Any) -> R:
        """Call a function that reads or writes the store: right here while that is quick, else on another thread.

        It may be begun twice: on the loop it gives up, before it has changed anything, when the store is busy.
        """
        if self._seconds < QUICK_SECONDS:
            began = time.perf_counter()
            self._calm.patient = False
            try:
                return function(*args)
            except Busy:
                pass
            finally:
                self._calm.patient = True
                self._seconds += (time.perf_counter() - began - self._seconds) / 8
        began = time.perf_counter()
        result = await asyncio.to_thread(function, *args)
        self._seconds += (time.perf_counter() - began - self._seconds) / 64
        return result

    # -- running threads ------------------------------------------------------------------------------------------
    def take(self, thread: str) -> None:
        """Take the right to run a thread. Raises `ThreadActive` while another process has it."""
        if not self.worker:
            self.blocking.wait(self.app.become_worker())
        with self._taking[hash(thread) % len(self._taking)]:
            verdict = self._try_to_take(thread)
            if not isinstance(verdict, Taken):
                self._bury(self.saved.owner(thread))
                verdict = self._try_to_take(thread)
            if isinstance(verdict, Taken):
                self._taken[thread] = verdict.epoch, self._taken.get(thread, (0, 0))[1] + 1
                self._born[thread] = verdict.born
                self._owed.pop(thread, None)
                return
        raise self.active(thread)

    def _bury(self, there: ThreadOwner | None) -> None:
        """Bury dead workers, and watch an owner that seems stopped. On a server a death is sure after a moment."""
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
        return self.commit(TakeThread(thread, self.worker, self.now()), always=True)

    def free(self, thread: str) -> None:
        """Give the right back, when nothing here runs the thread any more."""
        if self.blocking.is_elsewhere:
            return  # whoever has it still runs it
        with self._taking[hash(thread) % len(self._taking)]:
            epoch, calls = self._taken.get(thread, (0, 0))
            if calls > 1:
                self._taken[thread] = epoch, calls - 1
            elif calls:
                del self._taken[thread]
                self._born.pop(thread, None)
                try:
                    self.commit(FreeThread(thread, self.worker, epoch), always=True)
                except StoreError as error:
                    log.error("The thread %s cannot be given back just now: %s", thread, error)
                    self._owe(thread, epoch)

    def _owe(self, thread: str, epoch: int) -> None:
        """Try again until the store takes a thread back: nobody else could run it for as long as this worker lives."""
        self._owed[thread] = epoch
        try:
            self.app.loop.call_soon_threadsafe(self.app.background.keep, RETURNS, self._free_again)
        except RuntimeError:
            pass  # the app is closed, and with its worker all threads are free

    async def _free_again(self) -> None:
        await on_a_thread(self._free_owed)

    def _free_owed(self) -> None:
        for thread in list(self._owed):
            with self._taking[hash(thread) % len(self._taking)]:
                if thread in self._owed:  # else it was taken again meanwhile, at the same epoch
                    self.commit(FreeThread(thread, self.worker, self._owed[thread]), always=True)
                    del self._owed[thread]

    def born(self, thread: str) -> int:
        """Return when a thread that runs here was begun: one of the same name that was deleted is another."""
        return self._born.get(thread, 0)

    def epoch_of(self, thread: str) -> int:
        """Return the epoch at which this process runs a thread; 0 if it does not."""
        return self._taken.get(thread, (0, 0))[0]

    def active(self, thread: str, verdict: Refused | None = None) -> ThreadActive:
        """Return what tells whoever wants a thread that it is another's."""
        there = self.saved.owner(thread)
        owner = (there.owner if there is not None else None) or "another process"
        if verdict is not None and verdict.why == "fenced":
            said = f"The thread {thread!r} was taken over by {owner}: this process was thought to be gone. Nothing"
            return ThreadActive(f"{said} of it was written from here, and {owner} goes on with it.", owner)
        return ThreadActive(
            f"The thread {thread!r} is being run by {owner} in {self.store.url}. Wait until it has ended, or ask that "
            "process: a thread is run by one process at a time.",
            owner,
        )


def ground_of(where: Any, **options: Any) -> Ground:
    """Return a ground: on an app that is open already, or on one of its own for a URL."""
    from everstep.engine.blocking_app import BlockingApp
    from everstep.engine.opening import open as open_app

    if isinstance(where, BlockingApp):
        return Ground(where, owned=False)
    if where is not None and not isinstance(where, str):
        raise Misuse(
            f"A {type(where).__name__} cannot be shared: give the URL of the store, or the app of "
            "`with everstep.open() as app:`, which has a thread of its own."
        )
    return Ground(BlockingApp(open_app(where, **options)._make), owned=True)
