"""The background work of an app: a failure is logged, retried, counted and reported.

Each kind of work has a name. Work that fails is retried, after a pause that grows up to a few seconds; a task that was
cancelled with all others of the application begins again. How often each has failed, and what fails now, is in the
worker's row, in its health answer and in `everstep doctor`. While anything has failed for longer than the app's
patience, the app claims no more runs of others; it begins again by itself when that work succeeds.

Failures for one run alone are not here: see `interruptions.py`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from everstep.engine.process.worker_row import Trouble
from everstep.engine.run.host import RunHost
from everstep.errors import StoreFailed
from everstep.model.untrusted import described, is_a, logger, type_name

log = logger("everstep.background")

R = TypeVar("R")

PATIENCE_SECONDS: Final = 60.0
"""After this time without success of any background work, an app stops claiming runs."""
FIRST_SECONDS: Final = 0.1
MOST_SECONDS: Final = 5.0
"""The longest pause between retries: 0.1, 0.2, 0.4 … 5 seconds."""


def pause_after(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row."""
    return float(min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures - 1, 20)))


class Pump(Protocol):
    """What looks for news in the store, and keeps the worker's row."""

    def nudge(self) -> None:
        """Look soon."""

    def say_soon(self) -> None:
        """Write what is wrong into the worker's row soon."""


class BackgroundHost(RunHost, Protocol):
    """What background work needs of its app, beyond what a driver needs of it."""

    @property
    def pump(self) -> Pump:
        """What looks for news in the store."""

    @property
    def is_failed(self) -> bool:
        """Whether the store has failed, so that nothing is written any more."""

    def fail(self, error: BaseException) -> None:
        """The store has failed: nothing more is written."""


