"""What workflow code may use in addition to its steps: time, randomness, signals, published values, child runs."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, TypeVarTuple, overload

from everstep.effects.body import StepBody
from everstep.effects.step import Step
from everstep.effects.surroundings import CURRENT, persons_line
from everstep.effects.witnesses import Judge, Witness
from everstep.engine.code.calls import within
from everstep.engine.code.checkpoints import KEPT_MIN, take_checkpoint
from everstep.engine.code.commands import CallFuture
from everstep.engine.code.dropped import awaited
from everstep.engine.code.execution import current_execution
from everstep.engine.code.requests import RequestIterator
from everstep.engine.code.witnesses import release_witness, take_witness
from everstep.engine.code.workflow import workflow_of
from everstep.errors import Misuse
from everstep.model.durations import Duration
from everstep.model.ids import checked_name, checked_run_id
from everstep.model.options import (
    LONGEST_SECONDS,
    checked_choice,
    checked_kwargs,
    checked_seconds,
    checked_text,
    checked_timeout,
    checked_type,
    refuse_names,
)

if TYPE_CHECKING:
    from uuid import UUID


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now() -> datetime:
    """Return the run's clock (UTC): the time of its newest event. It never goes backwards within a run."""
    return EPOCH + timedelta(microseconds=current_execution("everstep.now()").loop.now)


def random() -> Random:
    """Return the run's own `random.Random`: it draws the same numbers in every replay."""
    return current_execution("everstep.random()").random()


def uuid() -> "UUID":
    """Return a new UUID that is the same in every replay."""
    from uuid import UUID

    return UUID(int=random().getrandbits(128), version=4)


@awaited
async def sleep(seconds: Duration) -> None:
    """Sleep durably: across a crash, for as long as it takes, and without memory. The same as `asyncio.sleep`."""
    await asyncio.sleep(checked_seconds("seconds", seconds, least=-LONGEST_SECONDS))


@overload
async def receive(name: str, type: type[T], *, timeout: Duration | None = ...) -> T: ...
@overload
async def receive(name: str, type: Any = ..., *, timeout: Duration | None = ...) -> Any: ...
@awaited
async def receive(name: str, type: Any = Any, *, timeout: Duration | None = None) -> Any:
    """Wait for the next signal of this name and return its value; after `timeout` seconds: `TimeoutError`."""
    execution = current_execution("everstep.receive()")
    timeout = checked_timeout(timeout)
    source = persons_line(sys._getframe(1))
    future = execution.receiving.receive(execution, checked_name(name, "signal"), checked_type("type", type), source)
    if timeout is None:
        return await future
    return await within(future, timeout, f"the signal {name!r}", source)


@overload
def requests(name: str, type: type[T], *, answer: Any = ...) -> RequestIterator[T]: ...
@overload
def requests(name: str, type: Any = ..., *, answer: Any = ...) -> RequestIterator[Any]: ...
def requests(name: str, type: Any = Any, *, answer: Any = Any) -> RequestIterator[Any]:
    """Return the requests of this name, one after the other, as they are asked with `run.ask(name, value)`.

        async for request in everstep.requests("rename", str):
            request.answer(await rename(request.value))

    type: what a request's value must be; another one is refused before the code sees it.
    answer: the type of the answers.
    """
    execution, name = current_execution("everstep.requests()"), checked_name(name, "request")
    return RequestIterator(execution, name, checked_type("type", type), checked_type("answer", answer))


def publish(name: str, value: Any) -> None:
    """Publish progress that anyone can read with `run.published()` and `everstep show`, once it is durable."""
    line = persons_line(sys._getframe(1))
    current_execution("everstep.publish()").publish(checked_name(name, "published value"), value, line)


async def expect(witness: Witness, *, on_drift: Literal["hold", "fail", "ignore"] | Judge = "hold") -> Any:
    """Remember a fact about the outside, and return it. It is observed again before the run resumes after a stop.

    on_drift: what happens if it is another one then: `hold` the run for a person (default), `fail` it with `Drift`,
        `ignore` it; or a function, `def` or `async def`, that is given the remembered and the new fact and returns one
        of these, or `"accept"`: the new fact takes the old one's place. It may touch the outside; what it says is
        recorded.
    """
    execution = current_execution("everstep.expect()")
    line = persons_line(sys._getframe(1))
    if not callable(on_drift):
        checked_choice("on_drift", on_drift, ("hold", "fail", "ignore"))
    observe = Step(witness.observe, name="everstep.observe", effect="read")
    fact = await execution.issue_step(observe, (), {}, line)
    take_witness(execution, witness, fact, on_drift, line)
    return fact


def release(witness: Witness) -> None:
    """Remember a fact no longer: from now on it may change."""
    release_witness(current_execution("everstep.release()"), witness.subject, persons_line(sys._getframe(1)))


