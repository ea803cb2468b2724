"""Verifying a whole store without the code of its runs: runs, what they remember of the outside, and all else."""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from everstep.codec import Codec
from everstep.effects.witnesses import from_subject, made_again, with_changes
from everstep.engine.code.checkpoints import KeptFact
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.saved import dump_thread, every_item, every_thread, verify_item, verify_thread
from everstep.engine.history.verify import Recorded
from everstep.engine.run.drift import readable_difference
from everstep.engine.verbs.transfer import verify_schedule
from everstep.engine.verbs.verify import Verification, every_run, strays, verify_run
from everstep.errors import Damaged, Misuse
from everstep.model.status import ENDED
from everstep.stores.protocol import RunRow, Store


class OtherVerification(msgspec.Struct):
    """Whether a thread, an item or a schedule is sound."""

    kind: str
    name: str
    sound: bool = True
    problem: str = ""


def verify_every_run(store: Store, *, outside: bool = False) -> list[Verification]:
    """Return whether the runs of a store are sound, and the histories that no row knows."""
    deleting = dict(store.deletions())
    rows = [row for row in every_run(store) if deleting.get(row.id, 0) < row.generation]  # a collection ends those
    return [*(verify_with_outside(store, row, outside=outside) for row in rows), *strays(store)]


def verify_others(store: Store) -> list[OtherVerification]:
    """Return whether the threads, items and schedules of a store are sound."""
    at, found = store.now(), list[OtherVerification]()

    def look(kind: str, name: str, verify: Callable[[], None]) -> None:
        try:
            verify()
        except Damaged as damage:
            found.append(OtherVerification(kind, name, False, str(damage)))
        else:
            found.append(OtherVerification(kind, name))

    for thread in every_thread(store.saved):
        look("thread", thread, lambda thread=thread: verify_thread(dump_thread(store.saved, thread)))  # type: ignore[misc]
    for item in every_item(store.saved, at):
        look("item", item.key, lambda item=item: verify_item(item))  # type: ignore[misc]
    for row in store.schedules():
        look("schedule", row.name, lambda row=row: verify_schedule(row))  # type: ignore[misc]
    return found


# -- the outside -------------------------------------------------------------------------------------------------------
def verify_with_outside(store: Store, row: RunRow, *, outside: bool = True) -> Verification:
    """Return whether a run is sound; with `outside` also what it remembers that is different now.

    Facts that only the code of the run can observe are named in `unobserved`.
    """
    found, history = verify_run(store, row)
    if outside and found.sound and row.status not in ENDED:
        _compare_outside(store, row, history, found)
    return found


def _compare_outside(store: Store, row: RunRow, history: list[Recorded], found: Verification) -> None:
    """Compare what can be observed without the run's code with what its history remembers."""
    codec = Codec()
    for subject, taken in _remembered_facts(store, row, history).items():
        witness = made_again(taken.recipe) if taken.recipe else from_subject(subject)
        if witness is None:
            found.unobserved.append(subject)
            continue
        try:
            now = codec.decode(codec.encode(witness.observe(), where=subject))
        except (OSError, Misuse, sqlite3.Error) as error:
            difference = f"cannot be observed: {type(error).__name__}: {error}"
        else:
            remembered = codec.decode(taken.payload)
            if witness.covered is not None:
                remembered = with_changes(remembered, witness.covered, taken.changes)
            if now == remembered:
                continue
            difference = readable_difference(remembered, now)
        found.drift.append({"subject": subject, "difference": difference})


class _Remembered(msgspec.Struct):
    """A fact that a run remembers, and with a folder the run's own changes of files since."""

    payload: bytes
    changes: dict[str, str | None] = {}
    recipe: list[Any] = []


def _remembered_facts(store: Store, row: RunRow, history: list[Recorded]) -> dict[str, _Remembered]:
    """Return what a run remembers of the outside, by subject."""
    remembered: dict[str, _Remembered] = {}
    for event in history:
        body: Any = event.body
        if event.kind == "run_started" and body.carried is not None:
            for subject, fact in body.carried.facts.items():
                kept = msgspec.json.decode(bytes(fact), type=KeptFact)
                remembered[subject] = _Remembered(bytes(kept.fact), dict(kept.changes), list(kept.recipe or ()))
        elif event.kind == "witness_taken" or (event.kind == "drift_judged" and body.decision == "accept"):
            ref = body.ref
            payload = restore_payload(store.payload(row.id, ref), ref) if ref else bytes(body.fact)
            recipe = body.recipe if event.kind == "witness_taken" else remembered[body.subject].recipe
            remembered[body.subject] = _Remembered(payload, recipe=recipe)
        elif event.kind == "witness_changed":
            for one in remembered.values():
                one.changes[body.path] = body.digest or None
        elif event.kind == "witness_released":
            remembered.pop(body.subject, None)
        elif event.kind == "run_resolved":
            accepted = {one: bytes(fact) for one, fact in body.facts.items() if one in remembered}
            remembered |= {one: _Remembered(fact, recipe=remembered[one].recipe) for one, fact in accepted.items()}
    return remembered
