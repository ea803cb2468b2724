"""Schedules as a store keeps them: one row each, which only a writer that knows its newest revision may change.

A store does not know what a schedule means. It finds the rows that are due, and changes one in the same transaction in
which the runs of its ticks are started: so a tick is neither lost nor started twice, whichever worker dies when.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from everstep.stores.rows.runs import NewRun, Post


class ScheduleRow(msgspec.Struct, kw_only=True, gc=False):
    """A schedule as the table `schedules` has it."""

    name: str
    workflow: str
    """Only workers that serve this workflow process the schedule."""
    revision: int = 0
    next_at: int | None = None
    """When it next needs attention, or None if time alone brings nothing."""
    waits: bool = False
    """Whether a tick waits for the end of another run."""
    definition: bytes = b"{}"
    """JSON: `model.schedules.Definition`."""
    state: bytes = b"{}"
    """JSON: `model.schedules.State`."""
    created_at: int = 0


class ChangeSchedule(msgspec.Struct, gc=False):
    """Create, change or delete a schedule, and start the runs of its ticks.

    Accepted only if the schedule's revision is `expected`; 0 means that it must not exist. Otherwise
    `Refused("taken")`. Then, in one transaction: the row becomes `row`, or is deleted if that is None; the runs of
    `starts` are created, except those whose ids exist, which are left alone; `posts` are delivered, except those to
    runs that have ended or do not exist.
    """

    name: str
    expected: int
    row: ScheduleRow | None
    starts: Sequence[NewRun] = ()
    posts: Sequence[Post] = ()


class Schedules(Protocol):
    """What a store answers about schedules."""

    def schedules(self, *, name: str | None = None) -> list[ScheduleRow]:
        """Return schedules, by their names; with `name` only that one, if it exists."""
        ...

    def due_schedules(self, *, at: int, workflows: Sequence[str], limit: int) -> list[ScheduleRow]:
        """Return the schedules of these workflows that need attention, at most `limit` of each kind.

        First those whose `next_at` has come, the longest due first; then the others that wait for a run, by name.
        """
        ...

    def next_schedule(self, *, workflows: Sequence[str]) -> int | None:
        """Return the earliest `next_at` among the schedules of these workflows."""
        ...
