"""A stop is not an outcome: an exception that stops a program, or a task, says nothing about the interrupted work.

`KeyboardInterrupt`, `SystemExit`, `GeneratorExit`, and a cancellation that neither the engine nor a person requested,
cut an attempt or a run's code off as a crash does. Work in progress is settled by its contract when the run is resumed.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from everstep.model.untrusted import Stopped, ends_process, is_a, members_of

V = TypeVar("V")

STOPS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
EXITS: Final = (KeyboardInterrupt, SystemExit)
"""Stops that an event loop passes on."""


def stop_in(error: BaseException) -> BaseException | None:
    """Return the stop that an error is, or that a group of errors contains; None for an error that is an outcome."""
    if is_a(error, Stopped, *STOPS):
        return error
    if is_a(error, Exception):
        return None
    return next((stop for stop in map(stop_in, members_of(error)) if stop is not None), None)


def contained(error: BaseException) -> BaseException:
    """Return an error of code on a thread. A thread stops no process, so a stop becomes an ordinary error."""
    return Stopped(error) if is_a(error, *STOPS) else error


async def contained_in(awaitable: Awaitable[V]) -> V:
    """Await a user's function. Its own stop becomes an ordinary error."""
    try:
        return await awaitable
    except EXITS as error:
        raise error if ends_process(error) else Stopped(error) from error


def pass_on(error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
    """Raise an error that ends the process, in a separate turn of the loop, after the engine has finished its
    bookkeeping.
    """
    if ends_process(error):
        loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error
