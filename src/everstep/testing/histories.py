"""Histories as the checker judges them: exported from a store, one for each generation of each run."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from everstep.errors import ChainKeyMissing
from everstep.model.events import EventRow, decode_body
from everstep.stores.protocol import Delivery, RunFilter, RunRow, Store
from everstep.stores.rows.keys import EffectFilter, EffectRow
from everstep.stores.rows.runs import has_moved
from everstep.stores.rows.transfer import Arrival

PAGE: Final = 500
KEYS_MAX: Final = 1_000_000

RULES: Final[dict[str, str]] = {
    "L1": "an acknowledged start is in the store, and ends or waits once a worker runs",
    "L2": "an acknowledged signal is consumed or visibly undelivered",
    "L3": "a recorded outcome never changes and its step never runs again; attempts are counted on",
    "L4": "every timer fires, never early and at most once",
    "L5": "a history is whole, and a prefix of its later self",
    "D1": "a run has one end",
    "D2": "a step, timer or child has one outcome",
    "D3": "effects are applied as often as their contract says, and not before their intent is durable",
    "D4": "a signal is consumed at most once",
    "D5": "epochs never go down along a history and have one owner each",
    "D6": "there is one run for an id",
    "D7": "all requests of one step carry the same key and the same arguments",
    "D8": "a key has one owner at a time and one outcome, which all who share it were given",
    "S1": "a compensation is for a completed step only, and completes at most once for each",
    "S2": "compensations follow each other in the reverse order of completion, and nothing else begins meanwhile",
    "S3": "a run that failed or was rolled back has compensated every completed step that has a compensation",
    "F1": "a fork begins with what the run has that it was forked from",
    "R1": "commands and outcomes follow each other as the code gave them",
    "B1": "an attempt begins only while its budget has room for its estimate",
    "B2": "a child has the budget that its parent allotted, and its parent is told what it used",
    "G1": "a visit of a graph's node begins once and finishes once, and a completed run leaves none behind",
}
"""What "nothing lost, nothing doubled" means, rule by rule."""


class Violation(NamedTuple):
    """A broken rule: which, in which run, at which event (0 if it is about none), and what was found."""

    rule: str
    run: str
    seq: int
    what: str

    def __str__(self) -> str:
        place = f" event {self.seq}" if self.seq else ""
        return f"{self.rule} {self.run or '—'}{place}: {self.what}"


class RunHistory(msgspec.Struct):
    """One generation of a run. The row is that of the newest generation."""

    row: RunRow
    generation: int
    events: Sequence[EventRow]
    signals: Sequence[Delivery] = ()
    keys: Sequence[EffectRow] = ()
    """The keys that steps of this generation have, or had last."""
    entropy: str = ""
    """The store's random bits."""
    key: bytes = b""
    """The chain key that it was made with, if any."""
    arrival: Arrival | None = None
    """The last event that was imported, if the run was."""

    @property
    def is_newest(self) -> bool:
        """Whether the row is about this generation."""
        return self.generation == self.row.generation

    def may_know(self, other: "RunHistory", at: int) -> bool:
        """Return True if an existing run may be the one with that id that this run knew at a time.

        That one may have been deleted since, and its id used again; or this run comes from another store.
        """
        begun = other.row.created_at if other.is_newest or not other.events else other.events[0].at
        return begun <= at and not (self.arrival is not None and other.arrival is None)

    @property
    def is_rolled_back(self) -> bool:
        """Whether a rollback was requested, also after its end."""
        return any(event.kind == "rollback_requested" for event in self.events)


def export_histories(store: Store) -> list[RunHistory]:
    """Return the histories of all runs of a store."""
    histories: list[RunHistory] = []
    offset = 0
    while page := store.runs(RunFilter(limit=PAGE, offset=offset)):
        offset += len(page)
        for row in page:
            histories += _histories_of(store, row)
    return histories


def _histories_of(store: Store, row: RunRow) -> list[RunHistory]:
    """Return the histories of a run, all read while no worker drove it."""
    while True:
        signals = store.signals(row.id)
        keys = store.effects(EffectFilter(run=row.id, limit=KEYS_MAX))
        found = [(one, store.events(row.id, one)) for one in store.generations(row.id)]
        arrival = store.arrival(row.id)
        now = store.run(row.id)
        if now is None or not has_moved(row, now):
            break
        row = now
    return [
        RunHistory(
            *(row, generation, events, signals, [key for key in keys if key.generation == generation]),
            *(store.entropy, _key_of(store, row.id, events), arrival),
        )
        for generation, events in found
    ]


def _key_of(store: Store, run: str, events: Sequence[EventRow]) -> bytes:
    try:
        return store.chain.key(decode_body("run_started", events[0].body).chain, run)
    except (msgspec.MsgspecError, ChainKeyMissing):
        return b""
