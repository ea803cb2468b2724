"""The deadlines of one run in memory: timers, next attempts, its timeout, the grace of a cancel."""

import heapq
from typing import TYPE_CHECKING, Literal, NamedTuple

from everstep.model import events as ev

if TYPE_CHECKING:
    from everstep.engine.run.driver import Driver


DeadlineKind = Literal["timer", "attempt", "probe", "run", "grace", "budget"]


class Deadline(NamedTuple):
    """Something to do at a time. Equal times keep the order in which they were set."""

    at: int
    order: int
    kind: DeadlineKind
    call: int


class Deadlines:
    """A heap; entries whose cause is gone are dropped when they come to the top.

    It is handed its driver with each question, and does not hold it: a circle would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self.heap: list[Deadline] = []
        self._set = 0
        """How many there were ever."""

    def add(self, at: int, kind: DeadlineKind, call: int = 0) -> None:
        """Set a deadline."""
        self._set += 1
        heapq.heappush(self.heap, Deadline(at, self._set, kind, call))

    def next(self, driver: "Driver") -> Deadline | None:
        """Return the earliest deadline whose cause still holds."""
        while self.heap and not _holds(self.heap[0], driver):
            heapq.heappop(self.heap)
        return self.heap[0] if self.heap else None

    def fire(self, driver: "Driver", until: int) -> None:
        """Do what was due up to a time, in the order in which it was due."""
        while not driver.takes_nothing and (top := self.next(driver)) and top.at <= until:
            heapq.heappop(self.heap)
            if top.kind == "timer":
                driver.deliver("timer_fired", "", ev.TimerFired(top.call))
            elif top.kind == "attempt":
                driver.attempts.begin_again(top.call)
            elif top.kind == "probe":
                driver.attempts.doubts.ask(top.call)
            elif top.kind == "budget":
                assert driver.budgets is not None
                driver.budgets.time_is_up()
            elif top.kind == "run":
                driver.request_cancel(ev.CancelRequested(reason="the run's timeout", timeout=True))
            else:
                driver.end_after_grace()


def _holds(deadline: Deadline, driver: "Driver") -> bool:
    if deadline.kind == "timer":
        return deadline.call in driver.execution.loop.timers
    if deadline.kind == "attempt":
        return driver.attempts.is_due_later(deadline.call)
    if deadline.kind == "probe":
        return driver.attempts.doubts.is_due(deadline.call)
    if driver.execution.is_undone:
        return False
    return deadline.kind == "grace" or driver.execution.cancel is None
