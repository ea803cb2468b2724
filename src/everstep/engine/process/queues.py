"""Runs that wait in queues: an app begins them in their order, as far as their queues have room.

The store decides about room in the transaction of the claim, so a limit holds over all processes. What is read before
only saves useless claims: an app that finds a queue full does not look at the runs behind it.
"""

import asyncio
from collections.abc import Sequence

from everstep.engine.process.process import Process
from everstep.stores.protocol import RunRow
from everstep.stores.rows.queues import DEFAULT_QUEUE


class Queueing:
    """The queues that an app serves: with `recover` all (or the configured ones), else those that its runs wait in."""

    def __init__(self, app: Process, served: Sequence[str] | None) -> None:
        self._app = app
        self.served = tuple(served) if served is not None else None
        self._own: dict[str, dict[str, None]] = {}
        """Runs that belong to this app and wait, by queue."""
        self.next_at: int | None = None
        """When a waiting run will have room, if it only lacks time."""

    def are_served(self, queue: str) -> bool:
        """Return True if this app drives runs of a queue."""
        return self.served is None or queue in self.served

    def expect(self, row: RunRow) -> bool:
        """Return True if a run of this app waits in a queue. Its turn is awaited, if that queue is served here."""
        if row.queue == DEFAULT_QUEUE or row.status != "queued":
            return False
        if self.are_served(row.queue):
            self._own.setdefault(row.queue, {})[row.id] = None
        return True

    @property
    def has_own(self) -> bool:
        """Whether any run of this app waits in a queue."""
        return bool(self._own)

    async def _wanted(self) -> Sequence[str] | None:
        """Return the queues to look at; None for all."""
        if self._app.recover:
            return self.served
        for queue, runs in list(self._own.items()):
            while runs:
                first = next(iter(runs))
                row = await self._app.read(self._app.store.run, first)
                if row is not None and row.status == "queued" and row.owner is None:
                    break
                runs.pop(first, None)
            if not runs:
                self._own.pop(queue, None)
        return tuple(self._own)

    async def take(self, at: int, room: int) -> bool:
        """Begin waiting runs, as far as there is room, here and in their queues. Returns whether there may be more."""
        app, self.next_at = self._app, None
        queues = await self._wanted()
        if queues is not None and not queues:
            return False
        found = False
        for queue in await app.read(app.store.queue_room, at=at, worker=app.worker, queues=queues):
            if queue.next_at is not None:
                self.next_at = min(queue.next_at, self.next_at or queue.next_at)
            limit = min(room, queue.room)
            if limit <= 0:
                continue
            wanted = {"at": at, "workflows": app.workflows(), "limit": limit}
            runs = await app.read(app.store.queued, queue.name, **wanted)
            runs = [run for run in runs if run not in app.untakeable]
            taken = sum(await asyncio.gather(*(app.take_up_run(run) for run in runs)))
            room -= taken
            found = found or (taken > 0 and taken == len(runs))
        return found
