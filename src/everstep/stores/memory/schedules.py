"""The schedules of the in-memory store: the reference that every other store is compared with."""

import threading
from collections.abc import Sequence
from copy import deepcopy

from everstep.stores.rows.schedules import ChangeSchedule, ScheduleRow


class MemorySchedules:
    """Rows by their names. The store's lock guards them."""

    _lock: threading.RLock

    def __init__(self) -> None:
        self._schedules: dict[str, ScheduleRow] = {}

    def _replace_schedule(self, change: ChangeSchedule) -> bool:
        """Change a row, if its revision is the expected one."""
        there = self._schedules.get(change.name)
        if (there.revision if there is not None else 0) != change.expected:
            return False
        if change.row is None:
            return self._schedules.pop(change.name, None) is not None
        else:
            self._schedules[change.name] = change.row
        return True

    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        """Return schedules, by their names."""
        with self._lock:
            rows = [row for row in self._schedules.values() if name in (None, row.name)]
            return deepcopy(sorted(rows, key=lambda row: row.name))

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        """Return the schedules that are due at a time, the longest due first, and then those that wait for a run."""
        with self._lock:
            known = [row for row in self._schedules.values() if row.workflow in workflows]
            due = [(row.next_at, row.name) for row in known if row.next_at is not None and row.next_at <= at]
            waiting = [row.name for row in known if row.waits and (row.next_at is None or row.next_at > at)]
            names = [name for _, name in sorted(due)[:limit]] + sorted(waiting)[:limit]
            return deepcopy([self._schedules[name] for name in names])

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        """Return the earliest `next_at` among the schedules of these workflows."""
        with self._lock:
            rows = [row for row in self._schedules.values() if row.workflow in workflows]
            return min((row.next_at for row in rows if row.next_at is not None), default=None)
