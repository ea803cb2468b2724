"""For `def` workflows: what `async` workflows await, as plain calls.

import everstep
from everstep import blocking

@everstep.workflow
def approve(order: str) -> bool:
    blocking.sleep(60)
    return blocking.receive("approved", bool, timeout=86400)
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import copy_context
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from everstep import files as async_files
from everstep.engine.code import api
from everstep.engine.code.approvals import approval as async_approval
from everstep.engine.code.checkpoints import KEPT_MIN, take_checkpoint
from everstep.engine.code.execution import current_execution
from everstep.engine.code.greenlets import in_greenlet, on_greenlet, wait_in_greenlet
from everstep.engine.code.requests import Request
from everstep.errors import Misuse
from everstep.model.durations import Duration

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Child", "approval", "checkpoint", "expect", "files", "gather", "receive", "requests", "sleep", "start"]


def _wait(what: str, awaitable: Any) -> Any:
    if not in_greenlet():
        awaitable.close()
        raise Misuse(
            f"everstep.blocking.{what}() is for `def` workflows; in an `async` one write `await everstep.{what}()`."
        )
    return wait_in_greenlet(awaitable)


def _blocking(function: Callable[P, Coroutine[Any, Any, T]], of: str = "") -> Callable[P, T]:
    """Make a plain call of what `async` workflows await."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        value: T = _wait(of + function.__name__, function(*args, **options))
        return value

    return call


sleep = _blocking(api.sleep)
expect = _blocking(api.expect)


@overload
def receive(name: str, type: type[T], *, timeout: Duration | None = ...) -> T: ...
@overload
def receive(name: str, type: Any = ..., *, timeout: Duration | None = ...) -> Any: ...
def receive(name: str, type: Any = Any, *, timeout: Duration | None = None) -> Any:
    """Wait for the next signal of this name. With `timeout=` (seconds): `TimeoutError` after it."""
    return _wait("receive", api.receive(name, type, timeout=timeout))


@overload
def approval(
    what: str, arguments: object, *, answer: type[T], timeout: Duration | None = ..., secret: bool = ...
) -> T: ...
@overload
def approval(
    what: str, arguments: object, *, answer: Any = ..., timeout: Duration | None = ..., secret: bool = ...
) -> Any: ...
def approval(
    what: str, arguments: object, *, answer: Any = Any, timeout: Duration | None = None, secret: bool = False
) -> Any:
    """Wait for a person's answer about just these arguments: see `everstep.approval`."""
    return _wait("approval", async_approval(what, arguments, answer=answer, timeout=timeout, secret=secret))


@overload
def requests(name: str, type: type[T], *, answer: Any = ...) -> Iterator[Request[T]]: ...
@overload
def requests(name: str, type: Any = ..., *, answer: Any = ...) -> Iterator[Request[Any]]: ...
def requests(name: str, type: Any = Any, *, answer: Any = Any) -> Iterator[Request[Any]]:
    """Give the requests of this name, one after the other: see `everstep.requests`."""
    asked = api.requests(name, type, answer=answer)
    while True:
        yield _wait("requests", asked.__anext__())


def gather(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions without arguments concurrently and return their results in order. The first error is raised."""
    current_execution("everstep.blocking.gather()")

    contexts = [copy_context() for _ in functions]  # each sees the caller's context variables, and changes its own

    async def together() -> list[Any]:
        loop = asyncio.get_running_loop()
        pairs = zip(functions, contexts, strict=True)
        tasks = [loop.create_task(on_greenlet(function), context=context) for function, context in pairs]
        return list(await asyncio.gather(*tasks))

    result: list[Any] = _wait("gather", together())
    return result


def checkpoint(state: T, *, every: int | None = None, keep: int = KEPT_MIN) -> T:
    """Record the state of a long loop, and return it: see `everstep.checkpoint`."""
    execution = current_execution("everstep.blocking.checkpoint()")
    if not in_greenlet():
        raise Misuse(
            "everstep.blocking.checkpoint() is for `def` workflows; in an `async` one write "
            "`await everstep.checkpoint()`."
        )
    value: T = take_checkpoint(execution, state, every, keep, sys._getframe(1))
    return value


class files:  # noqa: N801  # it stands for the module of the same name
    """`everstep.files` for `def` workflows, with the same functions."""

    write = staticmethod(_blocking(async_files.write, "files."))
    append = staticmethod(_blocking(async_files.append, "files."))
    move = staticmethod(_blocking(async_files.move, "files."))
    delete = staticmethod(_blocking(async_files.delete, "files."))
    make_folder = staticmethod(_blocking(async_files.make_folder, "files."))


class Child:
    """A child run that a `def` workflow started."""

    def __init__(self, child: api.Child[Any]) -> None:
        self.id = child.id
        self._child = child

    def result(self) -> Any:
        """Wait for the child's end; return its result or raise its failure."""
        return _wait("start", self._child.result())

    def cancel(self) -> bool:
        """Ask the child to stop."""
        return self._child.cancel()


def start(workflow: Any, *args: Any, kwargs: Mapping[str, Any] | None = None, id: str | None = None) -> Child:
    """Start a child run and go on; `child.result()` waits for it."""
    return Child(_wait("start", api.start(workflow, *args, kwargs=kwargs or {}, id=id)))
