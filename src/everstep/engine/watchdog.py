"""A watchdog for code that is being unwound and does not give way, such as `while True: pass` in a `finally`.

Nothing else on its thread gets a turn meanwhile, the closing of the app least of all. So another thread names the line,
and in the end raises `Evicted` in the code, wherever it is. Code that catches even that cannot be stopped.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from everstep.effects.surroundings import persons_line
from everstep.engine.guard import is_users
from everstep.errors import Evicted
from everstep.model.untrusted import logger

log = logger("everstep.workflow")

LOOK_SECONDS: Final = 1.0
"""How often the watchdog looks at code that is being unwound."""
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
    """Watch the code of a run that is unwound on this thread in the block."""
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
        _threads.clear()  # no more threads can be had: then it is not watched


def _watch() -> None:
    """Look until nothing is unwound any more."""
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
