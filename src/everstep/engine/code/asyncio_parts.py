"""The two parts of asyncio that are not deterministic on any loop, or differ between Python versions.

`asyncio.as_completed` puts coroutines into a set, and so makes their tasks in the order of memory addresses;
`asyncio.wait_for` was rewritten in Python 3.12. Inside a workflow the versions below take their place; everywhere else
the originals run, untouched.
"""

import asyncio
from asyncio import events
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Self

from everstep.engine.code.loop import WorkflowLoop


def _copy(function: Any) -> Any:
    """Return a copy of a function that does not change with it."""
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_as_completed = _copy(asyncio.as_completed)
_wait_for = _copy(asyncio.wait_for)


class Completions:
    """What `as_completed` returns: awaitables (with `async for`: tasks) in the order of their completion."""

    def __init__(self, awaitables: Iterable[Any], timeout: float | None) -> None:
        loop = events.get_running_loop()
        unique = dict.fromkeys(awaitables)
        self._todo = {asyncio.ensure_future(item, loop=loop): None for item in unique}
        self._left = len(self._todo)
        self._done: asyncio.Queue[Any] = asyncio.Queue()
        self._timer = None
        if self._todo and timeout is not None:
            self._timer = loop.call_later(timeout, self._time_out)
        for future in self._todo:
            future.add_done_callback(self._finish)

    def _finish(self, future: Any) -> None:
        if future in self._todo:
            del self._todo[future]
            self._done.put_nowait(future)
            if not self._todo and self._timer is not None:
                self._timer.cancel()

    def _time_out(self) -> None:
        for future in self._todo:
            future.remove_done_callback(self._finish)
            self._done.put_nowait(None)
        self._todo.clear()

    async def _next(self) -> Any:
        future = await self._done.get()
        if future is None:
            raise TimeoutError
        return future

    async def _next_result(self) -> Any:
        return (await self._next()).result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._next_result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        return await self._next()


def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
    """`asyncio.as_completed`, deterministic inside a workflow."""
    if isinstance(events._get_running_loop(), WorkflowLoop):
        if asyncio.isfuture(fs) or asyncio.iscoroutine(fs):
            raise TypeError(f"expect an iterable of futures, not {type(fs).__name__}")
        return Completions(fs, timeout)
    return _as_completed(fs, timeout=timeout)


async def wait_for(fut: Any, timeout: float | None) -> Any:
    """`asyncio.wait_for`, equal on every Python version inside a workflow."""
    if not isinstance(events._get_running_loop(), WorkflowLoop):
        return await _wait_for(fut, timeout)
    if timeout is not None and timeout <= 0:
        future = asyncio.ensure_future(fut)
        if future.done():
            return future.result()
        future.cancel()
        await asyncio.wait([future])  # a cancel of this task is raised here, and stays one
        try:
            return future.result()
        except asyncio.CancelledError as error:
            raise TimeoutError from error
    async with asyncio.timeout(timeout):
        return await fut


def _go_to_as_completed(fs: Any, *, timeout: float | None = None) -> Any:

    from everstep.engine.code.asyncio_parts import as_completed  # this code runs in asyncio's own module

    return as_completed(fs, timeout=timeout)


async def _go_to_wait_for(fut: Any, timeout: float | None) -> Any:

    from everstep.engine.code.asyncio_parts import wait_for  # this code runs in asyncio's own module

    return await wait_for(fut, timeout)


def install() -> None:
    """Replace both functions. Outside workflows they call the originals.

    The code of asyncio's functions is exchanged, not their names: a module that has imported `wait_for` before would
    otherwise keep the original.
    """
    asyncio.as_completed.__code__ = _go_to_as_completed.__code__
    asyncio.wait_for.__code__ = _go_to_wait_for.__code__
