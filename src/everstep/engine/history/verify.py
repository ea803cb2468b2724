"""Loading a history and verifying it: data that does not match its digest is never used."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from everstep.engine.history.journal import restore_payload
from everstep.errors import BeingDeleted, Damaged, Misuse, NewerHistory, SecretsLeftOut, UnknownRun
from everstep.model.accounts import standing_at
from everstep.model.chains import ChainKeys
from everstep.model.collector import paused_collector
from everstep.model.digests import DECIMALS, chain_next, chain_start, chain_state, digest_of
from everstep.model.events import BODIES, BODY_DECODERS, ENDS, EventRow, ValuePublished, decode_body
from everstep.model.secrets import is_left_out, shown_body
from everstep.model.status import ENDED, STATUSES
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.runs import has_moved

T = TypeVar("T")


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


class History(list[Recorded]):
    """Verified events, in order, and their kinds. It is never changed."""

    kinds: Set[str] = frozenset()
    left_out: int = 0
    """The number of events whose secrets were left out: they cannot be verified, and the run cannot continue."""


def kinds_of(events: Iterable[Recorded]) -> Set[str]:
    """Return the kinds of events, so that callers can skip a search for kinds that do not occur."""
    return events.kinds if type(events) is History else set(map(itemgetter(1), events))


LONG: Final = 1000
"""From this many events on, loading and replaying a history pauses the garbage collector."""


@contextmanager
def without_collections(events: int) -> Generator[None]:
    """Pause the garbage collector while a long history is built."""
    if events < LONG:
        yield
        return
    with paused_collector():
        yield


def load_verified(
    store: Store, row: RunRow, whole: Sequence[EventRow] = (), *, looking: bool = False
) -> list[Recorded]:
    """Return the run's history, or raise `Damaged` with the number of the last event that can be believed.

    whole: the history as it is stored, if it was read already. looking: nothing is done with it, so that one whose
    secrets were left out is returned as well.
    """
    refuse_unreadable(row)
    try:
        with without_collections(row.head_seq):
            history = verified(whole or store.events(row.id, row.generation), row, store.chain, looking=looking)
        compare_with_row(store, row, history)
        compare_published(row, published_by(history), history[-1].seq)
        compare_budget(row, _standing_at(history), history[-1].seq)
    except Damaged:
        refuse_deleted(store, row)
        raise
    return history


def load_generations(store: Store, row: RunRow) -> list[list[Recorded]]:
    """Return the histories of all generations of a run, verified; raise `Damaged` if one of them is not sound."""
    histories: list[list[Recorded]] = []
    for generation in range(1, row.generation):
        # The row has only the newest head; the chain of an older history proves itself.
        if not (events := store.events(row.id, generation)):
            refuse_deleted(store, row)
            raise Damaged(f"Generation {generation} of run {row.id} is not there.")
        head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
        histories.append(verified(events, msgspec.structs.replace(row, **head), store.chain))
    return [*histories, load_verified(store, row)]


def unknown_run(store: Store, run: str) -> UnknownRun:
    """Say that there is no such run, and where."""
    return UnknownRun(f"There is no run {run!r} in {store.url}. `everstep ls` lists the runs there.")


def refuse_deleted(store: Store, row: RunRow) -> None:
    """Raise `BeingDeleted` if a run that had ended is being deleted, or was deleted since its row was read.

    The rest of it is incomplete, which is not damage.
    """
    if row.status in ENDED and (store.is_being_deleted(row.id) or store.run(row.id) is None):
        raise BeingDeleted(
            f"The run {row.id} ended ({row.status}) long enough ago to be deleted, and that has begun: what is left of "
            "it is not whole. When it is done, its id is free. If it was cut off, the next `everstep gc`, or a worker "
            "with a retention, ends it."
        )


def refuse_generation(row: RunRow, generation: int) -> None:
    """Raise `Misuse` that lists the generations, if a run has no such generation."""
    if not 1 <= generation <= row.generation:
        there = "only generation 1" if row.generation == 1 else f"the generations 1 to {row.generation}"
        raise Misuse(f"The run {row.id} has {there}; {generation} is not there.")


def _standing_at(history: Sequence[Recorded]) -> bytes | None:
    if history[0].body.budget is None:
        return None

    return standing_at(history)


def compare_with_row(store: Store, row: RunRow, history: Sequence[Recorded]) -> None:
    """Raise `Damaged` if the row disagrees with a history, of which at least the ends are given."""
    compare_ends(row, history[0], history[-1])
    if row.status == "held" and not says_held(history[-1]):
        _expect_damaged_hold(store, row, history[-1].seq)


def read_now(store: Store, row: RunRow, read: Callable[[RunRow], T]) -> tuple[RunRow, T]:
    """Return what `read` reads of a run as it is now, and its row. `read` gets the row and raises `Damaged`.

    A run that is not claimed may be driven meanwhile. Its row and its events are read one after the other, so a
    mismatch is damage only if the row is still the same.
    """
    while True:
        try:
            return row, read(row)
        except Damaged:
            refuse_deleted(store, row)
            before, now = row, store.run(row.id)
            if now is None:
                raise unknown_run(store, row.id) from None
            row = now
            if not has_moved(before, now):
                raise


def load_now(store: Store, row: RunRow) -> tuple[RunRow, list[Recorded]]:
    """Return the row and the verified history of a run that is not claimed, as it is now."""
    return read_now(store, row, lambda now: load_verified(store, now))


def verify_now(
    store: Store, run: str, also: Callable[[Store, RunRow, Sequence[Recorded]], None] | None = None
) -> list[Recorded]:
    """Return the history of a run as it is now, verified with its payloads.

    also: what else is verified, given the whole history.
    """
    row = store.run(run)
    if row is None:
        raise unknown_run(store, run)

    def verified_now(row: RunRow) -> list[Recorded]:
        history = load_verified(store, row, looking=True)
        verify_payloads(store, row, history)
        if also is not None:
            also(store, row, history)
        return history

    return read_now(store, row, verified_now)[1]


def check_ends(store: Store, row: RunRow) -> Recorded:
    """Raise `Damaged` unless a run's row agrees with the first and the last event of its history. Returns the last.

    Fast, whatever the length of the history: it is for results, which are in the row. The events in between are
    verified when a run is resumed (from its newest checkpoint on), and by `verify`.
    """
    refuse_unreadable(row)
    wanted = sorted({1, max(row.head_seq - 1, 1), row.head_seq})
    events = {event.seq: event for event in store.events(row.id, row.generation, only=wanted)}
    if sorted(events) != wanted:
        refuse_deleted(store, row)
        raise Damaged(f"Events {wanted} of run {row.id}, the ends of its history, are not all there.")
    first, last = events[1], events[row.head_seq]
    key = key_of([first], row, store.chain)
    start = chain_start(row.id, row.generation)
    before = start if last.seq == 1 else events[last.seq - 1].digest
    recorded = [_linked(row, start, first, key), _linked(row, before, last, key)]
    if recorded[0].kind != "run_started" or last.digest != row.head_digest:
        raise Damaged(f"The row of run {row.id} names another head than its history has.", last.seq - 1)
    compare_ends(row, *recorded)
    return recorded[-1]


def event_at(store: Store, row: RunRow, seq: int) -> Recorded:
    """Return one event, after checking that it follows the previous one. Raises `Damaged` if it does not exist."""
    wanted = sorted({1, max(seq - 1, 1), seq})
    events = {event.seq: event for event in store.events(row.id, row.generation, only=wanted)}
    if sorted(events) != wanted:
        raise Damaged(f"Event {seq} of run {row.id} is not there.")
    before = chain_start(row.id, row.generation) if seq == 1 else events[seq - 1].digest
    return _linked(row, before, events[seq], key_of([events[1]], row, store.chain))


def refuse_without_key(store: Store, row: RunRow) -> None:
    """Raise `ChainKeyMissing` if this process cannot read a run's history, before anything is done to the run."""
    try:
        key_of(store.events(row.id, row.generation, only=[1]), row, store.chain)
    except Damaged:
        pass  # that is found later, and the run is held for it


