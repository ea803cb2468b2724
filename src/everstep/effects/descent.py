"""Which run or step the current code belongs to when the context does not say it; and what a step's body has begun that
has not ended.

`CURRENT` says it as long as code passes its context on. A task with an empty context, a thread and a pool do not. A
step that was called there as a plain function would be done without a record, and again in every replay. So code that
finds `CURRENT` empty asks here:

- The running loop is a workflow's: this is workflow code, and the call is recorded. - An outer frame, the thread, the
pool's call or the task was begun by a step's body: this is part of that body. - Neither: this is the application, and a
step is the plain function that it looks like.

Threads are seen when they are started, by the audit hook of the engine. Calls in pools are seen when they are
submitted: a pool outlives the body that used it first, so the caller that submitted the call counts, not the one that
started its thread. Tasks, and calls of other threads, are seen on the loops of open apps.

A body may fail, time out or be cancelled while something that it began is still running, and so the attempt may still
act: `begun_and_not_ended` finds that. What is not seen is in docs/howto/once.md.
"""

import asyncio
import functools
import gc
import sys
import threading
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from types import CodeType, FrameType
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from everstep.effects.body import Fate, StepBody, refuse_nested
from everstep.effects.step import Step
from everstep.effects.surroundings import CURRENT, Surroundings, see_code_with
from everstep.errors import Misuse
from everstep.model.untrusted import attribute, text_of

_MARK: Final = "_everstep_descent"
POOLS: Final = ("concurrent.futures.", "multiprocessing.queues")
"""Modules whose threads serve every caller."""

AttemptIn = Callable[[FrameType], StepBody | None]
_FRAMES: dict[CodeType, AttemptIn] = {}
"""The functions of the engine that call bodies, and how to find the attempt in a frame of each."""
_TASKS: "WeakKeyDictionary[asyncio.Task[Any], Descent]" = WeakKeyDictionary()
"""Tasks that a body began with their own context, and tasks that those began."""
_THREADS: "WeakSet[threading.Thread]" = WeakSet()
_CALLS: "WeakKeyDictionary[Future[Any], Descent]" = WeakKeyDictionary()
"""Calls that bodies submitted to pools."""
_CALLBACKS: "WeakSet[_Given]" = WeakSet()
"""Callbacks that threads of bodies gave to loops, and that have not been called yet."""
_SEEN_POOLS: set[type] = set()


