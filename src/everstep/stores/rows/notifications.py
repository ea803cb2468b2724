"""Notifications of holds that are to reach somebody outside: rows written with the hold, delivered at least once.

A row names its target and nothing that is secret; the address, its headers and its secret are configuration of the
processes that deliver. Whoever delivers takes the row first, for a short while, so that no two do it at once.
"""

from typing import Literal

import msgspec

NotificationState = Literal["pending", "sent", "given up", "dropped"]
"""`dropped`: the hold was resolved before anybody had acknowledged it."""


class NotificationRow(msgspec.Struct, kw_only=True):
    """One hold for one target. Its id derives from both, so that there is one."""

    id: str
    hold: str
    run: str
    target: str
    state: NotificationState = "pending"
    attempts: int = 0
    """How often it was sent, or is being sent just now."""
    next_at: int = 0
    """Not before this time anybody takes it (again)."""
    claimed_by: str | None = None
    """The worker that sends it just now. If that is gone, the row is free."""
    last_error: str = ""
    created_at: int = 0


class TakeNotification(msgspec.Struct, gc=False):
    """Take a pending notification, to send it as attempt `attempt`. Nobody else may before `until`.

    Accepted only if it is pending, has had `attempt - 1` attempts, and is free: its time has come at `at`, or the
    worker that took it has no row in `workers` (it died). Otherwise `Refused("taken")`.
    """

    id: str
    attempt: int
    worker: str
    at: int
    until: int


class SettleNotification(msgspec.Struct, gc=False):
    """Say how attempt `attempt` went: `sent`; `pending`, to be sent again at `next_at`; or `given up`.

    `sent` is accepted whatever became of the row meanwhile, once: it has arrived. The others only while it is pending
    and this attempt is its last. Otherwise `Refused("taken")`.
    """

    id: str
    attempt: int
    state: NotificationState
    next_at: int = 0
    error: str = ""