def key_of(events: Sequence[EventRow], row: RunRow, chain: ChainKeys) -> bytes:
    """Return the key that a history names. If the name is wrong, its digests do not match."""
    try:
        id = decode_body("run_started", events[0].body).chain if events and events[0].kind == "run_started" else ""
    except msgspec.MsgspecError:
        raise Damaged(f"Event 1 of run {row.id} cannot be read.", 0) from None
    return chain.key(id, row.id)


def _linked(row: RunRow, before: bytes, event: EventRow, key: bytes) -> Recorded:
    seq, kind, step, at, body, digest = event
    if chain_next(before, seq, kind, step, at, body, key) != digest:
        raise _unlike(row, event)
    if kind not in BODIES:
        raise _newer(row, seq, kind)
    try:
        return Recorded(seq, kind, step, at, decode_body(kind, body))
    except msgspec.MsgspecError:
        raise Damaged(f"Event {seq} of run {row.id} cannot be read.", seq - 1) from None


def _expect_damaged_hold(store: Store, row: RunRow, seq: int) -> None:
    """Check that a held run without an event has a hold for damage. Any other hold has an event."""
    if not any(hold.reason == "damaged" for hold in store.holds(run=row.id)):
        raise Damaged(f"The row of run {row.id} says held, but its history does not.", seq)


