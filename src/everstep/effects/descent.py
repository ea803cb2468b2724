"""What the body of a step has started: tasks, threads, and calls that it gave to pools.

A body may fail, time out or be cancelled while something that it started goes on. Whether an attempt can still act
depends on that, too, so it is remembered which attempt started what. Tasks say it themselves: each has the context in
which it was created. Threads and pools of the standard library do not, so their two entrances are watched from the
first app on.

Not seen: processes, callbacks that were given to the loop (`call_later`), threads that were not started by `threading`,
and what code does that hides its context on purpose.
"""

import asyncio
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextvars import Context
from typing import Any, Final
from weakref import WeakKeyDictionary

from everstep.effects.body import StepBody
from everstep.effects.surroundings import CURRENT

OWN: Final = "everstep-"
"""How the names of this package's own threads begin. They are started wherever they are needed first."""

_threads: Final[WeakKeyDictionary[threading.Thread, StepBody]] = WeakKeyDictionary()
_calls: Final[WeakKeyDictionary["Future[Any]", StepBody]] = WeakKeyDictionary()
_watched: Final[set[type]] = set()
_in_pool: Final = threading.local()
"""Its `body`: the attempt for which this thread of a pool is at work."""


def body_above() -> StepBody | None:
    """Return the attempt in whose body this code runs, or whose body started the thread or pool's call it runs in."""
    current = CURRENT.get() or getattr(_in_pool, "body", None) or _threads.get(threading.current_thread())
    return current if isinstance(current, StepBody) else None


def started_by(is_meant: Callable[[StepBody], bool], loop: asyncio.AbstractEventLoop) -> Iterator[tuple[StepBody, str]]:
    """Yield what bodies have started and has not ended: the attempt, and what it is. May be called on any thread.

    The task that asks is not among them.
    """
    for future, body in list(_calls.items()):
        if is_meant(body) and not future.done():
            yield body, "a call that it gave to a pool of threads or processes"
    for thread, body in list(_threads.items()):
        if is_meant(body) and thread.is_alive():
            yield body, f"the thread {thread.name!r} that it started"
    if not loop.is_closed():
        for task in asyncio.all_tasks(loop):
            found = _context_of(task).get(CURRENT)
            if isinstance(found, StepBody) and is_meant(found) and not _is_current(task, loop):
                yield found, "the task of its body, or one that it started"


def _is_current(task: "asyncio.Task[Any]", loop: asyncio.AbstractEventLoop) -> bool:
    return asyncio._get_running_loop() is loop and asyncio.current_task(loop) is task


if sys.version_info >= (3, 12):

    def _context_of(task: "asyncio.Task[Any]") -> Context:
        return task.get_context()

else:

    def _context_of(task: "asyncio.Task[Any]") -> Context:
        """Return the context of a task, which Python 3.11 shows to its garbage collector only."""
        return next((one for one in gc.get_referents(task) if isinstance(one, Context)), Context())


def watch() -> None:
    """Note from now on which attempts start threads and give calls to pools. Nothing else of these is changed.

    Pools of processes are watched if they are loaded: that takes long, and most programs have none.
    """
    processes: Any = sys.modules.get("concurrent.futures.process")
    if threading.Thread not in _watched:
        threading.Thread.start = _noting_start(threading.Thread.start)  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = _noting_submit(ThreadPoolExecutor.submit)  # type: ignore[method-assign]
        _watched.add(threading.Thread)
    if processes is not None and processes.ProcessPoolExecutor not in _watched:
        processes.ProcessPoolExecutor.submit = _noting_submit(processes.ProcessPoolExecutor.submit)
        _watched.add(processes.ProcessPoolExecutor)


def _noting_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def noting(thread: threading.Thread) -> None:
        body = body_above()
        # A pool's threads serve all who give it calls, so those calls count, and not the threads.
        is_pools = getattr(thread, "_target", None) is pools._worker
        if body is not None and not is_pools and not thread.name.startswith(OWN):
            _threads[thread] = body
        start(thread)

    return noting


def _noting_submit(submit: Callable[..., "Future[Any]"]) -> Callable[..., "Future[Any]"]:
    @functools.wraps(submit)
    def noting(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        body = body_above()
        if body is None:
            return submit(pool, function, *args, **kwargs)
        if isinstance(pool, ThreadPoolExecutor):
            function = functools.partial(_call_for, body, function)
        future = submit(pool, function, *args, **kwargs)
        _calls[future] = body
        return future

    return noting


def _call_for(body: StepBody, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before = getattr(_in_pool, "body", None)
    _in_pool.body = body
    try:
        return function(*args, **kwargs)
    finally:
        _in_pool.body = before
