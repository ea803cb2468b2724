"""A backup of the store was restored: an old truth. Every unfinished run is told so before it does anything more."""

from everstep.errors import Misuse
from everstep.model.status import UNFINISHED
from everstep.stores.protocol import Accepted, MarkRestored, RunFilter, RunRow, Store

PAGE = 500


def mark_restored(store: Store) -> tuple[int, list[RunRow]]:
    """Note in the store that it was restored. Returns how often that has happened now, and the unfinished runs.

    From now on each of these runs asks (its probes, or a person) before it does a step that must not happen twice.
    """
    store.bury_dead(store.now())
    expected = store.restores()
    if not store.is_in_use():
        # Rows of the backup whose locks are elsewhere, or nowhere: no process holds one beside this store.
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