def verify_payloads(store: Store, row: RunRow, history: Sequence[Recorded], *, is_newest: bool = True) -> None:
    """Raise `Damaged` unless every payload stored outside the history exists and is whole."""
    for event in history:
        for ref in refs_of(event.body):
            try:
                payload = restore_payload(store.payload(row.id, ref), ref)
            except Damaged as damage:
                raise Damaged(f"Event {event.seq} of run {row.id}: {damage}", event.seq - 1) from None
            if event.seq == 1 and is_newest and ref == event.body.arguments_ref:
                compare_preview(row, payload)


def refs_of(body: Any) -> list[str]:
    """Return the digests of payloads that an event's body refers to."""
    ref = getattr(body, "ref", "") or getattr(body, "arguments_ref", "")
    refs = [ref] if ref else []
    if (carried := getattr(body, "carried", None)) is not None:
        refs += [ref for one in carried.undoable for ref in (one.whole_ref, one.ref) if ref]
    return refs


def verified(events: Sequence[EventRow], row: RunRow, chain: ChainKeys, *, looking: bool = False) -> list[Recorded]:
    """Return the events with their bodies, after checking numbers, digests, bodies and the head in the run's row."""
    key = key_of(events, row, chain)
    recorded, digest = chained(events, row, chain_start(row.id, row.generation), key, looking=looking)
    if not recorded or recorded[0].kind != "run_started":
        raise Damaged(f"The history of run {row.id} does not begin with run_started.", 0)
    compare_with_head(row, len(recorded), digest)
    return recorded


def chained(
    events: Sequence[EventRow], row: RunRow, digest: bytes, key: bytes, first: int = 1, *, looking: bool = False
) -> tuple[History, bytes]:
    """Return the events with their bodies, after checking that each follows the one before, and the last digest.

    `digest` is the one before the first of them, whose number is `first`. `looking`: as for `load_verified`.
    """
    recorded, kinds = History(), set[str]()
    append, new_tuple, decoders, last_at = recorded.append, tuple.__new__, BODY_DECODERS, 0
    expected, new_state, decimals = first, chain_state(key), DECIMALS
    try:
        for expected, (seq, kind, step, at, body, own) in enumerate(events, first):
            if seq != expected:
                raise Damaged(
                    f"Event {expected} of run {row.id} is missing: {seq} follows {expected - 1}.", expected - 1
                )
            state = new_state()  # this and the next three lines do the same as chain_next
            header = f"{seq} {at} {decimals[len(kind)]} {decimals[len(step)]} {kind}{step}"
            state.update(digest + header.encode() + body)
            digest = state.digest()
            if digest != own or at < last_at:
                why = _unlike(row, events[expected - first])
                if not looking or at < last_at or not isinstance(why, SecretsLeftOut):
                    raise why
                recorded.left_out, digest = recorded.left_out + 1, own
            append(new_tuple(Recorded, (seq, kind, step, at, decoders[kind](body))))
            kinds.add(kind)
            last_at = at
    except KeyError:  # its digest matches, so it was written like this
        raise _newer(row, expected, events[expected - first].kind) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Damaged(f"Event {expected} of run {row.id} cannot be read.", expected - 1) from None
    recorded.kinds = kinds
    return recorded, digest


