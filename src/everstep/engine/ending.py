"""How workflow code ended: its result, its error, or the cancel that it followed."""

import asyncio
from typing import TYPE_CHECKING

from everstep.engine.commands import EndRun
from everstep.errors import NotEncodable, RunTimedOut

if TYPE_CHECKING:
    from everstep.engine.execution import Execution


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
        return _failed(execution, error)
    try:
        payload = execution.codec.encode(main.result(), execution.workflow.signature.result, "the result")
    except NotEncodable as refused:
        return _failed(execution, refused)
    return EndRun("run_completed", payload)


def _cancelled(execution: "Execution") -> EndRun:
    if execution.cancel is not None and execution.cancel.timeout:
        return _failed(execution, RunTimedOut(f"The run took longer than {execution.workflow.timeout} s."))
    return EndRun("run_cancelled")


def _failed(execution: "Execution", error: BaseException) -> EndRun:
    cause = _cause(error, execution.failures)
    return EndRun("run_failed", execution.codec.encode_error(error), cause, cause in execution.secret_failures)


def _cause(error: BaseException, failures: dict[int, tuple[BaseException, int]]) -> int:
    """Return the call whose failure this error is or came from; 0 if it is the code's own."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if id(one) in failures:
            return failures[id(one)][1]
        todo += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            todo.extend(one.exceptions)
    return 0