async def checkpoint(state: T, *, every: int | None = None, keep: int = KEPT_MIN) -> T:
    """Record the state of a long loop, and return it: after a crash the run resumes from the newest one.

        state = State(todo=urls)
        while state.todo:
            state = await everstep.checkpoint(state)
            ...

    The first call of a resumed run returns the newest recorded state, whatever it is given. So all that the loop
    needs must be in the state, or be computed before the first call. Nothing else may be under way. In an `except` or
    `finally` block nothing is recorded.

    every: after how many steps (children, timers and signals count too) it is recorded again. By default after every
        effect, every step that took a while, and everything else that is not just a quick `read`.
    keep: how many of the newest are kept, in case that one is damaged; at least 3.
    """
    value: T = take_checkpoint(current_execution("everstep.checkpoint()"), state, every, keep, sys._getframe(1))
    return value


def patched(name: str) -> bool:
    """Tell whether this run goes the new way: True if its code came here first with the patch, and so ever after.

    Guard a change of a workflow with `if everstep.patched("name"): new… else: old…`; runs that are under way keep the
    old way, new runs take the new one. `everstep replay` says when the old way can go.
    """
    return current_execution("everstep.patched()").patched(checked_text("name", name))


class Child(Generic[T]):
    """A child run that was started by workflow code."""

    def __init__(self, id: str, future: CallFuture) -> None:
        self.id = id
        self._future = future
        self._is_told = False
        future.add_done_callback(_retrieve)

    async def result(self) -> T:
        """Wait for the child's end; return its result or raise its failure. Giving up waiting does not cancel it."""
        return await asyncio.shield(self._future)

    def cancel(self) -> bool:
        """Ask the child to stop, whatever its `on_parent_end`. Returns False if it has ended already.

        `result()` still waits for its end: it raises `RunCancelled` once the child has stopped, and returns its result
        if it was quicker.
        """
        if self._future.done():
            return False
        if not self._is_told:
            self._is_told = True
            self._future.execution.cancel_child(self._future.target)
        return True


def _retrieve(future: Any) -> None:
    if not future.cancelled():
        future.exception()  # a child's failure that the code does not wait for is no error of this run


@overload
async def start(workflow: Callable[[*Ts], Coroutine[Any, Any, T]], /, *args: *Ts, id: str | None = ...) -> Child[T]: ...
@overload
async def start(workflow: Callable[[*Ts], T], /, *args: *Ts, id: str | None = ...) -> Child[T]: ...
@overload
async def start(
    workflow: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, kwargs: Mapping[str, Any], id: str | None = ...
) -> Child[T]: ...
@overload
async def start(
    workflow: Callable[..., T], /, *args: Any, kwargs: Mapping[str, Any], id: str | None = ...
) -> Child[T]: ...
@overload
async def start(
    workflow: str, /, *args: Any, kwargs: Mapping[str, Any] | None = ..., id: str | None = ...
) -> Child[Any]: ...
async def start(  # type: ignore[misc]  # as in App.start
    workflow: Any, /, *args: Any, kwargs: Mapping[str, Any] | None = None, id: str | None = None, **unknown: Any
) -> Child[Any]:
    """Start a child run and go on; `await child.result()` waits for it. Calling a workflow directly does both."""
    execution = current_execution("everstep.start()")
    refuse_names("everstep.start", unknown)
    target = workflow_of(workflow)
    run = checked_run_id(id) if id is not None else None
    future = execution.issue_child(target, args, checked_kwargs(kwargs), run, persons_line(sys._getframe(1)))
    assert future.target is not None
    return Child(future.target.run, future)  # type: ignore[union-attr]


class Current(NamedTuple):
    """Where the running code is: in which run, and, in a step's body, in which step and attempt."""

    run: str
    """The id of the run."""
    workflow: str
    """The name of its workflow."""
    step: str = ""
    """In a step's body: the step's name in this run, such as `ask#2` for the second call of `ask`."""
    attempt: int = 0
    """In a step's body: the number of the attempt, from 1."""
    details: Any = None
    """In a step's body: what the attempt before left with `heartbeat`."""


def current() -> Current:
    """Return which run (and step, and attempt) this code belongs to: `current().run`, `.workflow`, and in a step's body
    `.step`, `.attempt` and `.details`. See `Current`.
    """
    surroundings = CURRENT.get()
    if isinstance(surroundings, StepBody):
        body = surroundings
        return Current(body.run, body.workflow, body.step, body.attempt, body.details)
    if surroundings is None:
        raise Misuse("everstep.current() is for code inside a run; it was called outside of one.")
    execution = current_execution("everstep.current()")
    return Current(execution.run, execution.workflow.name)
