"""Schedules as a store keeps them: a row each, changed only by whoever knows its newest revision.

A store does not know what a schedule means. It finds the rows that are due, and changes one in the same transaction in
which the runs of its ticks are started: so a tick is neither lost nor started twice, whoever dies when.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from everstep.stores.rows.runs import NewRun, Post


class ScheduleRow(msgspec.Struct, kw_only=True, gc=False):
    """A schedule as the table `schedules` has it."""

    name: str
    workflow: str
    """Only workers that know it look after the schedule."""
    revision: int = 0
    next_at: int | None = None
    """When there is something to do about it, or None if time alone brings nothing."""
    waits: bool = False
    """Whether a tick waits for the end of another run."""
    definition: bytes = b"{}"
    """JSON: `model.schedules.Definition`."""
    state: bytes = b"{}"
    """JSON: `model.schedules.State`."""
    created_at: int = 0


class ChangeSchedule(msgspec.Struct, gc=False):
    """Create, change or delete a schedule, and start the runs of its ticks.

    Accepted only if the schedule's revision is `expected`; 0 means that there is no such schedule. Otherwise
    `Refused("taken")`. Then, in one transaction: the row becomes `row`, or goes if that is None; the runs of `starts`
    are created, but for those whose ids exist, which are left alone; `posts` are delivered, but for those to runs that
    have ended or are not there.
    """

    name: str
    expected: int
    row: ScheduleRow | None
    starts: Sequence[NewRun] = ()
    posts: Sequence[Post] = ()


class Schedules(Protocol):
    """What a store tells about schedules."""

    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        """Return schedules, by their names; with `name` that one, if it is there."""
        ...

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        """Return the schedules of these workflows about which something is to be done, `limit` of each kind.

        First those whose `next_at` has come, the longest due first; then the others that wait for a run, by name.
        """
        ...

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        """Return the earliest `next_at` among the schedules of these workflows."""
        ...
