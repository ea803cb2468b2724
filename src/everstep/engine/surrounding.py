"""What a driver sees of the app that it belongs to."""

import asyncio
import random
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from everstep.codec import Codec
    from everstep.engine.acting import Acting
    from everstep.engine.children import RecentEnds
    from everstep.engine.clock import Clock
    from everstep.engine.committer import Committer
    from everstep.engine.driver import Driver
    from everstep.engine.first_turns import FirstTurns
    from everstep.engine.interrupted import Interrupted
    from everstep.engine.limits import Limits
    from everstep.engine.notifying import Notifier
    from everstep.engine.resting import Resting
    from everstep.engine.stumbling import Stumbling
    from everstep.engine.threads import Threads
    from everstep.engine.watchers import Watchers
    from everstep.errors import StoreError
    from everstep.stores.keys import KeyChanges
    from everstep.stores.protocol import Store

V = TypeVar("V")


class Surrounding(Protocol):
    """What a driver needs of the app that it belongs to."""

    store: "Store"
    committer: "Committer"
    codec: "Codec"
    clock: "Clock"
    now: Callable[[], int]
    """The clock's: a driver asks it for each event."""
    loop: asyncio.AbstractEventLoop
    context: Context
    thread: int
    threads: "Threads"
    acting: "Acting"
    first_turns: "FirstTurns"
    randomness: random.Random
    worker: str
    life: str
    drivers: dict[str, "Driver"]
    draining: bool
    gone_after: float | None
    """Seconds after which a silent worker elsewhere counts as gone, if that was set."""
    notifier: "Notifier"
    resting: "Resting"
    stumbling: "Stumbling"
    watchers: "Watchers"

    @property
    def interrupted(self) -> "Interrupted":
        """The runs that were stopped, and are taken up again after a pause."""

    @property
    def recent_ends(self) -> "RecentEnds":
        """How children ended that were driven here."""

    @property
    def limits(self) -> "Limits":
        """The steps that wait for a slot of a named limit."""

    def look_for_losses(self) -> set[str]:
        """Have the runs held that have lost their tails, and return their ids."""

    def note_gone(self, worker: str) -> None:
        """Keep that a worker counts as gone, because `gone_after` is over."""

    def adopt(self, run: str) -> None:
        """Drive a child run that has just become durable."""

    def wake(self, run: str) -> None:
        """Something is in a run's inbox."""

    def take_again(self, driver: "Driver") -> None:
        """The run leaves memory, and comes back from its history."""

    def take_next(self, driver: "Driver") -> None:
        """The run goes on with a fresh history."""

    async def read(self, method: Callable[..., V], /, *args: Any, **named: Any) -> V:
        """Ask the store: right here if it answers at once, else on a thread."""

    def read_then(
        self,
        run: str,
        then: Callable[[V], Any],
        failed: "Callable[[StoreError], Any]",
        method: Callable[..., V],
        /,
        *args: Any,
    ) -> None:
        """Ask the store, and call back with the answer: now, or when it has come."""

    def hold_unstorable(self, driver: "Driver", error: BaseException) -> None:
        """The store refuses the newest events of this run."""

    def let_go(self, driver: "Driver", error: BaseException | None = None) -> None:
        """The run has ended, is held, or is not ours any more."""

    def keys_changed(self, changes: "KeyChanges") -> None:
        """A run has changed keys of effects. Whoever waits for them has that in its inbox."""
