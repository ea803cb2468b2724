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
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, Literal, TypeVar, overload

from everstep import files as async_files
from everstep.effects.witnesses import Judge, Witness
from everstep.engine.code import api
from everstep.engine.code.checkpoints import KEPT_MIN, take_checkpoint
from everstep.engine.code.execution import current_execution
from everstep.engine.code.greenlets import in_greenlet, on_greenlet, wait_in_greenlet
from everstep.engine.code.requests import Request
from everstep.errors import Misuse
from everstep.files import UNCHECKED, Path

T = TypeVar("T")

__all__ = ["Child", "approval", "checkpoint", "expect", "files", "gather", "receive", "requests", "sleep", "start"]


def _wait(what: str, awaitable: Any) -> Any:
    if not in_greenlet():
        awaitable.close()
        raise Misuse(
            f"everstep.blocking.{what}() is for `def` workflows; in an `async` one write `await everstep.{what}()`."
        )
    return wait_in_greenlet(awaitable)


def sleep(seconds: float) -> None:
    """Sleep durably: across a crash, and without a thread."""
    _wait("sleep", api.sleep(seconds))


@overload
def receive(name: str, type: type[T], *, timeout: float | None = ...) -> T: ...
@overload
def receive(name: str, type: Any = ..., *, timeout: float | None = ...) -> Any: ...
def receive(name: str, type: Any = Any, *, timeout: float | None = None) -> Any:
    """Wait for the next signal of this name. With `timeout=` (seconds): `TimeoutError` after it."""
    return _wait("receive", api.receive(name, type, timeout=timeout))


@overload
def approval(
    what: str, arguments: object, *, answer: type[T], timeout: float | None = ..., secret: bool = ...
) -> T: ...
@overload
def approval(
    what: str, arguments: object, *, answer: Any = ..., timeout: float | None = ..., secret: bool = ...
) -> Any: ...
def approval(
    what: str, arguments: object, *, answer: Any = Any, timeout: float | None = None, secret: bool = False
) -> Any:
    """Wait for a person's answer about just these arguments: see `everstep.approval`."""
    from everstep.engine.code.approvals import approval

    return _wait("approval", approval(what, arguments, answer=answer, timeout=timeout, secret=secret))


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


def expect(witness: Witness, *, on_drift: Literal["hold", "fail", "ignore"] | Judge = "hold") -> Any:
    """Remember a fact about the outside, and return it: see `everstep.expect`."""
    return _wait("expect", api.expect(witness, on_drift=on_drift))


class files:  # noqa: N801  # it stands for the module of the same name
    """`everstep.files` for `def` workflows, with the same functions."""

    @staticmethod
    def write(
        path: Path, content: str | bytes, *, expected: str | bytes | None = UNCHECKED, witness: bool = True
    ) -> None:
        """Give a file this content: see `everstep.files.write`."""
        _wait("files.write", async_files.write(path, content, expected=expected, witness=witness))

    @staticmethod
    def append(path: Path, content: str | bytes, *, witness: bool = True) -> None:
        """Append to a file, once."""
        _wait("files.append", async_files.append(path, content, witness=witness))

    @staticmethod
    def move(source: Path, target: Path, *, overwrite: bool = False, witness: bool = True) -> None:
        """Move a file."""
        _wait("files.move", async_files.move(source, target, overwrite=overwrite, witness=witness))

    @staticmethod
    def delete(path: Path, *, witness: bool = True) -> None:
        """Delete a file; one that is not there is deleted already."""
        _wait("files.delete", async_files.delete(path, witness=witness))

    @staticmethod
    def make_folder(path: Path) -> None:
        """Make a folder and those above it, as far as they are missing."""
        _wait("files.make_folder", async_files.make_folder(path))


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


def start(workflow: Any, *args: Any, id: str | None = None) -> Child:
    """Start a child run and go on; `child.result()` waits for it."""
    return Child(_wait("start", api.start(workflow, *args, id=id)))
