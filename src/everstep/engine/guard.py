"""Workflow bodies do not touch the outside: the guard that says so at once, and the silence of replay.

The audit hook is best effort. It is armed for one thread while workflow code runs on it, and looks away during
imports and logging, which open files for good reasons.
"""

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from everstep.errors import OutsideInWorkflow

_REMEDIES: Final[dict[str, str]] = {
    "open": "opens a file",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "os.mkdir": "makes a folder",
    "os.rmdir": "removes a folder",
    "os.listdir": "lists a folder",
    "os.scandir": "lists a folder",
    "os.putenv": "changes the environment",
    "os.system": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "replaces the process",
    "os.kill": "sends a signal to a process",
    "subprocess.Popen": "starts a process",
    "socket.__new__": "opens a socket",
    "socket.connect": "connects to the network",
    "socket.getaddrinfo": "asks the network for an address",
    "sqlite3.connect": "opens a database",
    "_thread.start_new_thread": "starts a thread",
    "_thread.start_joinable_thread": "starts a thread",
    "time.sleep": "sleeps without letting anything else run",
}
_LOOK_AWAY: Final = ("importlib", "<frozen importlib", "<frozen zipimport", "linecache.py", "/logging/", "traceback.py")


class Guard:
    """Armed for the thread that runs workflow code, from `arm()` until `thread` is 0 again."""

    thread = 0
    _is_installed = False

    @classmethod
    def arm(cls) -> None:
        """Watch this thread. Audit hooks cannot be taken off again, so there is one, from the first workflow on."""
        if not cls._is_installed:
            cls._is_installed = True
            sys.addaudithook(_audit)
        cls.thread = threading.get_ident()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if Guard.thread and event in _REMEDIES and Guard.thread == threading.get_ident():
        _refuse(event)


def _refuse(event: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    culprit: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if any(part in filename for part in _LOOK_AWAY):
            return
        if "/everstep/engine/loop.py" in filename.replace("\\", "/"):
            break
        culprit = frame
        if _is_users(filename):
            break
        frame = frame.f_back
    if culprit is None:
        return
    from everstep.effects.surroundings import where_is

    thread, Guard.thread = Guard.thread, 0  # reading the source line opens a file itself
    try:
        line = where_is(culprit)
    finally:
        Guard.thread = thread
    remedy = (
        "use `await asyncio.sleep(…)` (in a `def` workflow `everstep.blocking.sleep(…)`), which survives a crash"
        if event == "time.sleep"
        else "workflow code is replayed, so move this into a step (@everstep.step)"
    )
    raise OutsideInWorkflow(f"The workflow body {_REMEDIES[event]} at {line} — {remedy}.")


def _is_users(filename: str) -> bool:
    return "/lib/python" not in filename and "site-packages" not in filename and not filename.startswith("<frozen")


class Silence:
    """Output of workflow code is silent during replay: `with Silence():` drops this thread's prints and log records."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._stdout, self._stderr = sys.stdout, sys.stderr
        sys.stdout = _ThreadMuted(self._stdout, self._thread)
        sys.stderr = _ThreadMuted(self._stderr, self._thread)
        self._call_handlers = logging.Logger.callHandlers
        logging.Logger.callHandlers = _muted_handlers(self._call_handlers, self._thread)  # type: ignore[method-assign]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.stdout, sys.stderr = self._stdout, self._stderr
        logging.Logger.callHandlers = self._call_handlers  # type: ignore[method-assign]


class _ThreadMuted:
    """A stream that drops what one thread writes and hands through what all others do."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _muted_handlers(original: Callable[..., None], thread: int) -> Callable[..., None]:
    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread:
            original(self, record)

    return call_handlers
