"""A loop that does not turn: a thread notices it, and names the line and the run that block it.

Workflow code and `async def` bodies run on the loop. One that computes, or waits for something without `await`, stops
all others, the renewal of the lease and the health port. Time is counted by the looks of this thread: a process that
was stopped, or a machine that slept, looks once and finds that the loop turns again.
"""

import sys
import threading
from types import FrameType
from typing import Final

from everstep.effects.surroundings import persons_line
from everstep.engine.code.execution import Execution
from everstep.engine.code.guard import is_users
from everstep.engine.code.loop import WorkflowLoop
from everstep.engine.process.host import Host
from everstep.engine.run.attempts import StepAttempts
from everstep.model.untrusted import logger

log = logger("everstep.worker")

LOOP: Final = "event loop"
LOOK_SECONDS: Final = 1.0
NAMED_AFTER: Final = 3
"""The number of looks after which a loop that does not turn is reported."""
NAMED_AGAIN: Final = 60
"""The number of looks after which it is reported again."""


class LoopStalled(Exception):
    """Code on the loop did not give way for seconds."""


class Stalls:
    """Watches the loop of one app."""

    def __init__(self, app: "Host", look_seconds: float = LOOK_SECONDS) -> None:
        self._app = app
        self._look_seconds = look_seconds
        self._over = threading.Event()
        self._has_turned = True
        self._is_named = False
        self._looks = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to watch. If the machine has no thread for it, nothing is watched."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="everstep-stalls", daemon=True)
            try:
                self._thread.start()
            except (RuntimeError, MemoryError):
                self._thread = None

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self) -> None:
        try:
            while not self._over.wait(self._look_seconds):
                self.look()
        except RuntimeError:
            pass  # the loop is closed

    def look(self) -> None:
        """Check whether the loop has turned since the last look, and schedule the next sign."""
        if self._has_turned:
            self._looks, self._has_turned = 0, False
            self._app.loop.call_soon_threadsafe(self._turned)
            return
        self._looks += 1
        if self._looks % NAMED_AGAIN == NAMED_AFTER:
            self._name()

    def _turned(self) -> None:
        self._has_turned = True
        if self._is_named:
            self._is_named = False
            self._app.background.note(LOOP, LoopStalled())
            log.warning("The event loop of this process turns again.")

    def _name(self) -> None:
        self._is_named = True
        where = described_stall(self._app, sys._current_frames().get(self._app.thread))
        log.error(
            "The event loop of this process has not turned for %g s: %s. Nothing else moves here, and the lease is not "
            "renewed. Let a step do it: a `def` step runs on a thread; an `async def` one must await.",
            self._looks * self._look_seconds,
            where,
        )


def described_stall(app: "Host", frame: FrameType | None) -> str:
    """Describe the code that a loop's thread is in: its owner and its line."""
    at = _line_of_user(frame)
    while frame is not None:
        if frame.f_code is WorkflowLoop.drain.__code__:
            return _of_workflow(frame.f_locals["self"]._executor, at)
        if frame.f_code is StepAttempts._perform.__code__:
            attempt = frame.f_locals["attempt"]
            return f"the body of {attempt.step} of run {attempt.run} is at {at}"
        frame = frame.f_back
    for driver in list(app.drivers.values()):  # the code of a `def` workflow has a separate stack
        if driver.execution.loop.is_guarded:
            return _of_workflow(driver.execution, at)
    return f"code of the application, or of a `def` workflow that has just begun, is at {at}"


def _line_of_user(frame: FrameType | None) -> str:
    innermost = frame
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return persons_line(frame or innermost) or "a line of a library"


def _of_workflow(execution: Execution, at: str) -> str:
    return f"workflow code of run {execution.run} ({execution.workflow.name}) is at {at}"
