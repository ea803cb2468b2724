"""Workflow bodies must not touch the outside: the guard that refuses it at once, and the silence of replay.

The audit hook is best effort. It watches a thread while a run's loop runs on it, except during imports and logging,
which open files for good reasons.
"""

import functools
import logging
import os
import sys
import threading
import time
from asyncio.events import _get_running_loop
from types import FrameType, TracebackType
from typing import Any, ClassVar, Final

from everstep.effects import descent
from everstep.effects.surroundings import PACKAGE, where_is
from everstep.errors import OutsideInWorkflow
from everstep.model.mistakes import OUTSIDE, outside

_LOOK_AWAY: Final = (
    "importlib",
    "<frozen importlib",
    "<frozen zipimport",
    "linecache.py",
    "/logging/",
    "traceback.py",
    "/pdb.py",
)
_THREADS: Final = frozenset({"_thread.start_new_thread", "_thread.start_joinable_thread"})
_LOOP: Final = os.path.join(os.path.dirname(__file__), "loop.py")


@functools.cache
def install() -> None:
    """Watch loops that are `is_guarded`. Audit hooks cannot be removed: there is one, from the first run on."""
    descent.install()
    sys.addaudithook(_audit)
    _stand_in_for_missing_events()


def _stand_in_for_missing_events() -> None:
    """Wrap `time.sleep` and the start of threads, for which older Pythons raise no audit event."""
    if sys.version_info < (3, 13):
        time.sleep = _audited("time.sleep", time.sleep)
    if sys.version_info < (3, 12):
        threading._start_new_thread = _audited("_thread.start_new_thread", threading._start_new_thread)  # type: ignore[attr-defined]


def _audited(event: str, original: Any) -> Any:
    @functools.wraps(original)
    def audited(*args: Any) -> Any:
        _audit(event, args)
        return original(*args)

    return audited


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in OUTSIDE:
        return
    if not getattr(_get_running_loop(), "is_guarded", False):
        if event in _THREADS:
            descent.note_thread(args[0])
        return
    if not (event == "open" and "/zoneinfo/" in str(args[0])):  # `ZoneInfo` reads its tables from C
        _refuse(event)


def _refuse(event: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    culprit: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if any(part in filename for part in _LOOK_AWAY):
            return
        if filename == _LOOP:
            break
        if filename != __file__ and (culprit is None or not is_users(culprit.f_code.co_filename)):
            culprit = frame  # an outer frame may still be an import, or a logger that calls a handler of the user's
        frame = frame.f_back
    if culprit is None:
        return

    loop: Any = _get_running_loop()
    loop.is_guarded = False  # reading the source line opens a file itself
    try:
        line = where_is(culprit)
    finally:
        loop.is_guarded = True
    raise OutsideInWorkflow(outside(event).at(line))


def is_users(filename: str) -> bool:
    """Return True if a file belongs to the application, not to Python or an installed package."""
    if filename.startswith(("<frozen", PACKAGE)):
        return False
    return "/lib/python" not in filename and "site-packages" not in filename


class Silence:
    """Output of workflow code is silent during replay: `with Silence():` drops this thread's prints and log records."""

    _lock = threading.Lock()
    _depths: ClassVar[dict[int, int]] = {}
    """The silent threads, and how often each has entered. The first one installs the mutes."""

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with Silence._lock:
            if not Silence._depths:
                sys.stdout, sys.stderr = _muted(sys.stdout), _muted(sys.stderr)
                logging.Logger.callHandlers = _muted_handlers  # type: ignore[method-assign, assignment]
            Silence._depths[thread] = Silence._depths.get(thread, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = threading.get_ident()
        with Silence._lock:
            Silence._depths[thread] -= 1
            if not Silence._depths[thread]:
                del Silence._depths[thread]
            if not Silence._depths:
                sys.stdout, sys.stderr = _unmuted(sys.stdout), _unmuted(sys.stderr)
                logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign]

    @staticmethod
    def is_kept_here() -> bool:
        """Tell whether this thread is silent."""
        return threading.get_ident() in Silence._depths


class _ThreadMuted:
    """A stream that drops what silent threads write and hands through what all others do."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if Silence.is_kept_here():
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _muted(stream: Any) -> Any:
    return _ThreadMuted(stream) if stream is not None else None  # a program without a console has no stream


def _unmuted(stream: Any) -> Any:
    return stream._stream if isinstance(stream, _ThreadMuted) else stream  # other code may have replaced it


_call_handlers = logging.Logger.callHandlers


def _muted_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    if not Silence.is_kept_here():
        _call_handlers(logger, record)
