"""The notifications of the in-memory store: the reference that every other store is compared with."""

from collections.abc import Callable, Collection, Sequence

from everstep.stores.rows.notifications import NotificationRow, SettleNotification, TakeNotification


class MemoryNotifications:
    """Rows by their ids. The store's lock guards them."""

    def __init__(self) -> None:
        self._rows: dict[str, NotificationRow] = {}

    def add(self, rows: Sequence[NotificationRow]) -> None:
        """Keep new rows; one that is there already stays as it is."""
        for row in rows:
            self._rows.setdefault(row.id, row)

    def drop(self, hold: str) -> None:
        """The hold is resolved."""
        for row in self._rows.values():
            if row.hold == hold and row.state == "pending":
                row.state, row.claimed_by = "dropped", None

    def forget(self, run: str) -> None:
        """The run is deleted."""
        self._rows = {id: row for id, row in self._rows.items() if row.run != run}

    def take(self, take: TakeNotification, workers: Collection[str]) -> bool:
        """Take a row, if it is free."""
        row = self._rows.get(take.id)
        if row is None or row.state != "pending" or row.attempts != take.attempt - 1:
            return False
        if row.next_at > take.at and not _is_abandoned(row, workers):
            return False
        row.attempts, row.claimed_by, row.next_at = take.attempt, take.worker, take.until
        return True

    def settle(self, settle: SettleNotification) -> bool:
        """Say how an attempt went."""
        row = self._rows.get(settle.id)
        if row is None:
            return False
        if settle.state == "sent":
            is_news = row.state != "sent"
            row.state, row.claimed_by, row.last_error = "sent", None, ""
            return is_news
        if row.state != "pending" or row.attempts != settle.attempt:
            return False
        row.state, row.next_at, row.last_error, row.claimed_by = settle.state, settle.next_at, settle.error, None
        return True

    def listed(self, run: str | None, undelivered_only: bool, is_open: Callable[[str], bool]) -> list[NotificationRow]:
        """Return rows, oldest first."""
        rows = [row for row in self._rows.values() if run in (None, row.run)]
        if undelivered_only:
            rows = [row for row in rows if row.state in ("pending", "given up") and is_open(row.hold)]
        return sorted(rows, key=lambda row: (row.created_at, row.id))

    def due(self, target: str, at: int, limit: int, workers: Collection[str]) -> list[NotificationRow]:
        """Return the rows that are free, the longest due first, then those whose worker died."""
        pending = [row for row in self._rows.values() if row.state == "pending" and row.target == target]
        due = [row for row in pending if row.next_at <= at]
        abandoned = [row for row in pending if row.next_at > at and _is_abandoned(row, workers)]
        return [*sorted(due, key=_urgency), *sorted(abandoned, key=_urgency)][:limit]

    def next(self, target: str) -> int | None:
        """Return the earliest time at which a row is free."""
        times = [row.next_at for row in self._rows.values() if row.state == "pending" and row.target == target]
        return min(times, default=None)


def _is_abandoned(row: NotificationRow, workers: Collection[str]) -> bool:
    return row.claimed_by is not None and row.claimed_by not in workers


def _urgency(row: NotificationRow) -> tuple[int, str]:
    return row.next_at, row.id
