"""What the parts of a process see of the app that they belong to."""

from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from everstep.engine.process.background import Background, BackgroundHost
from everstep.engine.process.committer import Committer
from everstep.engine.process.elsewhere import Elsewhere
from everstep.engine.process.returns import Returns
from everstep.model.status import Status
from everstep.stores.protocol import HoldRow


class Process(BackgroundHost, Protocol):
    """What a part of a process needs of the whole, beyond what a driver needs of it."""

    committer: Committer
    background: Background
    returns: Returns
    elsewhere: Elsewhere
    recover: bool
    untakeable: set[str]
    """Runs that are let alone until this app ends."""

    def workflows(self) -> Sequence[str]:
        """Return the names of the workflows that this app can drive."""

    async def become_worker(self) -> None:
        """Enter this process among the workers, once it drives its first run."""

    async def take_up_run(self, run: str) -> bool:
        """Claim a run if it is free, and drive it. Returns whether it is driven here now."""

    def setting_aside(self, run: str) -> AbstractContextManager[None]:
        """Within the block a run is not resumed."""

    def want(self, run: str) -> None:
        """Remember a run that is to be driven here once no other process drives it."""

    def cannot_take_up(self, run: str) -> None:
        """Leave a run alone from now on, until it was repaired."""

    def held(self, hold: HoldRow | None) -> None:
        """Log that a run is held, and notify of it."""

    def ended_without_code(self, run: str, status: Status) -> None:
        """A run has ended, and its code did not run."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, run: str = "") -> None:
        """Do something once in the background."""
