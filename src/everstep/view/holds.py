"""Holds: what runs ask a person, what each answer means, and who has not been told of it yet."""

from typing import Any

import msgspec

from everstep.engine.run.holds import hold_facts
from everstep.stores.protocol import HoldRow, Store
from everstep.stores.rows.notifications import NotificationRow
from everstep.view.fields import made_of
from everstep.view.store import living_workers
from everstep.view.words import between


class Answer(msgspec.Struct):
    """What a resolution of a hold leads to, and the command that gives it."""

    consequence: str
    command: str


class Resolved(msgspec.Struct):
    """How a hold was resolved."""

    at: int
    resolution: str
    by: str
    note: str


class Notice(msgspec.Struct):
    """A notification that has not arrived."""

    target: str
    state: str
    attempts: int
    next_at: int
    last_error: str
    is_served: bool
    """Whether a worker is there that could deliver it."""
    is_claimed: bool
    """Whether a worker is delivering it just now."""

    def sentence(self, now: int) -> str:
        """Say how far it is."""
        tried = f"{self.attempts} attempts" if self.attempts != 1 else "1 attempt"
        error = f", the last: {self.last_error}" if self.last_error else ""
        if self.state == "given up":
            return f"not delivered, and given up after {tried}{error}"
        if not self.is_served:
            return f"not delivered yet ({tried}{error}); no worker has this target: EVERSTEP_ON_HOLD, on_hold="
        if self.is_claimed:
            return f"being delivered just now ({tried}{error})"
        wait = f"again in {between(now, self.next_at)}" if self.next_at > now else "at once"
        return f"not delivered yet ({tried}{error}); {wait}"


class HoldView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A hold, as `everstep holds --json` says it."""

    id: str
    run: str
    workflow: str
    reason: str
    step: str
    summary: str
    created_at: int
    report: dict[str, Any]
    """What is known."""
    resolutions: dict[str, Answer]
    resolved: Resolved | None = None
    notifications: list[Notice] | msgspec.UnsetType = msgspec.UNSET


def hold_view(hold: HoldRow, url: str | None) -> HoldView:
    """Return a hold with its answers. `url` is that of the store, as commands are to name it."""
    return msgspec.convert(hold_facts(hold, url), HoldView)


def hold_views(store: Store, url: str | None, *, run: str | None = None, open_only: bool = True) -> list[HoldView]:
    """Return the holds of a store or a run, with the notifications that have not arrived."""
    notices = notices_of(store, run)
    found = []
    for hold in store.holds(run=run, open_only=open_only):
        one = hold_view(hold, url)
        one.notifications = notices.get(hold.id, [])
        found.append(one)
    return found


def notices_of(store: Store, run: str | None = None) -> dict[str, list[Notice]]:
    """Return the notifications that have not arrived, by hold."""
    rows: list[NotificationRow] = store.notifications(run=run)
    served = {target for one in living_workers(store) for target in one.targets} if rows else set()
    found: dict[str, list[Notice]] = {}
    for row in rows:
        notice = made_of(Notice, row, is_served=row.target in served, is_claimed=row.claimed_by is not None)
        found.setdefault(row.hold, []).append(notice)
    return found
