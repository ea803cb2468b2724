"""The first turns of bodies: a body that ends without ever waiting needs no task of its own.

Bodies that are to start, of all runs of an app, take their first turn one after the other in one callback of the
application's loop, each in its own context and as the current task. Most often that is all: a task is made only for
one that has to wait, and only a body that waits costs a turn of the loop.

From CPython 3.12 on that is what an eager task does. Before, `_Task` stands for the task of a body in its first turn:
an object without a life of its own, which is made a real one at the first question that anybody asks it.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Final, Protocol

TURN_SECONDS: Final = 0.001
"""After so long the loop's other callbacks come first: bodies that lead to bodies must not keep it for themselves."""

Body = Coroutine[Any, Any, None]


class Starter(Protocol):
    """Whoever has bodies to start."""

    def begin(self, attempt: Any) -> Body | None:
        """Return the body of an attempt whose turn has come, or None if it is not wanted any more."""
        ...

    def goes_on(self, attempt: Any, task: "asyncio.Task[None]") -> None:
        """Take the task of a body that did not end in its first turn."""
        ...

    def stumble(self, error: BaseException) -> None:
        """A first turn could not be taken."""
        ...


class FirstTurns:
    """The bodies of an app that are about to start, in the order in which they may."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Starter, Any, str, Context]] = deque()
        self._is_coming = False

    def add(self, starter: Starter, attempt: Any, name: str, context: Context) -> None:
        """Let a body take its first turn soon."""
        self._waiting.append((starter, attempt, name, context))
        if not self._is_coming:
            self._is_coming = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        waiting, loop = self._waiting, self._loop
        came_before = len(waiting)  # they all have waited for this turn of the loop
        until = time.monotonic() + TURN_SECONDS
        try:
            while waiting:
                starter, attempt, name, context = waiting.popleft()
                try:
                    body = starter.begin(attempt)
                    if body is not None:
                        task = take_first_turn(body, loop, name, context)
                        if task is not None:
                            starter.goes_on(attempt, task)
                except Exception as error:  # noqa: BLE001  # it reaches this run alone
                    starter.stumble(error)
                came_before -= 1
                if came_before <= 0 and time.monotonic() > until:
                    break
        finally:
            self._is_coming = bool(waiting)
            if waiting:
                loop.call_soon(self._take)


if sys.version_info >= (3, 12):

    def take_first_turn(
        body: Body, loop: asyncio.AbstractEventLoop, name: str, context: Context
    ) -> "asyncio.Task[None] | None":
        """Run a body until it ends or has to wait. Then a task goes on with it, which is returned."""
        task = asyncio.Task(body, loop=loop, name=name, context=context, eager_start=True)
        return None if task.done() else task

else:
    from asyncio.tasks import _enter_task, _leave_task

    def take_first_turn(
        body: Body, loop: asyncio.AbstractEventLoop, name: str, context: Context
    ) -> "asyncio.Task[None] | None":
        """Run a body until it ends or has to wait. Then a task goes on with it, which is returned."""
        task = _new_task(_Task)
        task.given = (body, loop, name, context)
        _enter_task(loop, task)
        try:
            awaited = context.run(body.send, None)
        except StopIteration:
            return None
        finally:
            _leave_task(loop, task)
        _come_to_life(task).wait_for(awaited)
        return task

    class _Rest(Coroutine[Any, Any, None]):
        """What is left of a body after its first turn: what its task drives, should it need one."""

        __slots__ = ("_awaited", "_body", "_is_next")

        def __init__(self, body: Any) -> None:
            self._body = body
            self._awaited: Any = None
            self._is_next = True
            """Whether the task has not driven it yet."""

        def wait_for(self, awaited: Any) -> None:
            """Keep what the body waits for until its task takes over. It may be awaited by others until then."""
            self._awaited = awaited
            if getattr(awaited, "_asyncio_future_blocking", None):
                awaited._asyncio_future_blocking = False
                self._awaited = _Awaited(awaited)

        def send(self, value: Any) -> Any:
            if self._is_next:
                self._is_next = False
                awaited, self._awaited = self._awaited, None
                if awaited is not None:
                    return awaited.again() if type(awaited) is _Awaited else awaited
                if self._body.cr_frame is None:
                    raise StopIteration  # it ended in its first turn
            return self._body.send(value)

        def throw(self, error: Any, *others: Any) -> Any:
            """Its task was cancelled, or tells of what the body awaits in a wrong way."""
            self._is_next = False
            if self._body.cr_frame is None:
                raise error
            awaited, self._awaited = self._awaited, None
            # A task that is cancelled cancels what it waits for, and only through that the body; so it is here.
            if type(awaited) is _Awaited and awaited.future.cancel(*error.args):
                return awaited.again()
            return self._body.throw(error, *others)

        def close(self) -> None:
            self._body.close()

        def __await__(self) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:  # what debuggers and `repr` ask of a coroutine
            return getattr(self._body, name)

    class _Awaited:
        """A future that the body waits for as `await` does."""

        __slots__ = ("future",)

        def __init__(self, future: Any) -> None:
            self.future = future

        def again(self) -> Any:
            """Return it as `await` hands it to a task."""
            self.future._asyncio_future_blocking = True
            return self.future

    class _Task(asyncio.Task[None]):
        """The current task in a body's first turn. Whoever asks it anything finds a real task."""

        __slots__ = ("given",)
        given: Any
        """What a task is made of; then the rest of its body."""

        def __getattribute__(self, name: str) -> Any:
            _come_to_life(self)
            return getattr(self, name)

        def __await__(self) -> Any:
            _come_to_life(self)
            return self.__await__()

        __iter__ = __await__

        def __repr__(self) -> str:
            _come_to_life(self)
            return repr(self)

    class _LivingTask(asyncio.Task[None]):
        """The same, once it is one."""

        __slots__ = ("given",)

    _new_task: Final = _Task.__new__
    _given_to: Final = _Task.given.__get__  # not through __getattribute__

    def _come_to_life(task: Any) -> _Rest:
        """Make the task of a body that goes on: from the next turn of the loop on it drives the rest of it."""
        if type(task) is _Task:
            body, loop, name, context = _given_to(task)
            rest = _Rest(body)
            task.__class__ = _LivingTask  # type: ignore[assignment]  # with the same slots, so the same in memory
            task.given = rest
            _LivingTask.__init__(task, rest, loop=loop, name=name, context=context)
        given: _Rest = task.given
        return given
