"""Notifications of holds that have not arrived, in words."""

from collections.abc import Callable
from typing import Any

from everstep.cli.terminal import between, clean
from everstep.stores.protocol import Store, WorkerRow
from everstep.stores.rows.notifications import NotificationRow
from everstep.stores.sqlite.liveness import LiveLocks


def living_workers(store: Store) -> list[WorkerRow]:
    """Return the workers whose process lives."""
    path = getattr(store, "path", None)
    is_alive: Callable[[WorkerRow], bool] | None = getattr(store, "is_alive", None)
    if is_alive is not None:
        return [worker for worker in store.workers() if is_alive(worker)]
    if path is None:
        return [worker for worker in store.workers() if worker.has_lease]
    locks = LiveLocks(f"{path}-live")
    try:
        return [worker for worker in store.workers() if locks.is_held(worker.place)]
    finally:
        locks.close()


class Notices:
    """The undelivered notifications, by hold, and the workers that could deliver them."""

    def __init__(self, store: Store, run: str | None = None) -> None:
        self._now = store.now()
        self._of: dict[str, list[NotificationRow]] = {}
        for row in store.notifications(run=run):
            self._of.setdefault(row.hold, []).append(row)
        self._served = {target for one in living_workers(store) for target in one.targets} if self._of else set()

    def facts(self, hold: str) -> list[dict[str, Any]]:
        """Return the notifications of a hold for `--json`."""
        return [
            {
                "target": row.target,
                "state": row.state,
                "attempts": row.attempts,
                "next_at": row.next_at,
                "last_error": row.last_error,
                "is_served": row.target in self._served,
            }
            for row in self._of.get(hold, ())
        ]

    def lines(self, hold: str) -> list[str]:
        """Return the notifications of a hold as sentences."""
        return [f"✉ {clean(row.target)}: {clean(self._text(row))}" for row in self._of.get(hold, ())]

    def counts(self) -> dict[str, int]:
        """Return how many are undelivered, were given up, and wait for a worker that could deliver them."""
        rows = [row for rows in self._of.values() for row in rows]
        unserved = [row for row in rows if row.state == "pending" and row.target not in self._served]
        given_up = sum(row.state == "given up" for row in rows)
        return {"undelivered": len(rows), "given up": given_up, "unserved": len(unserved)}

    def _text(self, row: NotificationRow) -> str:
        tried = f"{row.attempts} attempts" if row.attempts != 1 else "1 attempt"
        error = f", the last: {row.last_error}" if row.last_error else ""
        if row.state == "given up":
            return f"not delivered, and given up after {tried}{error}"
        if row.target not in self._served:
            return f"not delivered yet ({tried}{error}); no worker has this target: EVERSTEP_ON_HOLD, on_hold="
        if row.claimed_by is not None:
            return f"being delivered now ({tried}{error})"
        wait = f"again in {between(self._now, row.next_at)}" if row.next_at > self._now else "at once"
        return f"not told yet ({tried}{error}); {wait}"
