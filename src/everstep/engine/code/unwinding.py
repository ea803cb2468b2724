"""Teardown is not execution: code that leaves memory is unwound, and nothing that it does then is recorded.

It is unwound on a separate stack. Code that catches `Evicted` and asks for the next thing, again and again, is
abandoned in the middle of that call, and never runs again. So code cannot keep its run in memory, nor prevent the app
from closing.
"""

import asyncio
import sys
import threading
from asyncio.events import _get_running_loop
from asyncio.tasks import _leave_task
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, NoReturn

import greenlet

from everstep.effects.surroundings import persons_line
from everstep.engine.code.guard import Silence, is_users
from everstep.engine.code.loop import SpinningWorkflow, WorkflowLoop
from everstep.engine.code.stops import EXITS, pass_on
from everstep.errors import Evicted
from everstep.model.untrusted import Stopped, ends_process, logger

log = logger("everstep.workflow")

ROUNDS_MAX: Final = 100
"""How often a task is woken with `Evicted` before it is abandoned where it waits."""
REFUSALS_MAX: Final = 1000
"""How many commands of a task raise `Evicted` in one round before the task is abandoned in the middle of the next
one.
"""
TURNS_MAX: Final = 100_000
"""Callbacks in one round after which unwinding code that does not settle is abandoned."""


def unwind(loop: WorkflowLoop, context: Context, run: str = "") -> None:
    """Raise `Evicted` wherever the code waits, until all its tasks are done and its generators closed.

    Generators are closed in a context in which the run is the current one. In any other, a step in their `finally`
    would be a plain function, and its body would run.
    """
    loop.quiet = True
    loop.forget_new_timers()
    loop.timers.clear()
    if not loop.tasks and not loop.has_asyncgens:
        return
    unwinding = loop.unwinding = Unwinding(loop, context)
    with Silence(), loop.entered(), watched(run):
        unwinding.go()
    loop.unwinding = None
    if unwinding.left:
        log.warning(
            "Workflow code of run %s caught Evicted and continued, at %s. It was taken out of memory as it was, and "
            "does nothing more. Catch Exception there, not BaseException.",
            run,
            "; ".join(dict.fromkeys(unwinding.left)),
        )
    outer = _get_running_loop()
    for stop in unwinding.stops:
        if outer is None:
            raise stop
        pass_on(stop, outer)


def refuse(loop: WorkflowLoop) -> NoReturn:
    """Raise `Evicted` in code that is being unwound. Code that ignores it is abandoned right here, for good."""
    if loop.unwinding is not None:
        loop.unwinding.refuse()
    raise Evicted


class Unwinding:
    """The end of one run's code in memory."""

    def __init__(self, loop: WorkflowLoop, context: Context) -> None:
        self.left: list[str] = []
        """The lines of code that resisted unwinding."""
        self.stops: list[BaseException] = []
        """Exceptions raised meanwhile that end the process. The run leaves memory first."""
        self._loop = loop
        self._context = context
        self._caller = greenlet.getcurrent()
        self._generators: list[Any] = []
        self._task: Any = None
        self._refusals = 0

    def go(self) -> None:
        """Unwind everything, on a new stack each time that one has to be abandoned."""
        loop = self._loop
        for _ in range(ROUNDS_MAX):
            stack = greenlet.greenlet(self._work)
            try:
                stack.switch()
            except Evicted:  # the watchdog's, between two turns
                continue
            if stack.dead:
                break
            self._leave_behind(stack)
        if any(not task.done() for task in loop.tasks.values()):
            self.left += loop.places()
        for task in loop.tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _keep_for_ever(task)
        loop.tasks.clear()
        for generator in self._generators:
            if generator.ag_frame is not None:
                _keep_for_ever(generator)

    def refuse(self) -> None:
        """Return if the code may get `Evicted` once more; otherwise never return."""
        task = asyncio.current_task(self._loop)
        self._refusals = self._refusals + 1 if task is self._task else 1
        self._task = task
        if self._refusals > REFUSALS_MAX:
            line = persons_line(sys._getframe(2))
            self.left += [line] if line else self._loop.places()  # a call through the loop itself hides the line
            self._caller.switch()

    def _leave_behind(self, stack: greenlet.greenlet) -> None:
        """Undo what the end of a turn would have undone, because the code is in the middle of a turn that never
        ends.
        """
        loop = self._loop
        loop.is_guarded = False
        _keep_for_ever(stack)
        if (task := asyncio.current_task(loop)) is not None:
            _leave_task(loop, task)
            loop.tasks.pop(task.number, None)  # type: ignore[attr-defined]
            _keep_for_ever(task)
        self._task = None

    def _work(self) -> None:
        loop = self._loop
        self._evict_tasks()
        generators = loop.take_asyncgens()
        self._generators += generators
        for generator in generators:
            loop.create_task(_close(generator), context=self._context)
        if loop.tasks and self._drain():
            self._evict_tasks()

    def _evict_tasks(self) -> None:
        loop = self._loop
        for _ in range(ROUNDS_MAX):
            waiting = [task for task in loop.tasks.values() if not task.done()]
            for task in waiting:
                _wake_with_eviction(task)
            if not waiting or not self._drain():
                break

    def _drain(self) -> bool:
        """Let the code run until it can only wait, and return whether it did."""
        self._task = None
        for _ in range(ROUNDS_MAX):
            try:
                self._loop.drain(TURNS_MAX + 100 * len(self._loop.tasks))
            except SpinningWorkflow:
                return False
            except Stopped:
                pass  # code that is being unwound ends no process with `sys.exit()`
            except EXITS as error:
                self.stops.append(error)
            else:
                return True
        return False