def _unlike(row: RunRow, event: EventRow) -> Damaged | SecretsLeftOut:
    """Return the error for an event that does not match its digest: damage, or secrets that were left out of an
    export.
    """
    if row.status in ENDED and is_left_out(event.body):
        return SecretsLeftOut(
            f"The secrets of run {row.id} were left out when it was exported: it can be inspected, but not continue "
            "from what is here. Export it again with secrets=True (--with-secrets). Nothing was changed."
        )
    return Damaged(f"Event {event.seq} of run {row.id} does not match its digest.", event.seq - 1)


def _newer(row: RunRow, seq: int, kind: str) -> NewerHistory:
    return NewerHistory(
        f"Event {seq} of run {row.id} is of a kind that this release does not know ({kind}). "
        "A worker of the release that wrote it continues the run."
    )


def compare_with_head(row: RunRow, last: int, digest: bytes) -> None:
    """Raise `Damaged` if the run's row names another head than the last event is."""
    if last != row.head_seq or digest != row.head_digest:
        raise Damaged(
            f"The history of run {row.id} ends at event {last}, but its row says {row.head_seq}"
            + (", with another digest." if last == row.head_seq else "."),
            min(last, row.head_seq),
        )


def public_events(events: Sequence[EventRow]) -> list[Event]:
    """Return events as users see them, their bodies as plain data. An unreadable one says so.

    Secrets are not included.
    """
    return [Event(seq, kind, step, at, shown_body(_plain(body))) for seq, kind, step, at, body, _ in events]


def _plain(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {"damaged": True}


PREVIEW_BYTES = 160


def preview_text(payload: bytes) -> str:
    """Return the bounded text of arguments that rows and events keep."""
    return payload[:PREVIEW_BYTES].decode("utf-8", "replace")


def refuse_unreadable(row: RunRow) -> None:
    """Raise `Damaged` if a row cannot be read, or its status is not a valid one."""
    if row.damage:
        raise Damaged(f"The row of run {row.id} is damaged: {row.damage}.")
    refuse_no_status(row.id, row.status)


def refuse_no_status(run: str, status: str) -> None:
    """Raise `Damaged` if a status is not a valid one."""
    if status not in STATUSES:
        raise Damaged(
            f"The row of run {run} is damaged: there is no status {status!r}. `everstep repair {run}` repairs it."
        )


def compare_ends(row: RunRow, first: "Recorded", last: "Recorded") -> None:
    """Raise `Damaged` if the row disagrees with the first and the last event: another run, another end."""
    started = first.body
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("workflow", started.workflow, row.workflow),
        ("version", started.version, row.version),
        ("semantics", started.semantics, row.semantics),
        ("parent", started.parent, row.parent or ""),
        ("arguments", started.digest, row.arguments),
        ("start", created_at(first), row.created_at),
    )
    for what, recorded, said in pairs:
        if recorded != said:
            raise Damaged(f"The row of run {row.id} has another {what} than its history.", last.seq)
    if not started.arguments_ref:
        compare_preview(row, bytes(started.arguments))
    ended = last.kind.removeprefix("run_") if last.kind in ENDS else ""
    if ended != (row.status if row.status in ENDED else "") or says_held(last) > (row.status == "held"):
        raise Damaged(f"The row of run {row.id} says {row.status}, but its history ends with {last.kind}.", last.seq)
    if row.ended_at != (last.at if ended else None):
        raise Damaged(f"The row of run {row.id} has another end than its history.", last.seq)
    if not is_outcome_of(last, row.outcome):
        raise Damaged(f"The row of run {row.id} has another outcome than its history.", last.seq)


