"""How workflow code calls steps and children: what is inside `asyncio.to_thread`, and what cannot be awaited."""

import functools
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any

from everstep.effects.surroundings import where_is
from everstep.errors import Misuse


def cannot_await(what: str, name: str, frame: FrameType) -> Misuse:
    """Return the error of a `def` workflow that calls something `async`."""
    return Misuse(
        f"{where_is(frame)} — the {what} {name} is `async`, and this workflow is `def`, which cannot await it: "
        f"make the workflow `async`, or {name} a `def`."
    )


def unwrap_to_thread(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """`asyncio.to_thread` hands over `partial(context.run, function, *args)`: return what is inside."""
    if isinstance(function, functools.partial):
        inner, kwargs = function.args + args, dict(function.keywords)
        if getattr(function.func, "__name__", "") == "run" and isinstance(
            getattr(function.func, "__self__", None), Context
        ):
            return inner[0], inner[1:], kwargs
        return function.func, inner, kwargs
    return function, args, {}
