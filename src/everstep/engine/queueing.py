"""Runs that wait in queues: an app begins them in their order, as far as their queues have room.

Whether there is room is decided by the store, in the transaction of the claim, so a limit holds over all processes.
What is asked beforehand only saves claims in vain: an app that finds a queue full does not look at the runs behind it.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from everstep.errors import Misuse, UnknownQueue
from everstep.model.ids import checked_name
from everstep.model.options import checked_flag, checked_seconds, checked_whole, refused
from everstep.stores.protocol import RunRow
from everstep.stores.queues import DEFAULT_QUEUE, ChangeQueue, QueueCount, QueueKind, QueueRow

if TYPE_CHECKING:
    from everstep.engine.app import App
    from everstep.engine.driving import Driving

UNSAID: Final = ...
"""An option that was not given: it stays as it is."""


class Queueing:
    """The queues that an app serves: with `recover` all (or those it was told to), else those that its runs wait in."""

    def __init__(self, app: "Driving", served: Sequence[str] | None) -> None:
        self._app = app
        self.served = tuple(served) if served is not None else None
        self._own: dict[str, dict[str, None]] = {}
        """Runs that belong to this app and wait, by queue."""
        self.next_at: int | None = None
        """When there will be room for a run that waits, if only time is missing."""

    def are_served(self, queue: str) -> bool:
        """Tell whether this app drives runs of a queue."""
        return self.served is None or queue in self.served

    def expect(self, row: RunRow) -> bool:
        """Tell whether a run of this app waits in a queue. Its turn is waited for, if that queue is served here."""
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
        """Begin runs that wait, as far as there is room, here and in their queues. Tells whether there may be more."""
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


def _checked_count(option: str, value: Any, least: int = 1) -> int | None:
    return None if value is None else checked_whole(option, value, least=least, most=2**31)


def _rate_changes(rate: Any) -> dict[str, Any]:
    if rate is None:
        return {"rate": None}
    if not (isinstance(rate, tuple | list) and len(rate) == 2):
        raise refused("rate", rate, "it is (how many, in how many seconds), such as (10, 60), or None for no limit")
    count, seconds = rate
    checked_whole("rate", count, least=1, most=2**31)
    return {"rate": count, "seconds": float(checked_seconds("rate", seconds, above=True, example=60))}


def changes_of(**options: Any) -> dict[str, Any]:
    """Return what given options change of a queue or limit. Raises `Misuse` if one cannot be."""
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if value is UNSAID:
            continue
        if name == "rate":
            changes |= _rate_changes(value)
        elif name == "paused":
            changes[name] = checked_flag("paused", value)
        else:
            changes[name] = _checked_count(name, value, 0 if name == "concurrency" else 1)
    return changes


async def change(app: "App", kind: QueueKind, name: str, changes: dict[str, Any]) -> QueueRow:
    """Say something about a queue or limit, durably, and return all that is said about it."""
    checked_name(name, kind)
    if kind == "queue" and name == DEFAULT_QUEUE:
        raise Misuse(
            f"Runs of the queue {DEFAULT_QUEUE!r} do not wait. Give their workflow or `start` another `queue=`."
        )
    known = await app.read(row_of, app, kind, name)
    if changes or known is None:
        await app.committer.submit(ChangeQueue(kind, name, changes, app.clock.now()))
        app.pump.nudge()
    row = await app.read(row_of, app, kind, name)
    assert row is not None
    return row


def row_of(app: "App", kind: QueueKind, name: str) -> QueueRow | None:
    """Return what was said about a queue or limit."""
    return next((row for row in app.store.queues() if (row.kind, row.name) == (kind, name)), None)


def existing(rows: Sequence[QueueRow], counts: Sequence[QueueCount], name: str) -> None:
    """Raise `UnknownQueue` if nothing was said about a queue or limit and no run is in it."""
    names = sorted({row.name for row in rows} | {count.name for count in counts})
    if name not in names:
        raise UnknownQueue(f"There is no queue or limit {name!r}. There are: {', '.join(names) or 'none'}.")
