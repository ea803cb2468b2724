"""Notifications of holds for targets outside: rows written with the hold, delivered at least once.

A row names its target and has no secrets; the address, its headers and its secret are configuration of the processes
that deliver. A worker takes the row first, for a short while, so that no two deliver it at once.
"""

from typing import Literal

import msgspec

NotificationState = Literal["pending", "sent", "given up", "dropped"]
"""`dropped`: the hold was resolved before any delivery was acknowledged."""


class NotificationRow(msgspec.Struct, kw_only=True):
    """One hold for one target. Its id derives from both, so that there is only one."""

    id: str
    hold: str
    run: str
    target: str
    state: NotificationState = "pending"
    attempts: int = 0
    """How often it was sent, including an attempt in progress."""
    next_at: int = 0
    """No worker takes it (again) before this time."""
    claimed_by: str | None = None
    """The worker that is sending it. If that worker is gone, the row is free."""
    last_error: str = ""
    created_at: int = 0


class TakeNotification(msgspec.Struct, gc=False):
    """Take a pending notification, to send it as attempt `attempt`. No other worker may take it before `until`.

    Accepted only if it is pending, has had `attempt - 1` attempts, and is free: its time has come at `at`, or the
    worker that took it has no row in `workers` (it died). Otherwise `Refused("taken")`.
    """

    id: str
    attempt: int
    worker: str
    at: int
    until: int


class SettleNotification(msgspec.Struct, gc=False):
    """Record the result of attempt `attempt`: `sent`; `pending`, to be sent again at `next_at`; or `given up`.

    `sent` is accepted once, whatever happened to the row meanwhile, because it has arrived. The others are accepted
    only while it is pending and this attempt is its last. Otherwise `Refused("taken")`.
    """

    id: str
    attempt: int
    state: NotificationState
    next_at: int = 0
    error: str = ""
