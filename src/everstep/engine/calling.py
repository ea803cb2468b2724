"""Calls between workflow code and its steps: what is handed over, and what comes back."""

import functools
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any

import msgspec

from everstep.codec import Signature
from everstep.effects.step import Step
from everstep.effects.surroundings import where_is
from everstep.engine.loop import WorkflowFuture, WorkflowLoop
from everstep.errors import Misuse, NotDecodable, OutsideInWorkflow
from everstep.model import mistakes

INLINE: set[str] = set()
"""Modules of frameworks that put plain functions of their users on threads. In a workflow those are workflow code."""


def is_inline(function: Callable[..., Any]) -> bool:
    """Tell whether a function that is to run on a thread is workflow code, as an adapter has said."""
    return getattr(function, "__module__", None) in INLINE


def called_inline(loop: WorkflowLoop, function: Callable[..., Any], args: tuple[Any, ...]) -> WorkflowFuture:
    """Call such a function here and now, and return a future that is done."""
    future = loop.create_future()
    try:
        future.set_result(function(*args))
    except Exception as error:  # noqa: BLE001 - whoever awaits it gets it
        future.set_exception(error)
    return future


def as_declared(value: Any, step: Step) -> Any:
    """A person gives plain JSON for an outcome: make it what the step says that it returns, if it can be that."""
    try:
        return msgspec.convert(value, step.signature.annotations.get("return", Any), strict=True)
    except (msgspec.ValidationError, TypeError):
        return value


def cannot_await(what: str, name: str, frame: FrameType | None) -> Misuse:
    """Return what is wrong with a call of something `async` by a `def` workflow."""
    wrong = mistakes.cannot_await(what, name)
    return Misuse(f"{where_is(frame)} — {wrong.what}: {wrong.remedy}.")


def blocks(what: str, name: str, line: str) -> OutsideInWorkflow:
    """Return what is wrong with a call of something that is `def` by an `async def` workflow."""
    wrong = mistakes.blocks(what, name)
    return OutsideInWorkflow(f"{line} — {wrong.what}: {wrong.remedy}.")


def not_running(name: str, run: str) -> Misuse:
    """Return what is wrong with a call made in the context of workflow code that is not running."""
    return Misuse(
        f"{name} was called in the context of the workflow of run {run}, and that is not running now: nobody would "
        "record the call. Call it in the workflow, or in a context of your own."
    )


def plain_function_on_thread(function: Any, line: str) -> OutsideInWorkflow:
    """Return what is wrong with a function on a thread that is no step."""
    wrong = mistakes.plain_function_on_thread(getattr(function, "__qualname__", repr(function)))
    return OutsideInWorkflow(f"{line + ' — ' if line else ''}{wrong.what}. {wrong.remedy}.")


def check_arguments(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The code may have other parameters by now than when the run was started."""
    try:
        signature.normalise(args, kwargs)
    except TypeError as error:
        raise NotDecodable(str(error)) from None


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
