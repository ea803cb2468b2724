"""Steps called outside of any workflow, in a framework whose calls are recorded here: each is a separate run.

The run has one step, and its id says where the call was made, so the same call made again finds it: contracts, fencing,
holds and retries are those of any run. The body runs where the call was made, on the caller's own thread or loop: what
it uses there, a client or a session, may be bound to it. The caller lends its thread or loop while it waits.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Final

from everstep.codec import Signature
from everstep.effects.step import Step
from everstep.effects.surroundings import CURRENT
from everstep.engine.app.app import App
from everstep.engine.app.blocking import BlockingApp
from everstep.engine.code.workflow import DECLARED, Workflow
from everstep.errors import Fatal, IdConflict, Misuse, NotDone
from everstep.model.ids import STEP_PREFIX

THREAD: Final = "thread"
"""The tag with the thread in which a step was called."""
SETTLE_SECONDS: Final = 1.0
"""How long an interrupted caller waits until its interruption is recorded, in seconds."""
WORKFLOWS_MAX: Final = 1000
"""The maximum number of recently called steps that are remembered."""
CALL: Final = "call"
"""The tag with the framework's call that made a run."""


class Lender:
    """A caller that waits, and runs the body meanwhile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._context = contextvars.copy_context()
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wanted: concurrent.futures.Future[Any] | None = None
        self._has_left = False

    def context(self) -> contextvars.Context:
        """Return the caller's context, in which the step's body is what is running."""
        context, body = self._context.copy(), CURRENT.get()
        context.run(CURRENT.set, body)
        return context

    async def perform(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the caller's thread run the body."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context = self.context()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(context.run(self.function, *args, **kwargs))
            except Exception as error:  # noqa: BLE001  # it is raised where the outcome is waited for
                done.set_exception(error)
            except BaseException:  # it is raised for the caller, and would end the loop of the app
                done.set_exception(InterruptedError("the caller of the step was interrupted in its body"))
                raise

        with self._lock:
            if self._has_left:
                raise NotDone("the caller of the step left before it began")
            self._wanted = done
        self.work.put(work)
        try:
            return await _to_the_end(asyncio.wrap_future(done))
        except concurrent.futures.CancelledError:
            raise NotDone("the caller of the step left before it began") from None

    def wait(self) -> None:
        """Run what is requested until nothing is requested any more."""
        try:
            while (work := self.work.get()) is not None:
                work()
        except BaseException:
            with self._lock:
                self._has_left = True
                if self._wanted is not None:
                    self._wanted.cancel()  # unless it runs, or has ended
            raise


class LoopLender(Lender):
    """A coroutine that waits, and whose loop runs the body meanwhile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._loop = asyncio.get_running_loop()

    async def perform(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the caller's loop run the body."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        context, begun = self.context(), list[asyncio.Task[Any]]()

        def begin() -> None:
            task = context.run(self._loop.create_task, self.function(*args, **kwargs), context=context)
            begun.append(task)
            task.add_done_callback(lambda task: _copy(task, done))

        self._loop.call_soon_threadsafe(begin)
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not waiting.done() and begun:
                self._loop.call_soon_threadsafe(begun[0].cancel)
            await asyncio.wait([waiting])
            raise


def _copy(task: "asyncio.Task[Any]", done: "concurrent.futures.Future[Any]") -> None:
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


async def _to_the_end(future: "asyncio.Future[Any]") -> Any:
    """Wait for something that cannot be cancelled: an attempt is not over before its body is."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


class Lending:
    """The runs of steps that a framework calls."""

    def __init__(self, blocking: "BlockingApp") -> None:
        self._blocking = blocking
        self._app: App = blocking.inner
        self._lenders: dict[str, Lender] = {}
        self._workflows: dict[Any, tuple[Workflow, Shape]] = {}

    def call(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: str,
        call: str,
        tags: dict[str, str],
        not_inside: Mapping[type[Exception], str] = MappingProxyType({}),
    ) -> Any:
        """Do a call of a step at a place: run the step, or return its recorded outcome.

        place: the id of the run. call: the framework's call. If that repeats the step with other arguments, it is
        refused; another call at the same place with other arguments is another run. not_inside: errors of the framework
        that no body may raise, with the message for each.
        """
        workflow, shape = self._workflow_of(step)
        given = shape.flat(args, kwargs)
        tags = {**tags, CALL: call}
        guarded = _guarded_async(step, not_inside) if step.is_async else _guarded(step, not_inside)
        body = shape.handing_through(guarded, args, kwargs)
        if step.is_async:
            return self._call_on_loop(workflow, body, given, place, tags)
        lender = Lender(body)
        done = self._begin(workflow, given, place, tags, lender)
        done.add_done_callback(lambda _: lender.work.put(None))
        try:
            lender.wait()
        except BaseException:
            concurrent.futures.wait([done], SETTLE_SECONDS)  # the result of the body is recorded first
            done.cancel()
            raise
        return done.result()

    async def _call_on_loop(
        self, workflow: Workflow, body: Callable[..., Any], given: tuple[Any, ...], place: str, tags: dict[str, str]
    ) -> Any:
        lender = LoopLender(body)
        return await asyncio.wrap_future(self._begin(workflow, given, place, tags, lender))

    def _begin(
        self, workflow: Workflow, given: tuple[Any, ...], place: str, tags: dict[str, str], lender: Lender
    ) -> "concurrent.futures.Future[Any]":
        doing: Coroutine[Any, Any, Any] = self._run(workflow, given, place, tags, lender)
        return self._blocking.begin(doing)

    async def _run(
        self, workflow: Workflow, given: tuple[Any, ...], place: str, tags: dict[str, str], lender: Lender
    ) -> Any:
        DECLARED.add(workflow)  # another step may have the same name
        try:
            return await self._attend(workflow, given, place, tags, lender)
        except IdConflict as conflict:
            row = await self._app.read(self._app.store.run, place)
            if row is None or row.workflow != workflow.name or row.tags.get(CALL) == tags[CALL]:
                raise IdConflict(
                    f"{workflow.name.removeprefix(STEP_PREFIX)} is called with other arguments than before at the same "
                    f"place ({place}), so it was not called again: what a node does before its effects must be the "
                    "same whenever it is repeated. Let a step do what is different each time."
                ) from conflict
        # Another branch of the thread did something else here.
        digest = self._app.codec.encode_arguments(workflow.signature, given, {}, workflow.name).digest
        others = await self._app.list(tags={CALL: tags[CALL], "place": place})
        if any(row.arguments != digest for row in others):
            raise IdConflict(f"{workflow.name.removeprefix(STEP_PREFIX)} is called with other arguments than before.")
        return await self._attend(workflow, given, f"{place}.{digest[:24]}", {**tags, "place": place}, lender)

    async def _attend(
        self, workflow: Workflow, given: tuple[Any, ...], run: str, tags: dict[str, str], lender: Lender
    ) -> Any:
        self._lenders[run] = lender
        try:
            handle = await self._app.start(workflow, *given, id=run, on_existing="retry", tags=tags)
            return await handle.result()
        finally:
            if self._lenders.get(run) is lender:
                del self._lenders[run]

    # -- the workflow of a step -----------------------------------------------------------------------------------
    def _workflow_of(self, step: Step) -> "tuple[Workflow, Shape]":
        # A method is another object each time, and one function may be several steps.
        underlying = getattr(step.function, "__func__", step.function)
        parts = (step.retry, step.probe, step.key, step.cost, step.fallback, step.not_done)
        which = (underlying, step.name, step.effect, step.timeout, step.limit, step.secret, *map(id, parts))
        known = self._workflows.pop(which, None) or self._made_for(step)
        self._workflows[which] = known  # it keeps the parts alive, so that their ids are not reused
        while len(self._workflows) > WORKFLOWS_MAX:
            self._workflows.pop(next(iter(self._workflows)), None)
        return known

    def _made_for(self, step: Step) -> "tuple[Workflow, Shape]":
        lent = step
        if step.effect != "atomic":  # an atomic step has a thread and a transaction of its own
            lent = object.__new__(type(step))
            lent.__dict__.update(step.__dict__)
            lent.__dict__["approval"] = False  # the caller has asked a person, if that is necessary
            lent.is_async = True
            lent.function = self._body_of(step)

        shape = Shape(step)

        async def only(*given: Any) -> Any:
            args, kwargs = shape.spread(given)
            return await (lent(*args, **kwargs) if lent.is_async else asyncio.to_thread(lent, *args, **kwargs))

        workflow = Workflow(only, name=STEP_PREFIX + step.name)
        workflow.signature = shape.signature
        return workflow, shape

    def _body_of(self, step: Step) -> Callable[..., Any]:
        async def body(*args: Any, **kwargs: Any) -> Any:
            current: Any = CURRENT.get()
            lender = self._lenders.get(current.run)
            if lender is not None:
                return await lender.perform(args, kwargs)
            if step.is_async:
                return await step.function(*args, **kwargs)
            return await asyncio.to_thread(step.function, *args, **kwargs)

        return body


def _guarded(step: Step, not_inside: Mapping[type[Exception], str]) -> Callable[..., Any]:
    def body(*args: Any, **kwargs: Any) -> Any:
        try:
            return step.function(*args, **kwargs)
        except tuple(not_inside) as error:
            raise _forbidden(step, error, not_inside) from None

    return body


def _guarded_async(step: Step, not_inside: Mapping[type[Exception], str]) -> Callable[..., Any]:
    async def body(*args: Any, **kwargs: Any) -> Any:
        try:
            return await step.function(*args, **kwargs)
        except tuple(not_inside) as error:
            raise _forbidden(step, error, not_inside) from None

    return body


def _forbidden(step: Step, error: Exception, not_inside: Mapping[type[Exception], str]) -> Fatal:
    said = next(text for kind, text in not_inside.items() if isinstance(error, kind))
    return Fatal(f"The step {step.name} {said}")


class Shape:
    """The parameters of a step as positions, because the parameters of a run have no names."""

    def __init__(self, step: Step) -> None:
        self._parameters = inspect.signature(step.function)
        kinds = {one.kind for one in self._parameters.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            raise Misuse(f"{step.name} takes any names (**): in a node of a graph it cannot be recorded.")
        self._has_names = inspect.Parameter.KEYWORD_ONLY in kinds
        if self._has_names and inspect.Parameter.VAR_POSITIONAL in kinds:
            raise Misuse(
                f"{step.name} takes any number of values and names: in a node of a graph it cannot be recorded."
            )
        self._live = step.signature.live
        if self._live and (inspect.Parameter.VAR_POSITIONAL in kinds or step.effect == "atomic"):
            raise Misuse(
                f"{step.name} has parameters that are handed through: in a node of a graph it cannot be recorded."
            )
        self._is_same = not self._has_names and not self._live
        self.signature = step.signature if self._is_same else self._all_positional(step)

    def _all_positional(self, step: Step) -> Signature:
        def flat(*given: Any) -> Any: ...

        annotations = step.signature.annotations
        flat.__annotations__ = dict(annotations)
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotations.get(name, Any))
                for name in self._parameters.parameters
                if name not in self._live
            ],
            return_annotation=annotations["return"],
        )
        return Signature(flat)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call without names."""
        if not kwargs and self._is_same:
            return args
        bound = self._parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        if self._is_same:
            return bound.args
        return tuple(value for name, value in bound.arguments.items() if name not in self._live)

    def spread(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as the step takes them."""
        if self._is_same:
            return given, {}
        stored = iter(given)
        names = self._parameters.parameters
        bound = inspect.BoundArguments(
            self._parameters, {name: None if name in self._live else next(stored) for name in names}
        )
        return bound.args, bound.kwargs

    def handing_through(
        self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """Return a body that gets unstored arguments from the caller itself."""
        if not self._live:
            return body
        own = self._parameters.bind(*args, **kwargs)
        own.apply_defaults()

        def with_live(*args: Any, **kwargs: Any) -> Any:
            bound = self._parameters.bind(*args, **kwargs)
            bound.arguments |= {name: own.arguments[name] for name in self._live}
            return body(*bound.args, **bound.kwargs)

        return with_live
