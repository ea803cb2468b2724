"""Calls that workflow code makes and drops: a coroutine that is never awaited would silently not happen."""

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from everstep.effects.surroundings import CURRENT, where_is

F = TypeVar("F", bound=Callable[..., Any])


class Unawaited:
    """The coroutines of calls in one run that have not begun."""

    def __init__(self) -> None:
        self.noted: dict[int, tuple[Coroutine[Any, Any, Any], str, str]] = {}
        """By the order of their making: with names and lines."""
        self.made = 0
        self._most = 8

    def note(self, awaited: Coroutine[Any, Any, Any], name: str, line: str) -> Any:
        """Note a coroutine of a call: a run whose code has dropped one does not complete. Returns it."""
        if len(self.noted) > self._most:  # only that of a step takes itself out when it begins
            self.noted = {made: one for made, one in self.noted.items() if _is_unbegun(one[0])}
            self._most = 2 * len(self.noted) + 8
        self.made += 1
        self.noted[self.made] = awaited, name, line
        return awaited

    def dropped(self) -> tuple[str, str] | None:
        """Return the name and the line of the first call that the code made and dropped, or None."""
        found = [noted for noted in self.noted.values() if _is_unbegun(noted[0])]
        self.noted.clear()
        for awaited, _, _ in found:
            awaited.close()
        return found[0][1:] if found else None


def _is_unbegun(awaited: Coroutine[Any, Any, Any]) -> bool:
    return inspect.getcoroutinestate(awaited) == inspect.CORO_CREATED


def awaited(function: F) -> F:
    """Note the calls of a coroutine function in workflow code: a run that has dropped one does not complete."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        current: Any = CURRENT.get()
        if getattr(current, "place", "") == "workflow" and not current.unwinding:
            current.unawaited.note(made, f"everstep.{function.__name__}", where_is(sys._getframe(1)))
        return made

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(call)
    return call  # type: ignore[return-value]
