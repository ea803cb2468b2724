"""Restored backups: a backup is out of date, and every run is told so before it does anything more.

A store has a *life*. Each restored backup begins a new one, and no two stores share one. A history says in which life
it was begun (`run_started`), and in which it last recorded a restore (`run_restored`, or a checkpoint). If that is not
the present one, the history may lack what its run did. A run that was imported brings records of other stores: they say
nothing here, and the table `arrivals` says whether the run was in doubt where it came from.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from everstep.engine.history.verify import Recorded
from everstep.errors import Misuse
from everstep.model.status import UNFINISHED
from everstep.stores.protocol import Accepted, MarkRestored, RunFilter, RunRow, Store

PAGE = 500
NO_LIFE: Final = "?"
"""A life that no store has. A history that is copied from one which may lack something begins with it."""


class Note(NamedTuple):
    """The newest record in a history of its store's life. An earlier release only counted restores."""

    seq: int
    life: str
    restores: int


def newest_note(events: Sequence[Recorded], kept: Note | None = None) -> Note:
    """Return the newest record in a history. `kept` is the one in the checkpoint from which it continues, if any."""
    for event in reversed(events):
        if event.kind == "run_restored":
            return Note(event.seq, event.body.life, event.body.number)
        if kept is not None and event.seq == kept.seq:
            return kept
    return Note(1, events[0].body.life, events[0].body.restored)


def may_lack(store: Store, life: str, run: str, generation: int, note: Note) -> bool:
    """Return True if a history may lack what its run did after a backup: of this store, or of one that it was in
    before.

    An imported run counts as such if this store was ever restored: before the import, the same file may have been
    imported in the time that is lost; after it, the run itself may have done more.
    """
    if note.life == life:
        return False
    arrival = store.arrival(run)
    if arrival is not None and (generation, note.seq) <= (arrival.generation, arrival.seq):
        return bool(arrival.doubted) or restores_in(life) > 0
    return bool(note.life) or restores_in(life) > note.restores


def life_of_copy(store: Store, run: str, generation: int, history: Sequence[Recorded]) -> str:
    """Return the life that a copy of these events must record: the present one, unless they may lack what was done."""
    life = store.life()
    return NO_LIFE if may_lack(store, life, run, generation, newest_note(history)) else life


def restores_in(life: str) -> int:
    """Return how often a store was restored, from its life."""
    number = life.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def mark_restored(store: Store) -> tuple[int, list[RunRow]]:
    """Record in the store that it was restored. Returns how often that has happened now, and the unfinished runs.

    From now on each of these runs asks (its probes, or a person) before it does a step that must not happen twice.
    """
    store.bury_dead(store.now())
    expected = store.restores()
    if not store.is_in_use():
        # Rows of the backup whose locks are elsewhere, or nowhere: no process holds one on this store.
        store.bury_dead(max((worker.lease_until for worker in store.workers()), default=0) + 1)
        (verdict,) = store.commit([MarkRestored(expected)])
        if isinstance(verdict, Accepted):
            return expected + 1, unfinished(store)
    workers = ", ".join(f"{worker.id} (pid {worker.pid} on {worker.host})" for worker in store.workers())
    raise Misuse(
        "A process is at work on this store, or on the one that was here before"
        + (f": {workers}. " if workers else ". ")
        + "Stop every process that uses it, then say this again. Nothing was changed."
    )


def unfinished(store: Store) -> list[RunRow]:
    """Return the runs that have not ended."""
    rows: list[RunRow] = []
    while page := store.runs(RunFilter(status=tuple(sorted(UNFINISHED)), limit=PAGE, offset=len(rows))):
        rows += page
    return rows
