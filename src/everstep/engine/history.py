"""Loading a history and verifying it: nothing is believed that does not match its digests."""

import gc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import chain_next, chain_start, digest_of
from everstep.model.events import BODY_DECODERS, ENDS, EventRow
from everstep.model.status import ENDED
from everstep.stores.protocol import RunRow, Store


class Recorded(NamedTuple):
    """An event with its decoded body."""

    seq: int
    kind: str
    step: str
    at: int
    body: Any


class Event(NamedTuple):
    """An event of a run's history, as `run.history()` gives it. `at` is microseconds since 1970; `body` plain data."""

    seq: int
    kind: str
    step: str
    at: int
    body: dict[str, Any]


LONG: Final = 1000
"""From so many events on, loading and replaying a history pauses the garbage collector."""


@contextmanager
def without_collections(events: int) -> Generator[None]:
    """Pause the collector while a long history is built up: it would walk all of it again and again, for nothing."""
    if events < LONG or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()  # and back: what was built up counts as old, so that it is not walked at once
            gc.unfreeze()
        gc.enable()


def load_verified(store: Store, row: RunRow) -> list[Recorded]:
    """Return the run's history, or raise `Damaged` with the number of the last event that can be believed."""
    with without_collections(row.head_seq):
        history = verified(store.events(row.id, row.generation), row)
    compare_with_row(history, row)
    return history


def compare_with_row(history: Sequence[Recorded], row: RunRow) -> None:
    """Raise `Damaged` if the row tells another story than the history: of another workflow, or another end."""
    started, last = history[0].body, history[-1]
    if (started.workflow, started.semantics) != (row.workflow, row.semantics):
        raise Damaged(
            f"The history of run {row.id} is one of {started.workflow}, but its row says {row.workflow}.", last.seq
        )
    ended = last.kind.removeprefix("run_") if last.kind in ENDS else ""
    if ended != (row.status if row.status in ENDED else ""):
        raise Damaged(f"The row of run {row.id} says {row.status}, but its history ends with {last.kind}.", last.seq)
    if ended in ("completed", "failed"):
        payload = last.body.value if ended == "completed" else last.body.error
        outcome = row.outcome or b""
        if digest_of(outcome).hex() != last.body.ref if last.body.ref else outcome != bytes(payload):
            raise Damaged(f"The row of run {row.id} has another outcome than its history.", last.seq)


def verified(events: Sequence[EventRow], row: RunRow) -> list[Recorded]:
    """Return the events with their bodies, after checking numbers, digests, bodies and the head in the run's row."""
    recorded, digest = chained(events, row, chain_start(row.id, row.generation))
    if not recorded or recorded[0].kind != "run_started":
        raise Damaged(f"The history of run {row.id} does not begin with run_started.", 0)
    compare_with_head(row, len(recorded), digest)
    return recorded


def chained(events: Sequence[EventRow], row: RunRow, digest: bytes, first: int = 1) -> tuple[list[Recorded], bytes]:
    """Return the events with their bodies, after checking that each follows the one before, and the last digest.

    `digest` is the one before the first of them, whose number is `first`.
    """
    recorded: list[Recorded] = []
    append, new_tuple, decoders, last_at = recorded.append, tuple.__new__, BODY_DECODERS, 0
    expected = first
    try:
        for expected, (seq, kind, step, at, body, own) in enumerate(events, first):
            if seq != expected:
                raise Damaged(
                    f"Event {expected} of run {row.id} is missing: {seq} follows {expected - 1}.", expected - 1
                )
            digest = chain_next(digest, seq, kind, step, at, body)
            if digest != own or at < last_at:
                raise Damaged(f"Event {seq} of run {row.id} does not match its digest.", seq - 1)
            append(new_tuple(Recorded, (seq, kind, step, at, decoders[kind](body))))
            last_at = at
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        raise Damaged(f"Event {expected} of run {row.id} cannot be read.", expected - 1) from None
    return recorded, digest


def compare_with_head(row: RunRow, last: int, digest: bytes) -> None:
    """Raise `Damaged` if the run's row names another head than the last event is."""
    if last != row.head_seq or digest != row.head_digest:
        raise Damaged(
            f"The history of run {row.id} ends at event {last}, but its row says {row.head_seq}"
            + (", with another digest." if last == row.head_seq else "."),
            min(last, row.head_seq),
        )


def public_events(events: Sequence[EventRow]) -> list[Event]:
    """Return events as users see them, their bodies as plain data."""
    decode = msgspec.json.decode
    return [Event(seq, kind, step, at, decode(body)) for seq, kind, step, at, body, _ in events]
