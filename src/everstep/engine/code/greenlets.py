"""`def` workflows: plain functions that are suspended by switching stacks, without a thread."""

from collections.abc import Callable
from contextvars import copy_context
from types import FrameType
from typing import Any

import greenlet


class _Worker(greenlet.greenlet):
    """A stack that runs plain workflow code."""


async def on_greenlet(function: Callable[[], Any]) -> Any:
    """Run a plain function; whenever it waits, wait here in its place."""
    worker = _Worker(function)
    worker.gr_context = copy_context()
    waiting = worker.switch()
    while not worker.dead:
        try:
            value = await waiting
        except BaseException as error:  # noqa: BLE001  # it belongs to the code on the other stack
            worker.parent = greenlet.getcurrent()  # code that leaves memory is unwound on a separate stack
            waiting = worker.throw(error)
        else:
            worker.parent = greenlet.getcurrent()
            waiting = worker.switch(value)
    return waiting


def frame_behind(frame: FrameType) -> FrameType:
    """Return the frame where plain workflow code waits, if `frame` is the one that waits for it."""
    if frame.f_code is not on_greenlet.__code__:
        return frame
    worker: _Worker = frame.f_locals["worker"]
    return worker.gr_frame or frame


def in_greenlet() -> bool:
    """Return True if plain workflow code is running here."""
    return isinstance(greenlet.getcurrent(), _Worker)


def wait_in_greenlet(awaitable: Any) -> Any:
    """Suspend plain workflow code until the awaitable is done, and return its result."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    return parent.switch(awaitable)