class _Work:
    """One kind of work, and its failures."""

    __slots__ = ("again_at", "endless", "failing_since", "in_a_row", "make", "said", "task", "timer", "trouble")

    def __init__(self) -> None:
        self.trouble = Trouble()
        self.in_a_row = 0
        self.endless = False
        self.failing_since = self.again_at = 0.0
        self.said = ""
        self.make: Callable[[], Coroutine[Any, Any, Any]] | None = None
        """Makes the coroutine of its task."""
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Background:
    """The background work of an app, by name."""

    def __init__(self, app: BackgroundHost, patience: float) -> None:
        self._app = app
        self._patience = patience
        self._works: dict[str, _Work] = {}
        self._is_closing = False
        self.not_claiming = ""
        """Why this app claims no more runs of others, at the last check."""

    # -- failures and successes ------------------------------------------------------------------------------------
    def failed(self, name: str, error: BaseException) -> float:
        """Log and count a failure, and return the seconds after which to retry the work."""
        work, now = self._works.setdefault(name, _Work()), self._app.loop.time()
        if is_a(error, StoreFailed) and not self._app.is_failed:
            self._app.fail(error)  # no later success can repair that
        work.trouble.failures += 1
        work.trouble.error = type_name(error)
        if work.in_a_row and now < work.again_at:
            return work.again_at - now  # it was logged a moment ago
        if not work.in_a_row:
            work.failing_since, work.trouble.since = now, self._app.clock.now()
            self._app.pump.say_soon()
        work.in_a_row += 1
        pause = pause_after(work.in_a_row)
        work.again_at = now + pause
        is_known = work.said == (said := described(error))
        work.said = said
        text = "Background work failed (%s), and is tried again in %g s: %s"
        log.error(text, name, pause, said, exc_info=None if is_known else error)
        self.why_not_claiming()
        return pause

    def note(self, name: str, error: BaseException) -> None:
        """Count a failure that is over by now. The caller has logged it."""
        trouble = self._works.setdefault(name, _Work()).trouble
        trouble.failures += 1
        trouble.error = type_name(error)
        self._app.pump.say_soon()

    def works(self, name: str) -> None:
        """Record that the work has succeeded."""
        work = self._works.get(name)
        if work is not None and work.in_a_row:
            log.warning("Background work continues (%s), after %d failures.", name, work.in_a_row)
            work.in_a_row, work.trouble.since, work.again_at, work.said = 0, 0, 0.0, ""
            self._app.pump.say_soon()
            self.why_not_claiming()

    def may_try(self, name: str) -> bool:
        """Return True if the work is not in the pause after a failure."""
        work = self._works.get(name)
        return work is None or not work.in_a_row or self._app.loop.time() >= work.again_at

    def attempt(self, name: str, function: Callable[..., R], *args: Any) -> R | None:
        """Do a piece of work, unless it failed a moment ago. An error is recorded; then None is returned."""
        if not self.may_try(name):
            return None
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001  # in any case, other work continues
            self.failed(name, error)
            return None
        self.works(name)
        return result

    async def attempt_async(self, name: str, function: Callable[..., Coroutine[Any, Any, R]], *args: Any) -> R | None:
        """The same for a coroutine function."""
        if not self.may_try(name):
            return None
        try:
            result = await function(*args)
        except Exception as error:  # noqa: BLE001  # in any case, other work continues
            self.failed(name, error)
            return None
        self.works(name)
        return result

    # -- tasks -----------------------------------------------------------------------------------------------------
    def keep(self, name: str, make: Callable[[], Coroutine[Any, Any, Any]], *, endless: bool = False) -> None:
        """Run a task until it returns. One that raises, or is cancelled by the application, begins again.

        A second task of the same name is not started. `endless`: the task never returns by itself.
        """
        work = self._works.setdefault(name, _Work())
        work.endless = endless
        if work.timer is None and (work.task is None or work.task.done()):
            work.make = make
            self._begin(name, work)

    def is_under_way(self, name: str) -> bool:
        """Return True if a task is running."""
        work = self._works.get(name)
        return work is not None and work.task is not None

    @property
    def is_busy(self) -> bool:
        """Whether any task is running that will return."""
        return any(work.task is not None and not work.endless for work in self._works.values())

    def _begin(self, name: str, work: _Work) -> None:
        work.timer = None
        if self._is_closing or work.make is None:
            return
        try:
            work.task = self._app.loop.create_task(work.make(), context=self._app.context.copy())
        except Exception as error:  # noqa: BLE001  # there is no memory for it just now
            work.timer = self._app.loop.call_later(self.failed(name, error), self._begin, name, work)
            return
        work.task.add_done_callback(lambda task: self._ended(name, work, task))

    def _ended(self, name: str, work: _Work, task: "asyncio.Task[Any]") -> None:
        if work.task is task:
            work.task = None
        error = asyncio.CancelledError("the application cancelled it") if task.cancelled() else task.exception()
        if error is None:
            self.works(name)
        elif work.task is None and work.make is not None and not self._is_closing:
            work.timer = self._app.loop.call_later(self.failed(name, error), self._begin, name, work)

    async def end(self, name: str, *, cancel: bool = False) -> None:
        """Wait until a task has ended; it does not begin again."""
        if (task := self.let_end(name)) is not None:
            if cancel:
                task.cancel()
            await asyncio.wait([task])

    def let_end(self, name: str) -> "asyncio.Task[Any] | None":
        """Prevent a task from beginning again, and return it if it is running."""
        work = self._works.get(name)
        if work is None:
            return None
        work.make = None
        if work.timer is not None:
            work.timer.cancel()
            work.timer = None
        return work.task

    def close(self) -> list["asyncio.Task[Any]"]:
        """Prevent all tasks from beginning again. Returns the running ones, cancelled."""
        self._is_closing = True
        tasks = []
        for work in self._works.values():
            if work.timer is not None:
                work.timer.cancel()
            if work.task is not None:
                work.task.cancel()
                tasks.append(work.task)
        return tasks

    # -- what others see -------------------------------------------------------------------------------------------
    def why_not_claiming(self) -> str:
        """Return why this app claims no more runs of others; "" if it does. A change is logged."""
        now = self._app.loop.time()
        failing = {name: now - work.failing_since for name, work in self._works.items() if work.in_a_row}
        late = [f"{name} ({self._works[name].trouble.error})" for name in failing if failing[name] >= self._patience]
        why = f"no success for {self._patience:g} s or more: {', '.join(sorted(late))}" if late else ""
        if why and not self.not_claiming:
            log.error("This app claims no more runs of others until that succeeds: %s.", why)
            self._app.pump.say_soon()
        elif self.not_claiming and not why:
            log.warning("This app claims runs of others again.")
            self._app.pump.nudge()
        self.not_claiming = why
        return why

    @property
    def has_failing(self) -> bool:
        """Whether anything has failed and not succeeded since."""
        return any(work.in_a_row for work in self._works.values())

    def troubles(self) -> dict[str, Trouble]:
        """Return what has failed since the app was opened, by name."""
        return {name: work.trouble for name, work in self._works.items() if work.trouble.failures}
