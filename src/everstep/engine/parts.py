"""Parts of an app that few programs use, each loaded and made when it is first wanted."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from everstep.model.collector import paused_collector

if TYPE_CHECKING:
    from everstep.engine.children import RecentEnds
    from everstep.engine.interrupted import Interrupted
    from everstep.engine.limits import Limits
    from everstep.engine.losses import Losses
    from everstep.engine.scheduling import Scheduler


class Parts:
    """What an app has only once somebody has asked for it."""

    has_scheduler = False
    has_limits = False
    has_losses = False
    has_interrupted = False

    @cached_property
    def recent_ends(self) -> "RecentEnds":
        """How children ended that were driven here."""
        from everstep.engine.children import RecentEnds

        return RecentEnds()

    @cached_property
    def scheduler(self: Any) -> "Scheduler":
        """What starts the runs of schedules. Only an app with `recover` does that."""
        from everstep.engine.scheduling import Scheduler

        self.has_scheduler = True
        return Scheduler(self)

    @cached_property
    def limits(self: Any) -> "Limits":
        """The steps that wait for a slot of a named limit, and those that have one."""
        from everstep.engine.limits import Limits

        self.has_limits = True
        return Limits(self)

    @cached_property
    def losses(self: Any) -> "Losses":
        """The runs that have lost their tails and are not held yet."""
        from everstep.engine.losses import Losses

        self.has_losses = True
        return Losses(self)

    @cached_property
    def interrupted(self: Any) -> "Interrupted":
        """The runs that were stopped, and are taken up again after a pause."""
        from everstep.engine.interrupted import Interrupted

        self.has_interrupted = True
        return Interrupted(self)

    def look_for_losses(self: Any) -> set[str]:
        """Stop the runs that are known by now to have lost their tails, have them held, and return their ids."""
        found = self.store.lost_tails()
        return self.losses.look(found) if found or self.has_losses else set()

    def is_lost(self, run: str) -> bool:
        """Tell whether a run is not to be driven: its tail is lost, and it is about to be held."""
        self.look_for_losses()
        return self.has_losses and run in self.losses.open


def load_all(url: str = "") -> None:
    """Load the whole engine now: this process will live long. See `whole.py`. `url` is the store's."""
    with paused_collector():
        from everstep.engine import whole  # noqa: F401

        if url.startswith("postgres"):
            from everstep.effects import postgres_database  # noqa: F401  # atomic steps in it
