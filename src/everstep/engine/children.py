"""The child runs of one run in memory: started with their event, taken up again, asked to stop."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from everstep.engine.commands import ChildCall
from everstep.engine.starting import new_run
from everstep.model import events as ev
from everstep.model.budgets import Allotment, allotment_of
from everstep.stores.protocol import NewRun, Post

if TYPE_CHECKING:
    from everstep.engine.driver import Driver


def outlives_not(on_parent_end: str, *, is_cancelled: bool) -> bool:
    """Tell whether a child is asked to stop when its parent ends; one that the parent would wait for, if cancelled."""
    return on_parent_end == "cancel" or (on_parent_end == "wait" and is_cancelled)


class Children:
    """What the driver does about the children of its run."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._told_to_stop: set[str] = set()

    def start(self, call: ChildCall, allotted: Allotment | None = None) -> None:
        """Start a child, in the transaction of the event that is recorded next, with its part of the run's budget."""
        self._driver.journal.starts.append(self._new_run(call, allotted or allotment_of(call.target.budget)))

    def take_up(self, calls: Iterable[ChildCall], *, tell_again: bool) -> None:
        """Drive children again whose driver may have died with this run's last one.

        With `tell_again` a child that failed was retried too, and has to be told again who waits for it.
        """
        for call in calls:
            if tell_again:
                self.start(call)
            self._driver.app.adopt(call.run)

    def _new_run(self, call: ChildCall, budget: Allotment | None) -> NewRun:
        app = self._driver.app
        return new_run(
            call.target,
            call.run,
            call.arguments,
            at=app.clock.now(),
            randomness=app.randomness,
            parent=self._driver.run,
            call=call.call,
            budget=budget,
        )

    def cancel(self, child: str) -> None:
        """Ask a child to stop, in the transaction of the event that is recorded next."""
        if child in self._told_to_stop:
            return
        self._told_to_stop.add(child)
        driver = self._driver
        request = ev.CancelRequested(reason=f"its parent {driver.run} no longer waits for it", by=driver.run)
        driver.journal.posts.append(Post(child, "cancel", value=ev.encode_body(request), at=driver.app.clock.now()))
        driver.saver.when_durable(driver.journal.seq + 1, lambda: driver.app.wake(child))

    def cancel_those_that_end_with_it(self) -> None:
        """Ask the children to stop that should not outlive the run."""
        execution = self._driver.execution
        for child in execution.children.values():
            if outlives_not(child.target.on_parent_end, is_cancelled=execution.cancel is not None):
                self.cancel(child.run)
