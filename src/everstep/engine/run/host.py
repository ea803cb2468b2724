"""The driver's view of the app that it belongs to."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from everstep.codec import Codec
from everstep.engine.code.commands import StepCall
from everstep.engine.run.acting import Acting
from everstep.engine.run.children import ChildHost, RecentEnds
from everstep.engine.run.holds import HoldReport
from everstep.engine.run.threads import Threads
from everstep.errors import StoreError
from everstep.model.status import Status
from everstep.stores.protocol import HoldRow, RunRow
from everstep.stores.rows.keys import KeyChanges
from everstep.stores.rows.notifications import NotificationRow

if TYPE_CHECKING:  # a real cycle: a driver knows its host, and the host its drivers
    from everstep.engine.run.attempts import BodyTasks
    from everstep.engine.run.driver import Driver
    from everstep.engine.run.writer import RunWriter


V = TypeVar("V")


class Commits(Protocol):
    """Writes the units of runs."""

    def ready(self, source: "RunWriter", *, waited_for: bool) -> None:
        """Queue a run that has something to write."""

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
    """The runs that were stopped, and are resumed after a pause."""

    def cause(self, run: str) -> str:
        """Return what last stopped a run here; "" if nothing did."""

    def leave(self, driver: "Driver", stop: BaseException, where: str) -> None:
        """Evict a driven run that was stopped, and resume it later."""


class Stumbling(Protocol):
    """The runs for which the engine itself raised."""

    def leave(self, driver: "Driver", error: BaseException, *, is_own: bool = ...) -> None:
        """Evict a run, and resume it from its history."""

    def take_later(self, run: str, error: BaseException, *, is_own: bool = ...) -> None:
        """Resume a run from its history, after a pause."""


class Resting(Protocol):
    """The waiting runs that stay in memory for a while."""

    def add(self, driver: "Driver") -> None:
        """Keep a run that waits now."""


class Holding(Protocol):
    """What holds and ends runs without their code."""

    async def look_at_delayed(self, row: RunRow) -> None:
        """Do what has arrived for a claimed run that does not begin yet."""

    def hold_new(self, run: str, report: HoldReport) -> None:
        """Hold a run that was started just now."""

    async def hold_claimed(self, row: RunRow, report: HoldReport) -> None:
        """Hold a claimed run."""

    def hold_unstorable(self, driver: "Driver", error: BaseException) -> None:
        """The store refuses the newest events of this run."""


class Notifies(Protocol):
    """Notifies of holds."""

    def rows(self, hold: HoldRow) -> list[NotificationRow]:
        """Return the rows to write with a hold."""


class Watched(Protocol):
    """The waiters for ends of runs."""

    def tell(self, run: str, status: Status, outcome: bytes | None) -> None:
        """A run has ended or is held."""

    def look_again(self, run: str) -> None:
        """Make the waiters of a run read its row again."""


class RunHost(ChildHost, Protocol):
    """What a driver needs of the process that it runs in."""

    codec: "Codec"
    now: Callable[[], int]
    """The clock's: a driver asks it for each event."""
    loop: asyncio.AbstractEventLoop
    context: Context
    thread: int
    threads: "Threads"
    acting: "Acting"
    body_tasks: "BodyTasks"
    worker: str
    drivers: dict[str, "Driver"]
    draining: bool
    gone_after: float | None
    """Seconds after which a silent worker elsewhere counts as gone, if that was set."""

    @property
    def committer(self) -> Commits:
        """Writes this run's units, with those of others."""

    @property
    def notifier(self) -> Notifies:
        """Notifies of holds."""

    @property
    def watchers(self) -> Watched:
        """The waiters for ends of runs."""

    @property
    def resting(self) -> Resting:
        """The waiting runs that stay in memory for a while."""

    @property
    def holding(self) -> Holding:
        """What holds and ends runs without their code."""

    @property
    def stumbling(self) -> Stumbling:
        """The runs for which the engine itself raised."""

    @property
    def interrupted(self) -> Interrupted:
        """The runs that were stopped, and are resumed after a pause."""

    @property
    def recent_ends(self) -> "RecentEnds":
        """The ends of children that were driven here."""

    @property
    def limits(self) -> Limits:
        """The steps that wait for a slot of a named limit."""

    async def give_back(self, row: RunRow) -> None:
        """Give a claimed run back as it was."""

    async def leave_alone(self, row: RunRow) -> None:
        """Give a run back that this process cannot read, and do not claim it again."""

    async def hold_or_leave(self, row: RunRow, report: HoldReport) -> None:
        """Hold a claimed run, unless another worker may find nothing wrong with it."""

    def set_aside(self, row: RunRow, error: BaseException) -> None:
        """The code of a claimed run was stopped before its first rest, or in a replay. Anything else is raised."""

    def was_woken(self, run: str) -> bool:
        """Return True if a run has received a delivery since it was claimed."""

    def compare_later(self, run: str, comparing: Coroutine[Any, Any, None]) -> None:
        """Compare a run with the outside in the background."""

    def abandon(self, driver: "Driver") -> None:
        """Resume a run whose outside could not be compared."""

    def note_driven(self, driver: "Driver") -> None:
        """Record that a run is driven here from now on."""

    def look_for_losses(self) -> set[str]:
        """Hold the runs that have lost their tails, and return their ids."""

    def note_gone(self, worker: str) -> None:
        """Record that a worker counts as gone, because `gone_after` is over."""

    def take_again(self, driver: "Driver") -> None:
        """Evict a run, and resume it from its history."""

    def take_next(self, driver: "Driver") -> None:
        """Continue a run with its fresh history."""

    async def read(self, method: Callable[..., V], /, *args: Any, **named: Any) -> V:
        """Call a method of the store: right here if it answers at once, else on a thread."""

    def read_then(
        self,
        run: str,
        then: Callable[[V], Any],
        failed: "Callable[[StoreError], Any]",
        method: Callable[..., V],
        /,
        *args: Any,
    ) -> None:
        """Call a method of the store, and call back with the answer: now, or when it has come."""

    def let_go(self, driver: "Driver", error: BaseException | None = None) -> None:
        """Let go of a run that has ended, is held, or belongs to another worker."""

    def keys_changed(self, changes: "KeyChanges") -> None:
        """Note that a run has changed keys of effects. The inboxes of waiting runs have that."""
