"""How workflow code ended: its result, its error, or the cancel that it followed."""

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from everstep.engine.commands import EndRun
from everstep.engine.stops import Stopped, stop_in
from everstep.errors import NotEncodable, RunTimedOut
from everstep.model.untrusted import cause_of, context_of, is_refusal, members_of, traceback_of

if TYPE_CHECKING:
    from everstep.engine.execution import Execution


class Failure(NamedTuple):
    """An error that the code was told of: the failure of a call. `secret`: of the error only its type is shown."""

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
        from everstep.engine.generations import ContinueRun, continued_by  # most code just returns

        if (wanted := continued_by(error)) is not None:
            return ContinueRun(wanted.arguments) if execution.cancel is None else _cancelled(execution)
        if (stop := stop_in(error)) is not None and not _origins(error, execution.failures):
            raise Stopped(stop)
        if (refusal := _refusal_in(error)) is not None and not _origins(error, execution.failures):
            raise refusal
        return _failed(execution, error)
    try:
        payload = execution.codec.encode(main.result(), execution.workflow.signature.result, "the result")
    except NotEncodable as refused:
        return _failed(execution, refused)
    return EndRun("run_completed", payload)


def _refusal_in(error: BaseException) -> BaseException | None:
    """Return what the machine refused the engine, in a command of the code or with one of its values; else None.

    What it refuses the code itself is an error of the code's like any other.
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
    payload = execution.codec.encode_error(error)
    return EndRun("run_failed", payload, cause, secret=any(failure.secret for failure in came_from))


def _origins(error: BaseException, failures: dict[int, Failure]) -> list[Failure]:
    """Return the failures of calls that this error is or came from, the nearest first; none if it is the code's own."""
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
