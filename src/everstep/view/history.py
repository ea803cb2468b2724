"""The events of a run, and what a repair took out of it."""

from typing import Any

import msgspec

from everstep.engine.history.verify import Event, public_events, refuse_generation
from everstep.model.events import EventRow
from everstep.stores.protocol import RunRow, Store
from everstep.view.fields import made_of


class Archived(msgspec.Struct, omit_defaults=True):
    """An event or a payload that a repair took out of a history. Only an event has a kind, a step and a body."""

    what: str
    generation: int
    seq: int
    why: str
    at: int
    kind: str | msgspec.UnsetType = msgspec.UNSET
    step: str | msgspec.UnsetType = msgspec.UNSET
    body: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def events_of(store: Store, row: RunRow, generation: int | None = None) -> list[Event]:
    """Return the events of a run, without what is secret: of the newest generation, or of another one."""
    if generation is not None:
        refuse_generation(row, generation)
    return public_events(store.events(row.id, generation or row.generation))


def archived_of(store: Store, run: str) -> list[Archived]:
    """Return what was archived of a run. What is secret, or cannot be read, is not shown."""
    found = []
    for row in store.archived(run):
        one = made_of(Archived, row)
        if row.what == "event":
            columns = row.columns()
            event = EventRow(row.seq, str(columns["kind"]), str(columns["step"]), 0, columns["body"], b"")
            (shown,) = public_events([event])
            one.kind, one.step, one.body = shown.kind, shown.step, shown.body
        found.append(one)
    return found
