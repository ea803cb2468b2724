"""Calls of graphs: where one begins, and how its end is noticed.

LangGraph does not tell a saver where a call of a graph begins and ends. Its loop asks for the checkpoint when it is
entered, and closes its stack when it is left. A call that fails while its loop is being entered leaves no loop: only
its run manager learns about it. And the end of a call that is garbage-collected is not reported at all.
"""

import asyncio
import weakref
from types import FrameType
from typing import Any, Final, NamedTuple

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler

from everstep.adapters import Ground, Right

FRAMES_MAX: Final = 4
"""The number of frames in which the graph's loop is looked for."""


class Asking(NamedTuple):
    """A graph that is just beginning and asks for its checkpoint."""

    loop: Any
    """LangGraph's loop."""
    on: asyncio.AbstractEventLoop | None
    may_be_left: bool
    """Whether async code streams it: such a stream is closed only a moment after it was left."""


def asking_in(frame: FrameType | None) -> Asking | None:
    """Return the graph that asks for its checkpoint, or None if the caller is no graph."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_code.co_name in ("__enter__", "__aenter__"):
            asking = frame.f_locals.get("self")
            if all(hasattr(asking, name) for name in ("stack", "checkpoint_config", "is_nested")):
                on = asyncio._get_running_loop() if frame.f_code.co_name == "__aenter__" else None
                return Asking(asking, on, on is not None and not is_called_in(frame, "ainvoke"))
        frame = frame.f_back
    return None


def is_called_in(frame: FrameType | None, *names: str) -> bool:
    """Return True if one of these functions is among the next callers."""
    for _ in range(FRAMES_MAX):
        if frame is not None and frame.f_code.co_name in names:
            return True
        frame = frame.f_back if frame is not None else None
    return False


def right_for(ground: Ground, thread: str, asking: Asking) -> Right:
    """Return the right to run a thread, for a call to take. It is given back however the call ends.

    Everything that notices the end is prepared before the right is taken: a call may be cut off at any moment.
    """
    loop = asking.loop
    right = Right(thread, loop, asking.on, may_be_left=asking.may_be_left)
    gone = weakref.finalize(loop, ground.free_later, right)
    gone.atexit = False

    def end(kind: type[BaseException] | None, *_: Any) -> None:
        if gone.detach() is not None:
            # An abandoned stream is closed wherever the garbage is collected, also while locks are held.
            (ground.free_later if kind is GeneratorExit else ground.free)(right)

    async def end_soon(*_: Any) -> None:
        if gone.detach() is not None:
            try:
                await ground.soon(ground.free, right)
            except BaseException:
                ground.free_later(right)  # it was cut off, and its turn on a thread may never have come
                raise

    handler: BaseCallbackHandler
    if asking.on is not None:
        loop.stack.push_async_exit(end_soon)
        handler = _FailedSoon(end_soon)
    else:
        loop.stack.push(end)
        handler = _Failed(end)
    if (manager := getattr(loop, "manager", None)) is not None:
        manager.handlers = [handler, *manager.handlers]  # a new list, because the other one is shared
    return right


class _Failed(BaseCallbackHandler):
    """A callback for LangGraph that receives the failure of a call, also before its loop was entered."""

    run_inline = True

    def __init__(self, end: Any) -> None:
        self._end = end

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        self._end(type(error))


class _FailedSoon(AsyncCallbackHandler):
    """The same in async code."""

    run_inline = True

    def __init__(self, end: Any) -> None:
        self._end = end

    async def on_chain_error(self, error: BaseException, **_: Any) -> None:
        await self._end()
