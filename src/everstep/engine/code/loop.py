"""An event loop that only moves when the history does.

Workflow code runs on it as on any asyncio loop, but nothing here waits, reads a clock or does I/O: the only sources of
progress are the events of the run's history, applied one at a time, with the loop drained in between. So the same
events in the same order give the same tasks, in the same order, with the same winners of every race.

What makes it deterministic beyond that: tasks and futures hash by the number of their creation (`asyncio.wait` and
`TaskGroup` keep them in sets, which would otherwise iterate by memory address), names of tasks are numbered per run,
and time does not pass while code runs.
"""

import asyncio
import collections
import sys
from asyncio.events import _get_running_loop, _set_running_loop
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, Token, copy_context
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from everstep.effects.surroundings import persons_line, where_is
from everstep.engine.code import guard
from everstep.engine.code.greenlets import frame_behind
from everstep.engine.code.stops import EXITS
from everstep.errors import Evicted, OutsideInWorkflow
from everstep.model.mistakes import MOVE_INTO_A_STEP
from everstep.model.untrusted import Stopped, ends_process, log_error, logger

if TYPE_CHECKING:  # a real cycle: a loop that leaves memory has what unwinds it
    from everstep.engine.code.unwinding import Unwinding


log = logger("everstep.workflow")

TURNS_MAX: Final = 5_000_000
"""After this many callbacks without settling a loop counts as spinning, such as `while True: await
asyncio.sleep(0)`.
"""


FOREVER_SECONDS: Final = 1e11
"""A longer wait, `asyncio.sleep(math.inf)` too, becomes one of three thousand years, because a deadline must fit
into a column.
"""


_identity: Final = object.__hash__


class SpinningWorkflow(Exception):
    """Workflow code did not settle."""


