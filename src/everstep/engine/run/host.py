"""What a driver sees of the app that it belongs to."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from everstep.codec import Codec
from everstep.engine.code.commands import StepCall
from everstep.engine.history.clock import Clock
from everstep.engine.run.acting import Acting
from everstep.engine.run.children import RecentEnds
from everstep.engine.run.threads import Threads
from everstep.errors import StoreError
from everstep.stores.protocol import HoldRow, RunRow, Store
from everstep.stores.rows.keys import KeyChanges
from everstep.stores.rows.notifications import NotificationRow

if TYPE_CHECKING:
    from everstep.engine.run.attempts import BodyTasks
    from everstep.engine.run.driver import Driver
    from everstep.engine.run.holds import HoldReport
    from everstep.engine.run.writer import RunWriter


V = TypeVar("V")


class Commits(Protocol):
    """What writes the units of runs."""

    def ready(self, source: "RunWriter", *, waited_for: bool) -> None:
        """Take note that a run has something to write."""

    def commit_now(self) -> None:
        """Commit at once, without a turn of the loop."""


class Limits(Protocol):
    """The steps that wait for a slot of a named limit."""

    def begin(self, driver: "Driver", call: StepCall) -> None:
        """The code asked for a step with a limit."""

    def withhold(self, driver: "Driver", call: StepCall, because: str = ..., *, again: bool = ...) -> None:
        """Record that an attempt waits for a slot, and begin it when it has one."""

    def ask(self, driver: "Driver", call: StepCall, because: str) -> None:
        """Wait for a slot. That the attempt waits is recorded."""


class Interrupted(Protocol):
    """The runs that were stopped, and are taken up again after a pause."""

    def cause(self, run: str) -> str:
        """Return what stopped a run here last; "" if nothing did."""

    def leave(self, driver: "Driver", stop: BaseException, where: str) -> None:
        """A driven run was stopped: let it leave memory, and come back later."""


class Stumbling(Protocol):
    """The runs for which the engine itself raised."""

    def leave(self, driver: "Driver", error: BaseException, *, is_own: bool = ...) -> None:
        """Let a run leave memory, and take it up again from its history."""

    def take_later(self, run: str, error: BaseException, *, is_own: bool = ...) -> None:
        """Take a run up again from its history, after a pause."""


class Resting(Protocol):
    """The waiting runs that stay in memory for a while."""

    def add(self, driver: "Driver") -> None:
        """Keep a run that waits now."""


class Notifies(Protocol):
    """What tells of holds."""

    def rows(self, hold: HoldRow) -> list[NotificationRow]:
        """Return what is to be written with a hold."""


class Watched(Protocol):
    """The waiters for ends of runs."""

    def look_again(self, run: str) -> None:
        """Let the waiters of a run look at its row again."""


class RunHost(Protocol):
    """What a driver needs of the process that it runs in."""

    store: "Store"
    codec: "Codec"
    clock: "Clock"
    now: Callable[[], int]
    """The clock's: a driver asks it for each event."""
    loop: asyncio.AbstractEventLoop
    context: Context
    thread: int
    threads: "Threads"
    acting: "Acting"
    body_tasks: "BodyTasks"
    randomness: random.Random
    worker: str
    life: str
    drivers: dict[str, "Driver"]
    draining: bool
    gone_after: float | None
    """Seconds after which a silent worker elsewhere counts as gone, if that was set."""

    @property
    def committer(self) -> Commits:
        """What writes this run's units, with those of others."""

    @property
    def notifier(self) -> Notifies:
        """What tells of holds."""

    @property
    def watchers(self) -> Watched:
        """The waiters for ends of runs."""

    @property
    def resting(self) -> Resting:
        """The waiting runs that stay in memory for a while."""

    @property
    def stumbling(self) -> Stumbling:
        """The runs for which the engine itself raised."""

    @property
    def interrupted(self) -> Interrupted:
        """The runs that were stopped, and are taken up again after a pause."""

    @property
    def recent_ends(self) -> "RecentEnds":
        """How children ended that were driven here."""

    @property
    def limits(self) -> Limits:
        """The steps that wait for a slot of a named limit."""

    async def give_back(self, row: RunRow) -> None:
        """Give a claimed run back as it was."""

    async def leave_alone(self, row: RunRow) -> None:
        """Give a run back that this process cannot read, and do not claim it again."""

    async def look_at_delayed(self, row: RunRow) -> None:
        """Do what has arrived for a claimed run that does not begin yet."""

    async def hold_or_leave(self, row: RunRow, report: "HoldReport") -> None:
        """Hold a claimed run, unless another worker may find nothing wrong with it."""

    def hold_new(self, run: str, report: "HoldReport") -> None:
        """Hold a run that was started just now."""

    def set_aside(self, row: RunRow, error: BaseException) -> None:
        """The code of a claimed run was stopped before its first rest, or in a replay. Anything else is raised."""

    def was_woken(self, run: str) -> bool:
        """Tell whether something has arrived for a run since it was claimed."""

    def compare_later(self, run: str, comparing: Coroutine[Any, Any, None]) -> None:
        """Let the outside of a run be compared while others are looked after."""

    def abandon(self, driver: "Driver") -> None:
        """The outside of a run could not be compared: it is taken up again."""

    def note_driven(self, driver: "Driver") -> None:
        """A run is driven here from now on."""

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