def created_at(first: "Recorded") -> int:
    """Return when a run was started, by the first event of its newest history."""
    started = first.body
    if started.forked is not None:
        return int(started.forked.at)
    return int(started.carried.created_at if started.carried is not None else first.at)


def says_held(last: "Recorded") -> bool:
    """Return True if a history with this last event belongs to a held run."""
    return last.kind == "run_held" or (last.kind == "run_repaired" and last.body.status == "held")


def is_outcome_of(last: "Recorded", outcome: bytes | None) -> bool:
    """Return True if a payload is the outcome of an end; None for an end without an outcome."""
    if last.kind not in ("run_completed", "run_failed"):
        return outcome is None
    payload = bytes(last.body.value if last.kind == "run_completed" else last.body.error)
    if last.body.ref:
        return digest_of(outcome or b"").hex() == str(last.body.ref)
    return (outcome or b"") == payload


def compare_preview(row: RunRow, payload: bytes) -> None:
    """Raise `Damaged` if the row shows other arguments than the run was started with."""
    if row.preview != preview_text(payload):
        raise Damaged(f"The row of run {row.id} shows other arguments than its history.", row.head_seq)


def compare_published(row: RunRow, expected: Mapping[str, Any], last: int) -> None:
    """Raise `Damaged` if the row has other published values than the history, which ends with event `last`."""
    if row.published is None and not expected:
        return
    try:
        values = msgspec.json.decode(row.published or b"{}", type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        values = {}
    sound = values.keys() == expected.keys() and all(
        digest_of(bytes(values[name])).hex() == body.ref if body.ref else bytes(values[name]) == bytes(body.value)
        for name, body in expected.items()
    )
    if not sound:
        raise Damaged(f"The row of run {row.id} has other published values than its history.", last)


def compare_budget(row: RunRow, expected: bytes | None, last: int) -> None:
    """Raise `Damaged` if the row's budget differs from that of the history, which ends with event `last`."""
    if row.budget != expected:
        raise Damaged(f"The row of run {row.id} tells of another budget than its history.", last)


def published_before(started: "Recorded") -> dict[str, msgspec.Raw]:
    """Return what the run had published before its newest history began."""
    carried = getattr(started.body, "carried", None)
    return dict(carried.published) if carried is not None else {}


_LATER_PUBLISHING = frozenset({"value_published", "run_retried"})
_PUBLISHING = _LATER_PUBLISHING | {"run_started"}


def _publishing(history: Sequence["Recorded"]) -> Sequence["Recorded"]:
    kinds: Set[str] = getattr(history, "kinds", _PUBLISHING)
    if kinds.isdisjoint(_LATER_PUBLISHING):
        return history[:1]  # the first event may carry some
    return [event for event in history if event[1] in _PUBLISHING]


def published_by(history: Sequence["Recorded"], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the published values as the row has them: those that counted when the newest was published.

    What a retry makes void stays in the row until something is published again. `before` are those that counted before
    the given events.
    """
    counted: list[Recorded] = []
    earlier = before or {}
    shown: dict[str, Any] = dict(earlier)
    for event in _publishing(history):
        if event.kind == "run_started" and event.body.carried is not None:
            earlier = {name: ValuePublished(0, name, value) for name, value in published_before(event).items()}
            shown = dict(earlier)
        elif event.kind == "value_published":
            counted.append(event)
            shown = {**earlier, **{one.body.name: one.body for one in counted}}
        elif event.kind == "run_retried":
            counted = [one for one in counted if one.seq < event.body.voids]
    return shown