class Generators:
    """Async generators that code has begun, held so that the garbage collector closes none of them.

    As a context manager, it collects those that are begun in its block, also by tasks that are started there. `close`
    then closes the abandoned ones, at a moment that is the same in every replay.
    """

    def __init__(self) -> None:
        self._begun: list[Any] = []
        self._swept = 0
        self._tokens: list[Token[Generators | None]] = []

    def hold(self, generator: Any) -> None:
        """A generator begins."""
        self._begun.append(generator)
        if len(self._begun) > 2 * self._swept + 100:
            self._begun = self.still_open()
            self._swept = len(self._begun)

    def still_open(self) -> list[Any]:
        """Return those that have not ended, in the order in which they began."""
        return [one for one in self._begun if one.ag_frame is not None]

    def __enter__(self) -> "Generators":
        self._tokens.append(_BLOCK.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _BLOCK.reset(self._tokens.pop())

    async def close(self, of: tuple[str, ...]) -> None:
        """Close the generators of some packages that no code is in, the outermost first. An error goes to the log."""
        loop = asyncio.get_running_loop()
        for generator in self.still_open():
            frame = generator.ag_frame  # closing one may have closed others
            if frame is None or generator.ag_running or not frame.f_globals.get("__name__", "").startswith(of):
                continue
            try:
                await generator.aclose()
            except Exception as error:  # noqa: BLE001  # as asyncio does with those that are dropped
                loop.call_exception_handler({"message": "Closing an async generator failed", "exception": error})


_BLOCK: "ContextVar[Generators | None]" = ContextVar("everstep_generators", default=None)
"""The innermost block that collects generators."""


class WorkflowFuture(asyncio.Future[Any]):
    """A future that hashes by the number of its creation."""

    __slots__ = ("number",)

    def __init__(self, *, loop: "WorkflowLoop") -> None:
        loop.created = self.number = loop.created + 1
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class WorkflowTask(asyncio.Task[Any]):
    """A task that hashes by the number of its creation."""

    def __init__(self, coroutine: Any, *, loop: "WorkflowLoop", name: str | None, context: Context | None) -> None:
        # asyncio keeps all tasks of all loops in one set. There the first tasks of many runs must not have equal
        # hashes.
        self.number = _identity(self)
        loop.created = number = loop.created + 1
        super().__init__(coroutine, loop=loop, name=name or f"task-{number}", context=context)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class Ready(msgspec.Struct, eq=False, weakref=True):
    """A callback that is ready to run: like `asyncio.Handle`, with only the fields that are needed here."""

    what: tuple[Any, ...]
    """The callback and its arguments."""
    _context: Context
    _cancelled: bool = False

    def cancel(self) -> None:
        """Do not run it."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled


class Timer(asyncio.TimerHandle):
    """A timer of workflow code. It becomes durable if it is still pending when the code has settled."""

    __slots__ = ("call", "deadline", "duration", "source")

    def __init__(
        self, duration: int, when: float, callback: Any, args: Any, loop: "WorkflowLoop", context: Context | None
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.duration = duration
        self.deadline = 0
        self.call = 0
        self.source = persons_line(_outside(sys._getframe(2)))

    @property
    def what(self) -> tuple[Any, ...]:
        """The callback and its arguments."""
        return (self._callback, *self._args)  # type: ignore[attr-defined]


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the first frame outside this file: the caller of the loop."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


class Executor(Protocol):
    """Receives the calls of `run_in_executor`."""

    def call_in_executor(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the future of a call of a `def` step."""
        ...

    def is_outcome(self, error: BaseException) -> bool:
        """Return True if an error is the recorded failure of a call."""
        ...


class WorkflowLoop(asyncio.AbstractEventLoop):
    """The loop of one run. Rarely needed lists are made at their first use, because each costs the garbage
    collector time.
    """

    new_timers: list[Timer] | tuple[()] = ()
    """The timers that were made since the code last settled."""
    unwinding: "Unwinding | None" = None
    """The unwinding that takes its code out of memory, if one is in progress."""
    spun_at: Sequence[str] = ()
    """The places of the code when it did not settle."""
    _asyncgens: Generators | None = None

    def __init__(self, executor: Executor) -> None:
        self.created = 0
        """The number of futures and tasks so far."""
        self.now = 0
        self.tasks: dict[int, WorkflowTask] = {}
        self.timers: dict[int, Timer] = {}
        self.quiet = False
        self._ready: collections.deque[Ready | Timer] = collections.deque()
        self._executor = executor
        self._is_entered = False
        self.is_guarded = False
        """Whether its code is running, and so must not touch the outside."""
        guard.install()

    # -- what asyncio asks of a loop -------------------------------------------------------------------------------
    def call_soon(self, *what: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        handle = Ready(what, context if context is not None else copy_context())
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        if delay <= 0:
            return self.call_soon(callback, *args, context=context)
        timer = Timer(round(min(delay, FOREVER_SECONDS) * 1e6), self.time() + delay, callback, args, self, context)
        if not self.new_timers:
            self.new_timers = []
        self.new_timers.append(timer)
        return timer

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_later(when - self.time(), callback, *args, context=context)

    def time(self) -> float:
        """Return the run's clock: the time of the event that is being applied."""
        return self.now / 1e6

    def create_future(self) -> WorkflowFuture:
        return WorkflowFuture(loop=self)

    def create_task(  # type: ignore[override]
        self, coroutine: Any, *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> WorkflowTask:
        task = self.create_main(coroutine, name, context)
        task.add_done_callback(self.forget_task)
        return task

    def create_main(self, coroutine: Any, name: str | None, context: Context | None) -> WorkflowTask:
        """Create a task that the caller must later release with `forget_task`."""
        task = WorkflowTask(coroutine, loop=self, name=name, context=context)
        self.tasks[task.number] = task  # held strongly, because asyncio itself only keeps weak references
        return task

    def forget_task(self, task: Any) -> None:
        """A task has ended."""
        self.tasks.pop(task.number, None)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        return self._executor.call_in_executor(function, args)

    def get_task_factory(self) -> None:
        """Return None: tasks are the loop's own. (anyio asks before it makes one.)"""

    def get_exception_handler(self) -> None:
        """Return None: what a callback raises goes to the log."""

    get_debug = staticmethod(bool)  # called for every future; the answer is always no

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: Any) -> None:
        self.timers.pop(handle.call, None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.quiet:
            error = context.get("exception")
            if error is None:
                log.error("%s", context.get("message"))
            else:
                log_error(log, "%s", context.get("message"), error=error)

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: open generators are closed when the run leaves memory."""

    def places(self) -> list[str]:
        """Return where each task is, by the line of the user's code."""
        found: list[str] = []
        for task in list(self.tasks.values()):
            frames = [frame_behind(frame) for frame in task.get_stack(limit=1)]
            found += [f"{task.get_name()}: {persons_line(frame) or where_is(frame)}" for frame in frames]
        return found

    # -- moving ----------------------------------------------------------------------------------------------------
    def fire(self, timer: Timer) -> None:
        """Make a durable timer's callback ready."""
        timer.call = 0
        self._ready.append(timer)

    def timers_at_rest(self) -> list[Timer]:
        """Return the timers made since the code last settled that are still pending, in the order of their creation."""
        if not self.new_timers:
            return []
        pending = [timer for timer in self.new_timers if not timer.cancelled()]
        self.forget_new_timers()
        return pending

    def forget_new_timers(self) -> None:
        """Forget the timers that were made since the code last settled."""
        self.new_timers = ()

    def drain(self, turns_max: int = 0) -> None:
        """Run workflow code until it can only wait for events."""
        turns_max = turns_max or TURNS_MAX
        is_entered = self._is_entered
        if not is_entered:
            outer, task = self._enter()
        ready = self._ready
        handle: Ready | Timer | None = None
        what: tuple[Any, ...] | None = None
        turns = 0
        try:
            self.is_guarded = True
            while ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    try:
                        what = handle.what
                        if len(what) == 2:  # usually a task, and the future that it waits for
                            handle._context.run(what[0], what[1])  # type: ignore[union-attr]
                        else:
                            handle._context.run(*what)  # type: ignore[union-attr]
                    except EXITS as error:
                        if not self._executor.is_outcome(error):  # otherwise a task has it now, like any other error
                            raise error if ends_process(error) else Stopped(error) from error
                    except BaseException as error:  # noqa: BLE001  # as every event loop does: tell, and go on
                        self.call_exception_handler({"message": "A callback raised", "exception": error})
                turns += 1
                if turns > turns_max:
                    self.spun_at = self.places()
                    raise SpinningWorkflow
        finally:
            handle = what = None  # an error's traceback may keep this frame alive, and with it what it held last
            self.is_guarded = False
            if not is_entered:
                _set_running_loop(outer)
                if ONE_TASK_PER_THREAD:
                    _step_into_task(outer, task)

    def _enter(self) -> tuple[asyncio.AbstractEventLoop | None, Any]:
        """Become the running loop of this thread. Returns the loop and the task that come back after it."""
        outer = _get_running_loop()
        task = _step_out_of_task(outer) if ONE_TASK_PER_THREAD else None
        if type(sys.get_asyncgen_hooks()[0]) is not _AsyncgenHooks:
            _AsyncgenHooks.install()
        _set_running_loop(self)
        return outer, task

    @contextmanager
    def entered(self) -> Generator[None]:
        """Stay the running loop of this thread for the block: a replay drains once for each outcome."""
        if self._is_entered:
            yield
            return
        outer, task = self._enter()
        self._is_entered = True
        try:
            yield
        finally:
            self._is_entered = False
            _set_running_loop(outer)
            if ONE_TASK_PER_THREAD:
                _step_into_task(outer, task)

    def hold_asyncgen(self, generator: Any) -> None:
        """Hold a generator that begins: the moment when the garbage collector finds one is not in the history."""
        if self._asyncgens is None:
            self._asyncgens = Generators()
        self._asyncgens.hold(generator)
        if (block := _BLOCK.get()) is not None:
            block.hold(generator)

    @property
    def workflow_code(self) -> Any:
        """The run's execution, to which the code on this loop belongs whatever its context says."""
        return self._executor

    def forget_executor(self) -> None:
        """Forget the executor, because it would keep a run alive that has left memory."""
        self._executor = _NOBODY

    @property
    def has_asyncgens(self) -> bool:
        """Whether any generator was begun."""
        return self._asyncgens is not None

    def take_asyncgens(self) -> list[Any]:
        """Return the generators that are still open, and stop holding them."""
        taken, self._asyncgens = self._asyncgens, None
        return taken.still_open() if taken is not None else []


class _AsyncgenHooks:
    """The hooks of a thread that runs workflow code: its loop holds its generators, all others go to the previous
    hooks.

    They stay installed when the code settles, because code that sets hooks (a loop that begins or ends) sets both;
    changing them twice for each event would cost more than most events do.
    """

    __slots__ = ("_finalizer", "_firstiter")

    def __init__(self, firstiter: Callable[[Any], Any] | None, finalizer: Callable[[Any], Any] | None) -> None:
        self._firstiter = firstiter
        self._finalizer = finalizer

    @staticmethod
    def install() -> None:
        """Put hooks in front of those of this thread."""
        hooks = _AsyncgenHooks(*sys.get_asyncgen_hooks())
        sys.set_asyncgen_hooks(firstiter=hooks, finalizer=hooks.finalize)

    def __call__(self, generator: Any) -> None:
        """A generator begins."""
        loop = _get_running_loop()
        if isinstance(loop, WorkflowLoop):
            loop.hold_asyncgen(generator)
        elif self._firstiter is not None:
            self._firstiter(generator)

    def finalize(self, generator: Any) -> None:
        """Pass on a generator that is dropped unfinished. No workflow code began it: those are held, and closed by
        `unwind`.
        """
        if self._finalizer is not None:
            self._finalizer(generator)


if sys.version_info >= (3, 14):
    ONE_TASK_PER_THREAD = True

    def _step_out_of_task(outer: asyncio.AbstractEventLoop | None) -> Any:
        """CPython 3.14 keeps one current task per thread, so the outer one is removed while workflow code runs."""
        return asyncio.tasks._swap_current_task(outer, None) if outer is not None else None  # type: ignore[attr-defined]

    def _step_into_task(outer: asyncio.AbstractEventLoop | None, task: Any) -> None:
        if outer is not None:
            asyncio.tasks._swap_current_task(outer, task)  # type: ignore[attr-defined]

else:
    ONE_TASK_PER_THREAD = False

    def _step_out_of_task(outer: asyncio.AbstractEventLoop | None) -> Any:
        return None

    def _step_into_task(outer: asyncio.AbstractEventLoop | None, task: Any) -> None:
        return None


class _Nobody:
    """Replaces the executor of a run that has left memory."""

    place: ClassVar[str] = "workflow"
    wants_places = False

    def call_in_executor(self, *_: Any) -> Any:
        """Raise `Evicted`, as every request of such code does."""
        raise Evicted

    call_step = call_workflow = take_charge = call_in_executor

    def is_outcome(self, error: BaseException) -> bool:
        """Return False, because no call is left."""
        return False


_NOBODY: Final = _Nobody()


def _applications_line(frame: FrameType | None) -> str:
    """Return the line of the application that led to this frame, and not that of a package which it uses."""
    nearest = frame
    while frame is not None and frame.f_code.co_filename != __file__:
        if guard.is_users(frame.f_code.co_filename):
            return where_is(frame)
        frame = frame.f_back
    return persons_line(nearest)


def _forbid(name: str, remedy: str) -> None:
    def refuse(self: WorkflowLoop, *args: Any, **kwargs: Any) -> Any:
        line = _applications_line(_outside(sys._getframe(1)))
        raise OutsideInWorkflow(f"{name} in a workflow body{f' at {line}' if line else ''} — {remedy}")

    refuse.__name__ = name
    setattr(WorkflowLoop, name, refuse)


_FORBIDDEN: Final = (
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "create_datagram_endpoint",
    "start_tls",
    "connect_accepted_socket",
    "sendfile",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_sendall",
    "sock_sendto",
    "sock_connect",
    "sock_accept",
    "sock_sendfile",
    "getaddrinfo",
    "getnameinfo",
    "add_reader",
    "remove_reader",
    "add_writer",
    "remove_writer",
    "connect_read_pipe",
    "connect_write_pipe",
    "subprocess_exec",
    "subprocess_shell",
    "add_signal_handler",
    "remove_signal_handler",
    "call_soon_threadsafe",
    "set_task_factory",
    "set_exception_handler",
    "set_default_executor",
    "shutdown_default_executor",
    "run_forever",
    "run_until_complete",
    "stop",
    "close",
)
for _name in _FORBIDDEN:
    _forbid(_name, f"{MOVE_INTO_A_STEP}.")
WorkflowLoop.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # all are defined by now
