"""Teardown is not execution: code that leaves memory is unwound, and nothing it does on the way is recorded."""

from contextvars import Context
from typing import Any, Final

from everstep.engine.guard import Silence
from everstep.engine.loop import SpinningWorkflow, WorkflowLoop
from everstep.errors import Evicted
from everstep.model.untrusted import logger

log = logger("everstep.workflow")

ROUNDS_MAX: Final = 100
_NEVER_CLOSED: Final[list[Any]] = []
"""Generators that refused to end. If they were dropped, the application's loop would run what is in their `finally`."""


def unwind(loop: WorkflowLoop, context: Context) -> None:
    """Raise `Evicted` wherever the code waits, until all its tasks are done and its generators closed.

    Generators are closed in a context in which the run is the current one. In any other, a step in their `finally`
    would be a plain function, and its body would run.
    """
    loop.quiet = True
    loop.forget_new_timers()
    loop.timers.clear()
    if not loop.tasks and not loop.has_asyncgens:
        return
    with Silence():
        _evict_tasks(loop)
        generators = loop.take_asyncgens()
        for generator in generators:
            loop.create_task(_close(generator), context=context)
        if loop.tasks and _drain(loop):
            _evict_tasks(loop)
    _NEVER_CLOSED.extend(one for one in generators if one.ag_frame is not None)
    if any(not task.done() for task in loop.tasks.values()):
        log.warning("Workflow code caught Evicted and went on; it was dropped from memory as it was.")
        for task in loop.tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.tasks.clear()


def _evict_tasks(loop: WorkflowLoop) -> None:
    for _ in range(ROUNDS_MAX):
        waiting = [task for task in loop.tasks.values() if not task.done()]
        for task in waiting:
            _wake_with_eviction(task)
        if not waiting or not _drain(loop):
            break


def _drain(loop: WorkflowLoop) -> bool:
    try:
        loop.drain()
    except SpinningWorkflow:
        return False
    return True


async def _close(generator: Any) -> None:
    try:
        await generator.aclose()
    except BaseException:  # noqa: BLE001  # whatever its `finally` raised: the run is leaving memory anyway
        pass


def _wake_with_eviction(task: Any) -> None:
    waiter = task._fut_waiter
    if waiter is None:
        task.cancel()  # it has not begun, or is about to run; its commands raise Evicted
    elif not waiter.done() and not hasattr(waiter, "_fut_waiter"):
        waiter.set_exception(Evicted())  # a plain future; one task that waits for another is woken by that other
        waiter.exception()  # retrieved: nobody needs to hear of it
