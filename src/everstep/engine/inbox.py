"""What arrives for a run from outside: signals, cancels, ends of children, holds. In the order of arrival."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from everstep.engine.holding import HoldReport
from everstep.model import events as ev
from everstep.model.budgets import Standing
from everstep.model.crash_points import crash_point
from everstep.stores.protocol import Delivery

if TYPE_CHECKING:
    from everstep.engine.driver import Driver


class ChildEnd(msgspec.Struct):
    """The value of a `child` delivery."""

    status: str
    outcome: msgspec.Raw = msgspec.Raw(b"null")
    budget: Standing | None = None


class Inbox:
    """Takes deliveries into the history of one run."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._taken: set[int] = set()

    async def pull(self) -> None:
        """Take what has arrived, and do what was due before."""
        self._driver.ring()

    def take(self, deliveries: Sequence[Delivery], *, fire: bool = True) -> None:
        """Take deliveries into the history. A timer that was due before one arrived comes first.

        Without `fire` the code has ended and only the cancels matter: nothing is due, and nothing comes to rest.
        """
        driver = self._driver
        for delivery in deliveries:
            if delivery.number in self._taken:
                continue
            # Never beyond the present: the sender's clock may be ahead, and no timer fires early.
            if fire:
                driver.deadlines.fire(min(delivery.at, driver.app.clock.now()))
            if driver.is_over:
                return
            self._taken.add(delivery.number)
            driver.journal.consumed.append(delivery.number)
            crash_point("delivery.taken")
            _TAKE[delivery.kind](self, delivery)
        if fire:
            driver.come_to_rest()

    def _signal(self, delivery: Delivery) -> None:
        raw, ref = self._driver.journal.pack(delivery.value)
        body = ev.SignalReceived(delivery.number, delivery.name, raw, ref, delivery.id)
        self._driver.deliver("signal_received", "", body)

    def _cancel(self, delivery: Delivery) -> None:
        request: ev.CancelRequested = msgspec.json.decode(delivery.value, type=ev.CancelRequested)
        request.number = delivery.number
        if self._driver.execution.cancel is None or request.now:
            self._driver.request_cancel(request)
        else:
            self._driver.saver.save(waited_for=False)  # it is being cancelled already

    def _child(self, delivery: Delivery) -> None:
        end = msgspec.json.decode(delivery.value, type=ChildEnd)
        call = int(delivery.id)
        if call not in self._driver.execution.children:
            self._driver.saver.save(waited_for=False)
            return
        raw, ref = self._driver.journal.pack(bytes(end.outcome) if end.status in ("completed", "failed") else b"")
        body = ev.ChildEnded(call, delivery.name, end.status, delivery.number, raw, ref)
        if end.budget is not None and end.budget.by == self._driver.run:  # else it is another run's to pay
            body.used, body.granted = end.budget.used, end.budget.granted or None
        self._driver.deliver("child_ended", "", body)

    def _hold(self, delivery: Delivery) -> None:
        self._driver.put_on_hold(msgspec.json.decode(delivery.value, type=HoldReport))


_TAKE: Final[dict[str, Callable[[Inbox, Delivery], None]]] = {
    "signal": Inbox._signal,
    "cancel": Inbox._cancel,
    "child": Inbox._child,
    "hold": Inbox._hold,
}
