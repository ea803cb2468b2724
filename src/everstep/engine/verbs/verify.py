"""Verifying a run: whether its histories, and all that they refer to, match their digests. Changes nothing."""

from typing import Any

import msgspec

from everstep.engine.code.recovery_point import verify_checkpoints
from everstep.engine.history.streams import verify_streams
from everstep.engine.history.verify import Recorded, load_verified, read_now, verified, verify_payloads
from everstep.errors import Damaged, NotReadable
from everstep.model.events import decode_body
from everstep.stores.protocol import RunFilter, RunRow, Store

PAGE = 200


class Verification(msgspec.Struct):
    """What `run.verify()` found. `sound` is True when every digest matches; `problem` says what does not."""

    sound: bool
    events: int
    """Those of all generations; of a damaged run as many as its row says."""
    last_good: int
    problem: str = ""
    drift: list[dict[str, str]] = []
    """With `outside`: every difference between the outside and what the run remembers of it."""
    left_out: int = 0
    """Of how many events the secrets were left out when the run was exported: they could not be compared."""
    run: str = ""
    generations: int = 1
    unobserved: list[str] = []
    """With `everstep verify --outside`: facts that only the run's code can observe."""


def verify_run(store: Store, row: RunRow) -> tuple[Verification, list[Recorded]]:
    """Return whether a run's histories, of all its generations, are sound; and the newest one, if so."""
    found = Verification(True, 0, 0, run=row.id, generations=row.generation)
    try:
        row, histories = read_now(store, row, lambda now: _verified_generations(store, now))
    except (Damaged, NotReadable) as error:
        found.sound, found.problem = False, str(error)
        found.events, found.last_good = row.head_seq, error.last_good if isinstance(error, Damaged) else 0
        return found, []
    found.generations, found.last_good = row.generation, histories[0][-1].seq
    found.events = sum(map(len, histories))
    found.left_out = sum(getattr(history, "left_out", 0) for history in histories)
    return found, histories[0]


def _verified_generations(store: Store, row: RunRow) -> list[list[Recorded]]:
    """Return all generations, the newest one first, each verified with its payloads, checkpoints and streams."""
    newest = load_verified(store, row, looking=True)
    verify_payloads(store, row, newest)
    if not getattr(newest, "left_out", 0):  # then its checkpoints were left out as well
        verify_checkpoints(store, row, newest)
    verify_streams(store, row, newest)
    there = store.generations(row.id)
    histories = [newest, *(_verified_generation(store, row, generation) for generation in there[:-1])]
    if there != list(range(1, row.generation + 1)):
        listed = ", ".join(map(str, there))
        raise Damaged(f"The row of run {row.id} says {row.generation} generations; there are: {listed}.")
    return histories


def _verified_generation(store: Store, row: RunRow, generation: int) -> list[Recorded]:
    events = store.events(row.id, generation)
    # The row knows only the newest head; an older history vouches for itself by its chain.
    head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
    older = msgspec.structs.replace(row, **head)
    recorded = verified(events, older, store.chain, looking=True)
    if recorded[-1].kind == "run_continued":
        _expect_successor(store, older, events[-1].digest)
    verify_payloads(store, row, recorded, is_newest=False)
    if not getattr(recorded, "left_out", 0):
        verify_checkpoints(store, older, recorded)
    return recorded


def _expect_successor(store: Store, older: RunRow, digest: bytes) -> None:
    """A history that was continued names nobody, but the next one names it: cut or foreign ones are found so."""
    first = store.events(older.id, older.generation + 1, only=[1])
    carried = decode_body("run_started", first[0].body).carried if first and first[0].kind == "run_started" else None
    if carried is None or carried.head != digest.hex():
        raise Damaged(
            f"Generation {older.generation} of run {older.id} was continued, and the next one does not follow it.",
            older.head_seq,
        )


def strays(store: Store) -> list[Verification]:
    """Return histories that no row knows, as damaged runs."""
    known = {run for run, _ in store.strays() if store.run(run) is not None}  # those are told with their rows
    found = []
    for run, generation in store.strays():
        if run not in known:
            why = f"There are events of run {run}, generation {generation}, but no row of such a run."
            events = len(store.events(run, generation))
            found.append(Verification(False, events, 0, why, run=run, generations=generation))
    return found


def every_run(store: Store, status: Any = ()) -> list[RunRow]:
    """Return all runs of a store."""
    rows: list[RunRow] = []
    while page := store.runs(RunFilter(status=status, limit=PAGE, offset=len(rows))):
        rows += page
    return rows
