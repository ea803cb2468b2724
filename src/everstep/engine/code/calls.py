"""Calls between workflow code and its steps: arguments, outcomes and errors."""

import asyncio
import functools
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from everstep.codec import Signature, near
from everstep.effects.step import Step
from everstep.effects.surroundings import where_is
from everstep.engine.code.commands import EndRun
from everstep.engine.code.generations import ContinueRun, continued_by
from everstep.engine.code.guard import is_users
from everstep.engine.code.loop import WorkflowFuture, WorkflowLoop
from everstep.engine.code.stops import stop_in
from everstep.errors import Misuse, NotDecodable, NotEncodable, OutsideInWorkflow, RunTimedOut
from everstep.model import mistakes
from everstep.model.untrusted import Stopped, cause_of, context_of, is_refusal, members_of, traceback_of

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


INLINE: set[str] = set()
"""Modules of frameworks that run plain functions of users on threads. In a workflow those are workflow code."""


def is_inline(function: Callable[..., Any]) -> bool:
    """Return True if a function for a thread is workflow code, according to an adapter."""
    return getattr(function, "__module__", None) in INLINE


def called_inline(loop: WorkflowLoop, function: Callable[..., Any], args: tuple[Any, ...]) -> WorkflowFuture:
    """Call such a function at once, and return a finished future."""
    future = loop.create_future()
    try:
        future.set_result(function(*args))
    except Exception as error:  # noqa: BLE001 - the code that awaits it gets it
        future.set_exception(error)
    return future


def as_declared(value: Any, step: Step) -> Any:
    """Convert a person's plain JSON to the step's return type, if that is possible."""
    try:
        return msgspec.convert(value, step.signature.annotations.get("return", Any), strict=True)
    except (msgspec.ValidationError, TypeError):
        return value


def cannot_await(what: str, name: str, frame: FrameType | None) -> Misuse:
    """Return the error for a call of something `async` by a `def` workflow."""
    wrong = mistakes.cannot_await(what, name)
    return Misuse(f"{where_is(frame)} — {wrong.what}: {wrong.remedy}.")


def blocks(what: str, name: str, line: str) -> OutsideInWorkflow:
    """Return the error for a call of something `def` by an `async def` workflow."""
    wrong = mistakes.blocks(what, name, line.partition(": ")[2])
    return OutsideInWorkflow(f"{line} — {wrong.what}: {wrong.remedy}.")


def not_running(name: str, run: str) -> Misuse:
    """Return the error for a call in the context of workflow code that is not running."""
    return Misuse(
        f"{name} was called in the context of the workflow of run {run}, and that is not running now, so the "
        "call would not be recorded. Call it in the workflow, or in a context of your own."
    )


def plain_function_on_thread(function: Any, line: str) -> OutsideInWorkflow:
    """Return the error for a function on a thread that is not a step."""
    wrong = mistakes.plain_function_on_thread(getattr(function, "__qualname__", repr(function)))
    return OutsideInWorkflow(f"{line + ' — ' if line else ''}{wrong.what}. {wrong.remedy}.")


def check_arguments(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the arguments, because the code's parameters may have changed since the run was started."""
    try:
        signature.normalise(args, kwargs)
    except TypeError as error:
        raise NotDecodable(str(error)) from None


def unwrap_to_thread(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function and arguments inside a call of `asyncio.to_thread`, which passes `partial(context.run,
    …)`.
    """
    if isinstance(function, functools.partial):
        inner, kwargs = function.args + args, dict(function.keywords)
        if getattr(function.func, "__name__", "") == "run" and isinstance(
            getattr(function.func, "__self__", None), Context
        ):
            return inner[0], inner[1:], kwargs
        return function.func, inner, kwargs
    return function, args, {}


async def within(future: "asyncio.Future[Any]", seconds: float, what: str, source: str) -> Any:
    """Wait for something from outside, but not too long. The error's note says what did not come.

    (A note, because the text of the error is part of what the code of earlier releases has seen.)
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await future
    except TimeoutError as error:
        if limit.expired():
            error.add_note(f"{NOT_COME}{what} did not come within {seconds:g} s{f' at {source}' if source else ''}.")
        raise


NOT_COME: Final = "Everstep: "


def clear(error: BaseException) -> BaseException:
    """Return a run's failure in clearer words, where Python's own say too little."""
    if type(error) is TimeoutError and not error.args:
        said = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOT_COME)]
        return _instead_of(error, TimeoutError(said[0].removeprefix(NOT_COME))) if said else error
    if type(error) is RuntimeError and error.args == (LOOP_RUNS,):
        return _instead_of(error, OutsideInWorkflow(mistakes.starts_a_loop("asyncio.run").at(_place_of(error))))
    members = members_of(error)
    while len(members) == 1 and members_of(members[0]):
        members = members_of(members[0])
    if len(members) != 1 or type(members[0]) is not OutsideInWorkflow:
        return error
    place = _place_of(error)
    if not place or place in str(members[0]):
        return members[0]
    return _instead_of(members[0], OutsideInWorkflow(f"{members[0]} The code is at {place}."))


