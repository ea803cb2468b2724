"""Threads for the bodies of `def` steps.

A thread pool of the standard library makes a future with its own lock for each call and joins its threads at exit, so
that one body that never ends keeps the process alive. These threads are daemons, and one wake-up of the loop delivers
all bodies that have ended meanwhile.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from everstep.engine.code.stops import contained

AGAIN_SECONDS: Final = 0.1
"""Delay before the machine is asked again for a thread that it refused, in seconds."""
Done = Callable[[Any, BaseException | None], None]


class OnThread:
    """A body on a thread. `run` is its run, and `call` its step; 0 for a function that cannot act."""

    __slots__ = ("call", "done", "error", "function", "has_ended", "run", "value")

    def __init__(self, run: str, function: Callable[[], Any], done: Done, call: int) -> None:
        self.run = run
        self.call = call
        self.function = function
        self.done = done
        self.has_ended = False
        self.value: Any = None
        self.error: BaseException | None = None


class Threads:
    """Threads that are started at need."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        most: int,
        refused: Callable[[BaseException], float] = lambda error: AGAIN_SECONDS,
        works: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        """Called when the machine has no thread; returns the seconds after which to ask again."""
        self._works = works
        self._asks_again = self._is_closed = False
        self._loop = loop
        self._most = most
        self._count = 0
        self._waiting: queue.SimpleQueue[OnThread | None] = queue.SimpleQueue()
        self._acting: set[OnThread] = set()
        self._ended: deque[OnThread] = deque()
        self._is_woken = False

    def start(self, run: str, function: Callable[[], Any], done: Done, call: int = 0) -> None:
        """Call a function on a thread; `done` gets its value or its error, on the loop."""
        one = OnThread(run, function, done, call)
        self._acting.add(one)
        self._waiting.put(one)
        if self._count < len(self._acting) and self._count < self._most and not self._asks_again:
            self._add_threads()

    def _add_threads(self) -> None:
        """Start as many threads as there are bodies. While the machine has none, bodies wait, and it is asked again."""
        self._asks_again = False
        if self._is_closed:
            return  # a body that has found no thread does not begin any more
        try:
            while self._count < len(self._acting) and self._count < self._most:
                threading.Thread(target=self._work, name=f"everstep-step-{self._count + 1}", daemon=True).start()
                self._count += 1
        except (RuntimeError, MemoryError) as error:
            self._asks_again = True
            self._loop.call_later(self._refused(error), self._add_threads)
        else:
            self._works()

    def acting(self) -> list[OnThread]:
        """Return the bodies that are on a thread, awaited or not. May be called on any thread."""
        return [one for one in list(self._acting) if not one.has_ended]

    def is_acting(self, run: str, call: int) -> bool:
        """Return True if a body of this step is still on a thread."""
        return any(one.run == run and one.call == call for one in self.acting())

    def close(self) -> None:
        """End idle threads; those with a body end with it or with the process. A waiting body does not begin."""
        self._is_closed = True
        while True:
            try:
                waiting = self._waiting.get_nowait()
            except queue.Empty:
                break
            if waiting is not None:
                waiting.has_ended = True
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            try:
                one.value = one.function()
            except BaseException as error:  # noqa: BLE001  # the loop is told of whatever a body raises
                one.error = contained(error)
            one.has_ended = True
            self._ended.append(one)
            if not self._is_woken:
                self._is_woken = True
                if not self._wake():
                    return
            del one  # an idle thread must not keep a body's arguments alive

    def _wake(self) -> bool:
        """Wake the loop to deliver ended bodies. False if it is closed, so that nothing waits any more."""
        while True:
            try:
                self._loop.call_soon_threadsafe(self._bring_in)
                return True
            except RuntimeError:
                return False
            except MemoryError:
                time.sleep(AGAIN_SECONDS)

    def _bring_in(self) -> None:
        self._is_woken = False  # before reading the list: a body that ends now wakes the loop again
        try:
            while self._ended:
                one = self._ended.popleft()
                self._acting.discard(one)
                one.done(one.value, one.error)
        finally:
            if self._ended:  # an error of one body must not delay the others
                self._loop.call_soon(self._bring_in)