class Descent(msgspec.Struct, frozen=True):
    """The attempt in which a thread, a pool's call or a task was begun: code there is part of that step's body.

    It names the attempt and holds no reference to it: a thread may live on long after its run has left memory.
    """

    place: ClassVar[str] = "step"
    wants_places: ClassVar[bool] = False

    worker: str
    run: str
    call: int
    step: str
    fate: Fate

    def call_step(self, step: "Step", args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        """Call a step as in the body itself: the plain function, if the outer step's contract covers it."""
        refuse_nested(step, self.step)
        return step.function(*args, **kwargs)

    def call_workflow(
        self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> Any:
        """Call a workflow as the plain function."""
        return workflow.function(*args, **kwargs)

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        """Refuse a charge, which belongs to an attempt that is still waited for."""
        raise Misuse(
            f"everstep.charge() was called on a thread or in a task that the step {self.step} began without its "
            "context. Start it with contextvars.copy_context().run(…), or use asyncio.to_thread."
        )


def bodies_run_in(function: Callable[..., Any], attempt_in: AttemptIn) -> None:
    """Register a function whose frames call the bodies of steps."""
    _FRAMES[function.__code__] = attempt_in


def _code_here() -> Surroundings | None:
    workflow: Surroundings | None = getattr(_get_running_loop(), "workflow_code", None)
    return workflow if workflow is not None else descent()


def descent() -> Descent | None:
    """Return the attempt that this code descends from; None if no step's body has begun it."""
    current = CURRENT.get()
    if isinstance(current, StepBody):
        return _named(current)
    found: Descent | None = getattr(threading.current_thread(), _MARK, None)
    if found is None and _TASKS and _get_running_loop() is not None:
        task = asyncio.current_task()
        found = _TASKS.get(task) if task is not None else None
    return found or _descent_by_frames()


def _named(body: StepBody) -> Descent:
    return Descent(body.worker(), body.run, body.number(), body.step, body.shared_fate())


def _descent_by_frames() -> Descent | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        attempt_in = _FRAMES.get(frame.f_code)
        if attempt_in is not None and (body := attempt_in(frame)) is not None:
            return _named(body)
        frame = frame.f_back
    return None


# -- what a body begins ---------------------------------------------------------------------------------------
def install() -> None:
    """From the first run on, find the owner of code with an empty context, and see what bodies submit to pools.

    Pools of processes are seen if they are loaded: that takes long, and most programs have none.
    """
    see_code_with(_code_here)
    processes: Any = sys.modules.get("concurrent.futures.process")
    for pool in (ThreadPoolExecutor, processes and processes.ProcessPoolExecutor):
        if pool is not None and pool not in _SEEN_POOLS:
            _SEEN_POOLS.add(pool)
            pool.submit = _seen(pool.submit, on_threads=pool is ThreadPoolExecutor)  # type: ignore[method-assign]


def _seen(submit: Any, *, on_threads: bool) -> Any:
    @functools.wraps(submit)
    def submit_seen(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        begun_in = descent()
        if begun_in is None:
            return submit(pool, function, *args, **kwargs)
        given = _Given(begun_in, function) if on_threads else function
        try:
            future = submit(pool, given, *args, **kwargs)
        except BaseException:
            if type(given) is _Given:
                given.is_refused = True
            raise
        _CALLS[future] = begun_in
        return future

    return submit_seen


class _Given:
    """A function that a body gave to a pool of threads, or to a loop: called there, it is part of that body.

    A pool that is refused a new thread raises, and has the call in its queue all the same: a thread that it gets later
    would make a call whose caller saw a failure. Such a call does nothing.
    """

    __slots__ = ("__weakref__", "_function", "begun_in", "is_refused")

    def __init__(self, begun_in: Descent, function: Callable[..., Any]) -> None:
        self.begun_in = begun_in
        self._function = function
        self.is_refused = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_refused:
            return None
        thread = threading.current_thread()
        before = getattr(thread, _MARK, None)
        setattr(thread, _MARK, self.begun_in)
        try:
            return self._function(*args, **kwargs)
        finally:
            setattr(thread, _MARK, before)
            _CALLBACKS.discard(self)


def note_thread(starting: Any) -> None:
    """Note that this function starts a thread: the threads that a body starts are part of that body.

    Not those of a pool, which serve every caller, and not the engine's, which have names of their own.
    """
    thread = getattr(starting, "__self__", None)
    if not isinstance(thread, threading.Thread):
        return
    module = _module_of(getattr(thread, "_target", None) or type(thread))
    is_of_engine = module.partition(".")[0] == "everstep" and thread.name.startswith("everstep")
    if not module.startswith(POOLS) and not is_of_engine:
        begun_in = descent()
        if begun_in is not None:
            setattr(thread, _MARK, begun_in)
            _THREADS.add(thread)


def _module_of(function: object) -> str:
    return text_of(attribute(function, "__module__") or "")


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, count what bodies begin on this loop without their context as part of them.

    That is a task with its own context, and every call of a body's thread there.
    """
    create, call_soon_threadsafe = loop.create_task, loop.call_soon_threadsafe
    if getattr(create, "__name__", "") == "create_task_seen":
        return

    def create_task_seen(coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        if context is None and not _TASKS and not _CALLBACKS:
            return create(coroutine, **options)  # its context is a copy of this one
        begun_in = descent()
        task = create(coroutine, **options)
        if begun_in is not None and (context.get(CURRENT) if context is not None else CURRENT.get()) is None:
            _TASKS[task] = begun_in
        return task

    def call_soon_threadsafe_seen(callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if _get_running_loop() is not loop:
            body = CURRENT.get()
            thread = threading.current_thread()
            begun_in = _named(body) if isinstance(body, StepBody) else getattr(thread, _MARK, None)
            if begun_in is not None and not _module_of(callback).startswith("everstep."):
                callback = _Given(begun_in, callback)
                _CALLBACKS.add(callback)
        return call_soon_threadsafe(callback, *args, **options)

    try:
        loop.create_task = create_task_seen  # type: ignore[method-assign, assignment]
        loop.call_soon_threadsafe = call_soon_threadsafe_seen  # type: ignore[method-assign, assignment]
    except AttributeError:
        pass  # a loop that takes no attributes: such tasks are not seen there


# -- what has not ended ------------------------------------------------------------------------------------------------
def begun_and_not_ended(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[Descent, str]]:
    """Yield what bodies have begun on this loop, on threads and in pools, with a description. May be called on any
    thread.

    The bodies on the loop are included, but not the task that asks. What an attempt whose outcome is known, or a
    `read`, has begun does not count: a library may have started a thread that never ends.
    """
    for future, begun_in in _snapshot(_CALLS.items):
        if not (begun_in.fate.is_settled or future.done()):
            yield begun_in, "a call that it gave to a pool"
    for thread in _snapshot(_THREADS.copy):
        begun_in = getattr(thread, _MARK)
        if thread.is_alive() and not begun_in.fate.is_settled:
            yield begun_in, f"the thread {thread.name!r} that it started"
    for given in _snapshot(_CALLBACKS.copy):
        if not given.begun_in.fate.is_settled:
            yield given.begun_in, "a callback that it gave to the loop"
    if loop.is_closed():
        return
    asks = asyncio.current_task(loop) if _get_running_loop() is loop else None
    for task in asyncio.all_tasks(loop):
        body = _context_of(task).get(CURRENT)
        found = _named(body) if isinstance(body, StepBody) else _TASKS.get(task)
        if found is not None and not found.fate.is_settled and task is not asks:
            yield found, "the task of its body, or one that it began"


def _snapshot(items: Callable[[], Any]) -> list[Any]:
    """Return the content of a weak collection, which other threads may be changing."""
    while True:
        try:
            return list(items())
        except RuntimeError:  # it was changed meanwhile
            continue


if sys.version_info >= (3, 12):

    def _context_of(task: "asyncio.Task[Any]") -> Context:
        return task.get_context()

else:

    def _context_of(task: "asyncio.Task[Any]") -> Context:
        """Return the context of a task. Python 3.11 shows it only to its garbage collector."""
        return next((one for one in gc.get_referents(task) if isinstance(one, Context)), Context())
