"""What this process has to give back: slots of limits, the right to a run or to a thread.

No other process can give it back while this worker lives, and no one asks for it again: a store that refuses just then
(a disk is full, a right is missing) would keep it for as long as the worker lives. So it is tried again, with pauses
that grow, until it succeeds or the worker leaves, which frees all of it. Each such operation names the epoch or the
holder that it means: done late, or twice, it takes nothing from a later holder.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from everstep.engine.process.background import Background
from everstep.engine.process.committer import Committer
from everstep.errors import Misuse
from everstep.stores.protocol import Operation, Verdict

RETURNS: Final = "what is to be given back"


class Returns:
    """What the store has refused to take back so far."""

    def __init__(self, background: Background, committer: Committer) -> None:
        self._background = background
        self._committer = committer
        self._owed: deque[tuple[Operation, Callable[[], None]]] = deque()

    def give_back(self, operation: Operation, then: Callable[[], None] = lambda: None) -> "asyncio.Future[Verdict]":
        """Give something back, and call `then` when that is durable. What the future raises is tried again here."""
        future = self._committer.submit(operation)
        future.add_done_callback(lambda done: self._ended(operation, then, done))
        return future

    def owe(self, operation: Operation, then: Callable[[], None] = lambda: None) -> None:
        """Retry until the store takes something back. On the app's loop."""
        self._owed.append((operation, then))
        self._background.keep(RETURNS, self._settle)

    def _ended(self, operation: Operation, then: Callable[[], None], done: "asyncio.Future[Verdict]") -> None:
        if done.cancelled() or done.exception() is not None:
            self.owe(operation, then)
        else:
            then()

    async def _settle(self) -> None:
        while self._owed:
            operation, then = self._owed[0]
            try:
                await self._committer.submit(operation)
            except Misuse:
                return  # this app is closed
            self._owed.popleft()
            then()