def _keep_for_ever(code: Any) -> None:
    """Keep unfinished code alive for ever: Python would resume it with `GeneratorExit` when it is dropped, also at
    exit.
    """
    import ctypes  # few programs ever have such code

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(code))


async def _close(generator: Any) -> None:
    try:
        await generator.aclose()
    except BaseException as error:  # any error of its `finally` is ignored, because the run is leaving memory
        if ends_process(error):
            raise


def _wake_with_eviction(task: Any) -> None:
    waiter = task._fut_waiter
    if waiter is None:
        task.cancel()  # it has not begun, or is about to run; its commands raise Evicted
    elif not waiter.done() and not hasattr(waiter, "_fut_waiter"):
        waiter.set_exception(Evicted())  # a plain future; one task that waits for another is woken by that other
        waiter.exception()  # retrieved, so that asyncio does not report it


LOOK_SECONDS: Final = 1.0
"""How often the watchdog checks code that is being unwound."""
NAMED_AFTER: Final = 3
"""Looks after which the line is named in the log."""
RAISED_AFTER: Final = 6
"""Looks after which `Evicted` is raised in the code, and again at each further one."""


class _Watched:
    """Code that is being unwound on a thread."""

    __slots__ = ("is_over", "looks", "raised", "run", "thread")

    def __init__(self, run: str, thread: int) -> None:
        self.run = run
        self.thread = thread
        self.looks = 0
        self.raised = False
        self.is_over = False


_LOCK: Final = threading.Lock()
_watched: Final[dict[int, _Watched]] = {}
_threads: Final[list[threading.Thread]] = []
"""The watchdog's thread, while anything was unwound lately."""


@contextmanager
def watched(run: str) -> Generator[None]:
    """Watch the unwinding of a run's code on this thread, in the block."""
    one = _Watched(run, threading.get_ident())
    before, _watched[one.thread] = _watched.get(one.thread), one
    _have_a_thread()
    try:
        yield
    except Evicted:
        pass  # it was raised in the code, and came when that had just ended
    finally:
        with _LOCK:
            one.is_over = True
            if before is None:
                del _watched[one.thread]
            else:
                _watched[one.thread] = before
            if one.raised:
                _raise_in(one.thread, None)


def _have_a_thread() -> None:
    if _threads and _threads[0].is_alive():
        return
    _threads[:] = [threading.Thread(target=_watch, name="everstep-watchdog", daemon=True)]
    try:
        _threads[0].start()
    except RuntimeError:
        _threads.clear()  # the machine has no more threads: then it is not watched


def _watch() -> None:
    """Watch until nothing is unwound any more."""
    pause = threading.Event()
    idle = 0
    while idle < NAMED_AFTER:
        pause.wait(LOOK_SECONDS)
        now = list(_watched.values())
        idle = 0 if now else idle + 1
        for one in now:
            _look_at(one)


def _look_at(one: _Watched) -> None:
    frame = sys._current_frames().get(one.thread)
    with _LOCK:
        if one.is_over or frame is None:
            return
        one.looks += 1
        if one.looks >= RAISED_AFTER and is_users(frame.f_code.co_filename):
            one.raised = True
            _raise_in(one.thread, Evicted)
    if one.looks == NAMED_AFTER:
        log.error(
            "Workflow code of run %s does not give way while it is taken out of memory, at %s: nothing else on its "
            "thread moves. `Evicted` will be raised in it; if it catches that as well, kill this process.",
            one.run,
            persons_line(frame),
        )


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next instruction; with None, do not raise it after all."""
    import ctypes  # few programs ever have such code

    what = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
