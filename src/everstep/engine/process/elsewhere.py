"""Threads that wait for the store instead of the loop, when it does not answer at once."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

THREADS_MAX: Final = 8
"""The maximum number of calls that wait on threads at the same time. Further calls wait for their turn: a store has
few connections.
"""

R = TypeVar("R")


class Elsewhere:
    """The calls of an app that wait on threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._busy = 0

    def call(self, function: Callable[[], R]) -> "asyncio.Future[R]":
        """Call a function on a thread. If the caller no longer waits, it is not begun, or its result is dropped."""
        future: asyncio.Future[R] = self._loop.create_future()
        self._waiting.append((future, function))
        self._begin()
        return future

    def _begin(self) -> None:
        while self._waiting and self._busy < THREADS_MAX:
            future, function = self._waiting.popleft()
            if future.done():
                continue
            self._busy += 1
            try:
                threading.Thread(target=self._work, args=(future, function), name="everstep-wait", daemon=True).start()
            except (RuntimeError, MemoryError):  # the machine has no thread, so the loop itself waits
                self._work(future, function)

    def _work(self, future: "asyncio.Future[Any]", function: Callable[[], Any]) -> None:
        try:
            told: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            told = (None, error)
        try:
            self._loop.call_soon_threadsafe(self._ended, future, *told)
        except RuntimeError:
            pass  # the loop is closed, and nothing is left to be told

    def _ended(self, future: "asyncio.Future[Any]", answer: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(answer)
        self._begin()


async def outlasted(future: "asyncio.Future[Any]") -> None:
    """Wait until a future has ended, even if the caller is cancelled meanwhile: that is raised afterwards."""
    stop: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as cancelled:
            stop = cancelled
    if stop is not None:
        raise stop


async def on_a_thread(function: Callable[..., R], *args: Any) -> R:
    """Call a function on a new thread. If the machine has none, call it right here.

    Not `asyncio.to_thread`: when its pool is refused a thread, the call stays in its queue, and is made some time
    later.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def tell(settle: Callable[[Any], None], what: Any) -> None:
        if not future.done():
            settle(what)

    def work() -> None:
        try:
            told: tuple[Callable[[Any], None], Any] = (future.set_result, function(*args))
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            told = (future.set_exception, error)
        try:
            loop.call_soon_threadsafe(tell, *told)
        except RuntimeError:
            pass  # the loop is closed

    try:
        threading.Thread(target=work, name="everstep-call", daemon=True).start()
    except (RuntimeError, MemoryError):
        return function(*args)
    return await future
