"""Stopping is not an outcome: what stops a program, or a task, says nothing about the work that it was raised in.

`KeyboardInterrupt`, `SystemExit`, `GeneratorExit`, and a cancellation that neither the engine nor a person wanted, cut
an attempt or a run's code off as a crash does. What was under way is settled by its contract in the next life.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from everstep.model.untrusted import Stopped, ends_process, is_a, members_of

V = TypeVar("V")

STOPS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
EXITS: Final = (KeyboardInterrupt, SystemExit)
"""Those that an event loop does not keep to itself."""


def stop_in(error: BaseException) -> BaseException | None:
    """Return the stop that an error is, or that a group of errors holds; None for an error that is an outcome."""
    if is_a(error, Stopped, *STOPS):
        return error
    if is_a(error, Exception):
        return None
    return next((stop for stop in map(stop_in, members_of(error)) if stop is not None), None)


def contained(error: BaseException) -> BaseException:
    """Return an error of code on a thread. A thread stops no process, so a stop is an ordinary error from there on."""
    return Stopped(error) if is_a(error, *STOPS) else error


async def contained_in(awaitable: Awaitable[V]) -> V:
    """Await a user's function. A stop of its own is an ordinary error from there on."""
    try:
        return await awaitable
    except EXITS as error:
        raise error if ends_process(error) else Stopped(error) from error


def pass_on(error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
    """Let an error that is to end the process do so, in a turn of its own: the engine has put its things in order."""
    if ends_process(error):
        loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error
