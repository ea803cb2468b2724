"""Threads for the bodies of `def` steps.

A thread pool of the standard library makes a future with its own lock for each call and joins its threads at exit, so
that one body that never ends keeps the process alive. These threads are daemons, and one wake-up of the loop brings
in all bodies that have ended meanwhile.
"""

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as pools
from typing import Any, TypeVar

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]


class OnThread:
    """A body on a thread. `run` is the run it acts for, and `call` the step; 0 for what cannot act."""

    __slots__ = ("call", "done", "error", "function", "run", "value")

    def __init__(self, run: str, function: Callable[[], Any], done: Done, call: int) -> None:
        self.run = run
        self.call = call
        self.function = function
        self.done = done
        self.value: Any = None
        self.error: BaseException | None = None


class Threads:
    """A few threads, started when they are needed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._count = 0
        self._waiting: queue.SimpleQueue[OnThread | None] = queue.SimpleQueue()
        self._acting: set[OnThread] = set()
        self._ended: deque[OnThread] = deque()
        self._is_woken = False
        self._left_behind: dict[tuple[str, int], set[tuple[int, int]]] = {}
        """What pools of threads did when a step's body failed, by run and call."""

    def start(self, run: str, function: Callable[[], Any], done: Done, call: int = 0) -> None:
        """Call a function on a thread; `done` gets its value or its error, on the loop."""
        one = OnThread(run, function, done, call)
        self._acting.add(one)
        if self._count < len(self._acting) and self._count < self._most:
            self._count += 1
            threading.Thread(target=self._work, name=f"everstep-step-{self._count}", daemon=True).start()
        self._waiting.put(one)

    def acting_for(self) -> set[str]:
        """Return the runs for which a body is still on a thread, whether anybody waits for it or not."""
        return {one.run for one in self._acting}

    def is_acting(self, run: str, call: int) -> bool:
        """Tell whether a body of this step, or work that it may have left behind, is still on a thread."""
        left = self._left_behind.get((run, call), set()) & busy_in_pools()
        if not left:
            self._left_behind.pop((run, call), None)
        return bool(left) or any(one.run == run and one.call == call for one in self._acting)

    def note_left_behind(self, run: str, call: int) -> None:
        """A body failed. What it gave to `asyncio.to_thread` may act on: remember all that pools do just now."""
        self._left_behind[run, call] = busy_in_pools()

    def close(self) -> None:
        """Let idle threads end. Those with a body end with it, or with the process."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            try:
                one.value = one.function()
            except BaseException as error:  # noqa: BLE001  # whatever a body raises is its outcome
                one.error = error
            self._ended.append(one)
            if not self._is_woken:
                self._is_woken = True
                try:
                    self._loop.call_soon_threadsafe(self._bring_in)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more
            del one  # an idle thread must not keep a body's arguments alive

    def _bring_in(self) -> None:
        self._is_woken = False  # before looking: a body that ends now wakes the loop again
        while self._ended:
            one = self._ended.popleft()
            self._acting.discard(one)
            one.done(one.value, one.error)


async def off_the_loop(function: Callable[..., T], *args: Any) -> T:
    """Call a function of the engine's own on a thread, which is no pool's: what pools do may be a body's work."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*args), None
        except BaseException as error:  # noqa: BLE001  # whatever it raises is raised to its caller
            outcome = None, error
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            pass  # the loop is closed: nothing waits any more

    threading.Thread(target=work, name="everstep-own", daemon=True).start()
    return await future


def busy_in_pools() -> set[tuple[int, int]]:
    """Return the work that pools of threads do just now, `asyncio.to_thread` among them: the thread and its frame."""
    found = set()
    for thread, newest in sys._current_frames().items():
        frame = newest
        while frame is not None:
            if frame.f_code is pools._WorkItem.run.__code__:
                found.add((thread, id(frame)))
            frame = frame.f_back  # type: ignore[assignment]
    return found
