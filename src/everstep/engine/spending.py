"""What bodies are charged while they run: counted on any thread, and written down with the outcome, or before it.

Before it when the charges are more than the step's estimate, so that a crash loses no more than the newest of them, and
when a body is cut off.
"""

import threading
from typing import TYPE_CHECKING, Final

from everstep.model import events as ev
from everstep.model.budgets import Charge, microdollars
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import logger

if TYPE_CHECKING:
    import asyncio

    from everstep.engine.bodies import Attempt
    from everstep.engine.driver import Driver

log = logger("everstep.step")

SOON_SECONDS: Final = 0.1
"""A body that ends so soon after a charge beyond its estimate has it in its outcome alone."""
PAUSE_SECONDS: Final = 1.0
"""Charges beyond a step's estimate are written down at this pace while its body runs."""


class Spending:
    """What one attempt was charged so far. Any thread may add to it."""

    __slots__ = ("_lock", "_nanos", "_tokens", "_written", "is_announced", "uses_nothing")

    def __init__(self, *, uses_nothing: bool = False) -> None:
        self.uses_nothing = uses_nothing
        """Whether the body has said that it uses nothing."""
        self.is_announced = False
        """Whether the loop is about to look at it."""
        self._lock = threading.Lock()
        self._nanos: int | None = None
        self._tokens: int | None = None
        self._written = Charge()

    def add(self, nanos: int | None, tokens: int | None) -> None:
        """Count more. Sums are exact; only their result is rounded, up."""
        with self._lock:
            if nanos is not None:
                self._nanos = (self._nanos or 0) + nanos
            if tokens is not None:
                self._tokens = (self._tokens or 0) + tokens

    def total(self) -> Charge | None:
        """Return all of it; None if the body was charged nothing at all."""
        with self._lock:
            if self._nanos is None and self._tokens is None:
                return None
            return Charge(None if self._nanos is None else microdollars(self._nanos), self._tokens)

    def take_total(self) -> Charge | None:
        """Return all of it, for an outcome: what comes later comes on top."""
        total = self.total()
        self._written = total or self._written
        return total

    def take_unwritten(self) -> Charge | None:
        """Return what is not in the history yet; None if that is nothing."""
        total = self.total() or Charge()
        usd = (total.microdollars or 0) - (self._written.microdollars or 0)
        tokens = (total.tokens or 0) - (self._written.tokens or 0)
        self._written = total
        return Charge(usd or None, tokens or None) if usd or tokens else None


class Charging:
    """The charges of one run's bodies."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._due: dict[int, Attempt] = {}
        self._pause: asyncio.TimerHandle | None = None

    def hear(self, attempt: "Attempt", spending: Spending) -> None:
        """An attempt was charged. May be called on any thread."""
        app = self._driver.app
        if threading.get_ident() == app.thread:
            self._look_at(attempt, spending)
        elif not spending.is_announced:
            spending.is_announced = True
            try:
                app.loop.call_soon_threadsafe(self._driver.call, self._look_at, attempt, spending)
            except RuntimeError:
                self._warn(attempt)  # the loop is closed: nobody is left to write it down

    def _look_at(self, attempt: "Attempt", spending: Spending) -> None:
        spending.is_announced = False
        driver = self._driver
        if driver.is_over:
            self._warn(attempt)
        elif driver.attempts.bodies.running.get(attempt.call.call) is not attempt:
            self._write(attempt, spending, beside=True)  # a probe, or a body for which nobody waits any more
        elif driver.budgets is not None and not self._is_covered(attempt, spending):
            self._due[attempt.call.call] = attempt
            if self._pause is None:
                self._pause = driver.app.loop.call_later(SOON_SECONDS, driver.call, self._write_due)

    def _warn(self, attempt: "Attempt") -> None:
        log.warning(
            "%s of run %s was charged when the run had ended or left this process; that is not counted.",
            attempt.step,
            attempt.run,
        )

    def _is_covered(self, attempt: "Attempt", spending: Spending) -> bool:
        """Tell whether what was charged so far is within what the history has for this attempt anyway."""
        total, budgets = spending.total(), self._driver.budgets
        return total is None or (budgets is not None and budgets.covers(attempt.call.call, total))

    def _write_due(self) -> None:
        self._pause = None
        due, self._due = self._due, {}
        for call, attempt in due.items():
            if self._driver.attempts.bodies.running.get(call) is attempt:
                self.write(attempt)
        if due:
            self._pause = self._driver.app.loop.call_later(PAUSE_SECONDS, self._driver.call, self._write_due)

    def write(self, attempt: "Attempt") -> None:
        """Write down what an attempt was charged, if that is more than the history has for it: it may be cut off."""
        spending = attempt.spending
        if spending is not None and not self._driver.is_over and not self._is_covered(attempt, spending):
            self._write(attempt, spending)

    def _write(self, attempt: "Attempt", spending: Spending, *, beside: bool = False) -> None:
        charge, driver, call = spending.take_unwritten(), self._driver, attempt.call.call
        if charge is not None:
            part = driver.budgets.part_of(call) if driver.budgets is not None else 0
            body = ev.AttemptCharged(call, attempt.attempt, charge, beside, part)
            driver.record("attempt_charged", attempt.step, body)
            crash_point("budget.charged")
            driver.saver.save(waited_for=False)

    def stop(self) -> None:
        """The run leaves this process, or its bodies were stopped."""
        if self._pause is not None:
            self._pause.cancel()