LOOP_RUNS: Final = "asyncio.run() cannot be called from a running event loop"


def _instead_of(error: BaseException, clearer: BaseException) -> BaseException:
    clearer.__cause__, clearer.__suppress_context__ = error.__cause__, True
    return clearer.with_traceback(traceback_of(error))


def _place_of(error: BaseException) -> str:
    """Return the last line of the application's code that an error went through."""
    traceback, place = traceback_of(error), ""
    while traceback is not None:
        if is_users(traceback.tb_frame.f_code.co_filename):
            place = where_is(traceback.tb_frame)
        traceback = traceback.tb_next
    return place


class Failure(NamedTuple):
    """The failure of a call, as the code saw it. `secret`: of the error only its type is shown."""

    error: BaseException
    call: int
    secret: bool = False


def end_of(execution: "Execution", *, cancelled_late: bool) -> EndRun:
    """Return the command that ends the run, for code that is done.

    cancelled_late: the cancel came when the code had finished and its end was not durable.
    """
    main = execution.main
    assert main is not None
    if cancelled_late:
        return _cancelled(execution)
    if main.cancelled():
        return _cancelled(execution) if execution.cancel is not None else _failed(execution, asyncio.CancelledError())
    error = main.exception()
    if error is not None:
        if (wanted := continued_by(error)) is not None:
            return ContinueRun(wanted.arguments) if execution.cancel is None else _cancelled(execution)
        if (stop := stop_in(error)) is not None and not _origins(error, execution.failures):
            raise Stopped(stop)
        if (refusal := _refusal_in(error)) is not None and not _origins(error, execution.failures):
            raise refusal
        return _failed(execution, error)
    try:
        payload = execution.codec.encode(
            main.result(), execution.workflow.signature.result, f"the result of {execution.workflow.name}"
        )
    except NotEncodable as refused:
        return _failed(execution, refused)
    end = EndRun("run_completed", payload)
    never = execution.unawaited.dropped()
    return end if never is None else _dropped(execution, end, *never)


def _dropped(execution: "Execution", end: EndRun, name: str, source: str) -> EndRun:
    """Return the end of a run whose code has made a call and dropped it: it fails, unless its history says otherwise.

    An earlier release let such a run complete, and a replay of that is no difference.
    """
    failed = _failed(
        execution, Misuse(mistakes.never_awaited(name).at(source or f"a line of {execution.workflow.name}"))
    )
    failed.otherwise = end
    return failed


def _refusal_in(error: BaseException) -> BaseException | None:
    """Return the machine's refusal of a resource to the engine, in a command of the code or one of its values; else
    None.

    A refusal to the code itself is an error of the code like any other.
    """
    traceback = traceback_of(error) if is_refusal(error) else None
    is_in_code = False
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.startswith("everstep.") and (is_in_code or module.startswith("everstep.codec.")):
            return error
        is_in_code = is_in_code or module.partition(".")[0] not in ("everstep", "asyncio")
        traceback = traceback.tb_next
    return next((found for found in map(_refusal_in, members_of(error)) if found is not None), None)


def _cancelled(execution: "Execution") -> EndRun:
    if execution.cancel is not None and execution.cancel.timeout:
        return _failed(execution, RunTimedOut(f"The run took longer than {execution.workflow.timeout} s."))
    return EndRun("run_cancelled")


def _failed(execution: "Execution", error: BaseException) -> EndRun:
    came_from = _origins(error, execution.failures)
    cause = came_from[0].call if came_from else 0
    with near(execution.workflow.function):
        payload = execution.codec.encode_error(clear(error))
    return EndRun("run_failed", payload, cause, secret=any(failure.secret for failure in came_from))


def _origins(error: BaseException, failures: dict[int, Failure]) -> list[Failure]:
    """Return the failures of calls from which this error came, the nearest first; none if it is the code's own."""
    seen: set[int] = set()
    found: list[Failure] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if id(one) in failures:
            found.append(failures[id(one)])
        todo += [context_of(one), cause_of(one), *members_of(one)]
    return found
