"""Threads for the bodies of `def` steps.

A thread pool of the standard library makes a future with its own lock for each call and joins its threads at exit, so
that one body that never ends keeps the process alive. These threads are daemons, and one wake-up of the loop brings
in all bodies that have ended meanwhile.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Done = Callable[[Any, BaseException | None], None]


class Job:
    """A body on a thread. `run` is the run it acts for."""

    __slots__ = ("done", "error", "function", "run", "value")

    def __init__(self, run: str, function: Callable[[], Any], done: Done) -> None:
        self.run = run
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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._acting: set[Job] = set()
        self._ended: deque[Job] = deque()
        self._is_woken = False

    def start(self, run: str, function: Callable[[], Any], done: Done) -> None:
        """Call a function on a thread; `done` gets its value or its error, on the loop."""
        job = Job(run, function, done)
        self._acting.add(job)
        if self._count < len(self._acting) and self._count < self._most:
            self._count += 1
            threading.Thread(target=self._work, name=f"everstep-step-{self._count}", daemon=True).start()
        self._jobs.put(job)

    def acting_for(self) -> set[str]:
        """Return the runs for which a body is still on a thread, whether anybody waits for it or not."""
        return {job.run for job in self._acting}

    def close(self) -> None:
        """Let idle threads end. Those with a body end with it, or with the process."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.value = job.function()
            except BaseException as error:  # noqa: BLE001  # whatever a body raises is its outcome
                job.error = error
            self._ended.append(job)
            if not self._is_woken:
                self._is_woken = True
                try:
                    self._loop.call_soon_threadsafe(self._bring_in)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more
            del job  # an idle thread must not keep a body's arguments alive

    def _bring_in(self) -> None:
        self._is_woken = False  # before looking: a body that ends now wakes the loop again
        while self._ended:
            job = self._ended.popleft()
            self._acting.discard(job)
            job.done(job.value, job.error)
