"""What is wrong with a damaged run, and which part of it can still be believed. Reads only."""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.engine.history.calls import Calls
from everstep.engine.history.journal import restore_payload
from everstep.engine.history.verify import Recorded, load_verified, refs_of, verified, verify_payloads
from everstep.errors import Damaged
from everstep.model.carried import undoing_entropy
from everstep.model.chains import ChainKeys
from everstep.model.digests import step_key
from everstep.model.events import EventRow, decode_body
from everstep.stores.protocol import RunRow, Store


class Diagnosis(msgspec.Struct):
    """The good part of a run's history, and what comes after it."""

    problem: str
    """What is damaged; empty if the run is sound."""
    generation: int
    good: list[Recorded]
    digest: bytes
    """The digest of the last good event."""
    rest: list[EventRow]
    """The rows after the last good event, damaged or not."""
    lost: bool
    """Whether there was, or may have been, anything after the last good event."""
    payloads: list[str]
    """Digests of payloads that are damaged."""
    unseen: list[str] = []
    """Steps that began after the last good event, according to a process that saw more of the history."""
    unseen_by: list[str] = []

    @property
    def last_good(self) -> int:
        """The number of the last event that can be believed."""
        return len(self.good)

    @property
    def is_repairable(self) -> bool:
        """Whether there is anything to continue from."""
        return bool(self.good)


def diagnose(store: Store, row: RunRow) -> Diagnosis:
    """Find out how much of a run is good."""
    problem = ""
    try:
        verify_payloads(store, row, load_verified(store, row))
    except Damaged as damage:
        problem = str(damage)
    generation = _generation(store, row)
    events = store.events(row.id, generation)
    good, why = _good_part(events, row, generation, store.chain)
    damaged = _damaged_payloads(store, row.id, good)
    for event in good:
        if damaged.intersection(refs_of(event.body)):
            good = good[: event.seq - 1]
            break
    digest = events[len(good) - 1].digest if good else b""
    # If the row's head is the last good event, what follows that was never part of the history.
    lost = digest != row.head_digest
    return Diagnosis(problem or why, generation, good, digest, events[len(good) :], lost, sorted(damaged))


def _generation(store: Store, row: RunRow) -> int:
    """Return the generation of the row: its own if it has events, else the newest one with events."""
    there = store.generations(row.id)
    newest = [one for one in there if one > 0]
    return row.generation if row.generation in there or not newest else newest[-1]


def _good_part(
    events: Sequence[EventRow], row: RunRow, generation: int, chain: ChainKeys
) -> tuple[list[Recorded], str]:
    """Return the events from the first on that follow from each other, and why they end, if others follow."""
    count, why = len(events), ""
    while count:
        last = events[count - 1]
        claimed = msgspec.structs.replace(row, generation=generation, head_seq=last.seq, head_digest=last.digest)
        try:
            return verified(events[:count], claimed, chain), why
        except Damaged as damage:
            why = why or str(damage)
            count = min(damage.last_good, count - 1)
    return [], why


def _damaged_payloads(store: Store, run: str, history: Sequence[Recorded]) -> set[str]:
    """Return the digests of payloads that are missing or do not match."""
    damaged: set[str] = set()
    for ref in {ref for event in history for ref in refs_of(event.body)}:
        try:
            restore_payload(store.payload(run, ref), ref)
        except Damaged:
            damaged.add(ref)
    return damaged


class UnseenStep(msgspec.Struct):
    """A step that was begun, as far as known, and whose outcome a repaired history lacks."""

    step: str
    effect: str
    seq: int
    key: str = ""
    """The value of `everstep.key()` in its body; for a step with `key=`, that key."""


def steps_in(found: Diagnosis) -> tuple[list[UnseenStep], list[str], int]:
    """Return the steps that began in the rest of a history, their workers, and the number of unreadable rows.

    None of it is reliable: it is for a person, who looks outside for what is named here.
    """
    entropy = Calls(found.good).entropy_at(found.last_good)
    steps: list[UnseenStep] = []
    workers: set[str] = set()
    unreadable = 0
    for event in found.rest:
        try:
            body: Any = decode_body(event.kind, event.body)
        except (msgspec.MsgspecError, KeyError):
            unreadable += 1
            continue
        if event.kind == "step_started" and body.effect != "read":
            steps.append(_unseen(found.good, event, body, entropy))
            workers.update({body.by} - {""})
    return steps, sorted(workers), unreadable


def _unseen(good: Sequence[Recorded], event: EventRow | Recorded, body: Any, entropy: str) -> UnseenStep:
    carried = good[0].body.carried if good else None
    own = undoing_entropy(carried, entropy, body.compensates) if body.compensates else entropy
    return UnseenStep(event.step, body.effect, event.seq, body.key or step_key(own, event.step, body.arguments))


def open_steps(good: Sequence[Recorded]) -> list[UnseenStep]:
    """Return the steps that were begun in the good part and have no outcome there; reads do not matter."""
    return [
        _unseen(good, call.started, call.started.body, call.entropy)
        for call in Calls(good).current.values()
        if call.started is not None
        and call.is_begun
        and call.effect not in ("", "read")
        and (call.must_be_kept or not call.cancelled_at)
    ]
