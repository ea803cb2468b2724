"""`fork`: a new run that begins with what another one did up to an event, and goes on from there by itself.

The events are copied and linked anew under the new id, in the transaction that creates the run: there is no half fork.
The other run is not touched. What was copied is its doing: a fork never undoes it, and its keys stay its keys. From
the fork on, everything that the code asks for has keys of the fork's own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from everstep.codec import ANY
from everstep.engine.agreement import preview_text, published_by
from everstep.engine.fork_points import Allowed, fork_point, refuse_effects
from everstep.engine.history import (
    Recorded,
    load_verified,
    read_now,
    refs_of,
    refuse_deleted,
    verified,
    verify_payloads,
)
from everstep.engine.journal import INLINE_BYTES_MAX, restore_payload, store_payload
from everstep.engine.operations import existing_row
from everstep.engine.restoring import life_of_copy, restores_in
from everstep.engine.resume import is_supported, replay
from everstep.engine.starting import new_entropy
from everstep.engine.streams import copied_streams
from everstep.engine.workflow import DECLARED
from everstep.errors import IdConflict, Misuse, NotDecodable
from everstep.model import events as ev
from everstep.model.accounts import standing_at
from everstep.model.crash_points import crash_point
from everstep.model.digests import chain_next, chain_start, digest_of
from everstep.model.forked import TAG, Forked, switches
from everstep.model.ids import checked_run_id
from everstep.stores.protocol import Existing, Needs, NewRun, Refused, RunRow, StartRun

if TYPE_CHECKING:
    from everstep.engine.app import App

NOT_GIVEN: Final[Any] = ...
"""Stands for an outcome that is left as it is: None is one that may be given."""


class Wanted(msgspec.Struct):
    """What somebody wants of a fork."""

    run: str
    at: int
    generation: int | None = None
    args: Sequence[Any] | None = None
    outcome: Any = NOT_GIVEN
    id: str | None = None
    allowed: Allowed = False
    by: str = ""
    note: str = ""


async def fork(app: "App", wanted: Wanted) -> str:
    """Create the fork, durably, and return its id."""
    row = await app.read(existing_row, app, wanted.run)
    if not is_supported(row):
        raise Misuse(f"The run {row.id} was made by a newer release, so this one cannot fork it.")
    generation = wanted.generation or row.generation
    wanted_ones = range(generation, row.generation + 1)
    histories = [await app.read(_history, app, row.id, one) for one in wanted_ones]
    point = fork_point(row.id, histories[0], wanted.at)
    relied = await app.read(refuse_effects, row.id, point, generation, histories, app.store, wanted.allowed)
    new, copied = await app.read(_forked_run, app, row, generation, histories[0][:point], wanted)
    _refuse_differences(app, new.row, copied, dict(new.payloads))
    crash_point("run.fork")
    verdict = await app.committer.submit(StartRun(new, Needs([row.id, *relied.runs], [*relied.keys])))
    if isinstance(verdict, Refused):  # something was deleted since it was looked at
        return await fork(app, wanted)
    if isinstance(verdict, Existing) and not await app.read(_is_same, app, verdict.row, copied):
        raise IdConflict(f"The id {new.row.id} belongs to another run. Use another one.")
    crash_point("run.forked")
    return new.row.id


def _history(app: "App", run: str, generation: int) -> list[Recorded]:
    """Return a history, verified with its payloads."""

    def verified_now(row: RunRow) -> list[Recorded]:
        if generation == row.generation:
            history = load_verified(app.store, row)
        else:  # the row knows only the newest head; an older history vouches for itself by its chain
            events = app.store.events(run, generation)
            if not events:
                raise Misuse(f"The run {run} has no generation {generation}.")
            head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
            history = verified(events, msgspec.structs.replace(row, **head), app.store.chain)
        verify_payloads(app.store, row, history, is_newest=generation == row.generation)
        return history

    return read_now(app.store, existing_row(app, run), verified_now)[1]


def _forked_run(
    app: "App", row: RunRow, generation: int, history: Sequence[Recorded], wanted: Wanted
) -> tuple[NewRun, list[Recorded]]:
    """Return the run to be created, and its events with their bodies."""
    events = app.store.events(row.id, generation, 1, len(history))
    payloads: dict[str, bytes] = {}
    at = max(app.clock.now(), history[-1].at)
    run = checked_run_id(wanted.id) if wanted.id is not None else _new_id(app, row.id, at)
    started = _started(app, row, generation, history, events[-1].digest, at, wanted, payloads)
    bodies = [started, *(_noted(event, started) for event in history[1:])]
    kind = history[-1].kind
    if wanted.outcome is not NOT_GIVEN:
        kind, bodies[-1] = _edited(app, row.id, history[-1], wanted.outcome, payloads)
        if wanted.at != len(history):
            raise Misuse(f"Event {wanted.at} of {row.id} is not an outcome; event {len(history)} is the one before it.")
    entries = copied_streams(app.store, row, generation, run, bodies)
    for body in bodies:
        for ref in refs_of(body):
            if ref not in payloads and (stored := app.store.payload(row.id, ref)) is not None:
                payloads[ref] = stored
    chain = app.store.chain.writing
    digest, rows, copied = chain_start(run, 1), [], []
    for event, body in zip(events, bodies, strict=True):
        own_kind = kind if event.seq == len(history) else event.kind
        own_at = at if len(history) == 1 else event.at  # without a past it is a run that begins now
        encoded = ev.encode_body(body)
        digest = chain_next(digest, event.seq, own_kind, event.step, own_at, encoded, chain.key)
        rows.append(ev.EventRow(event.seq, own_kind, event.step, own_at, encoded, digest))
        copied.append(Recorded(event.seq, own_kind, event.step, own_at, body))
    new = _row(row, run, started, rows[-1], at, payloads)
    new.published = _published(copied, payloads)
    new.budget = standing_at(copied)
    return NewRun(new, rows[0], list(payloads.items()), more=rows[1:], entries=entries), copied


def _new_id(app: "App", run: str, at: int) -> str:
    """Return an id that nobody has, and that begins like the one of the run that is forked."""
    return f"{run[:150]}-fork-{at // 1000:011x}{app.randomness.getrandbits(24):06x}"


def _started(
    app: "App",
    row: RunRow,
    generation: int,
    history: Sequence[Recorded],
    head: bytes,
    at: int,
    wanted: Wanted,
    payloads: dict[str, bytes],
) -> ev.RunStarted:
    """Return the fork's first event: that of the other run, with where it comes from."""
    source: ev.RunStarted = history[0].body
    forked = Forked(row.id, generation, len(history), head.hex(), at, new_entropy(app.randomness))
    forked.earlier = [one for one in switches(source) if one[0] < len(history)]
    forked.by, forked.note = wanted.by, wanted.note
    changes: dict[str, Any] = {"forked": forked, "parent": "", "delay": 0.0}
    changes |= {"chain": app.store.chain.writing.id, "life": life_of_copy(app.store, row.id, generation, history)}
    changes["restored"] = restores_in(changes["life"])
    if len(history) == 1:
        changes["entropy"] = forked.entropy
    if source.carried is not None:  # what older generations did is that run's to undo
        changes["carried"] = msgspec.structs.replace(source.carried, head="", undoable=[], uncompensated=[])
    if wanted.outcome is not NOT_GIVEN:
        forked.edited = "outcome"
    if wanted.args is not None:
        forked.edited = "arguments"
        changes |= _arguments(app, row.workflow, wanted.args, payloads)
    elif source.carried is not None:
        payload = _payload_of(app, row.id, source.arguments, source.arguments_ref)
        changes["digest"] = digest_of(payload).hex()  # and not that of the other run's first generation
    return msgspec.structs.replace(source, **changes)


def _noted(event: Recorded, started: ev.RunStarted) -> ev.Body:
    """Return a copied event's body. What the other run noted of restored backups is what its copy knows of them."""
    body: ev.Body = event.body
    if isinstance(body, ev.RunRestored):
        return ev.RunRestored(started.restored, started.life)
    return body


def _arguments(app: "App", workflow: str, args: Sequence[Any], payloads: dict[str, bytes]) -> dict[str, Any]:
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise Misuse("args= is the list of all arguments of the workflow.")
    encoded = app.codec.encode_arguments(DECLARED.named(workflow).signature, tuple(args), {}, workflow)
    raw, ref = _packed(encoded.payload, payloads)
    return {"arguments": raw, "arguments_ref": ref, "digest": encoded.digest}


def _edited(app: "App", run: str, event: Recorded, value: Any, payloads: dict[str, bytes]) -> tuple[str, ev.Body]:
    """Return the outcome that takes the place of a recorded one."""
    body = event.body
    raw, ref = _packed(app.codec.encode(value, ANY, "the outcome"), payloads)
    if event.kind in ("step_completed", "step_failed"):
        given = ev.StepCompleted(body.call, raw, ref, body.attempt, body.seconds, adopted=True, early=body.early)
        given.secret, given.charged = body.secret, body.charged
        return "step_completed", given
    if event.kind == "signal_received":
        return event.kind, msgspec.structs.replace(body, value=raw, ref=ref)
    if event.kind == "child_ended":
        return event.kind, msgspec.structs.replace(body, status="completed", value=raw, ref=ref, secret=False)
    raise Misuse(
        f"Event {event.seq} of {run} ({event.kind}) has no outcome that could be another one. Give one in place of a "
        "step's, a signal's or a child's: fork at its step_completed, step_failed, signal_received or child_ended."
    )


def _packed(payload: bytes, payloads: dict[str, bytes]) -> tuple[msgspec.Raw, str]:
    if len(payload) <= INLINE_BYTES_MAX:
        return msgspec.Raw(payload), ""
    stored, ref = store_payload(payload)
    payloads[ref] = stored
    return ev.NO_PAYLOAD, ref


def _payload_of(app: "App", run: str, value: msgspec.Raw, ref: str) -> bytes:
    return restore_payload(app.store.payload(run, ref), ref) if ref else bytes(value)


def _row(
    row: RunRow, run: str, started: ev.RunStarted, head: ev.EventRow, at: int, payloads: dict[str, bytes]
) -> RunRow:
    assert started.forked is not None
    ref = started.arguments_ref
    arguments = restore_payload(payloads[ref], ref) if ref else bytes(started.arguments)
    return RunRow(
        id=run,
        workflow=started.workflow,
        version=started.version,
        semantics=started.semantics,
        head_seq=head.seq,
        head_digest=head.digest,
        queue=row.queue,
        priority=row.priority,
        tags={**row.tags, TAG: started.forked.origin},
        arguments=started.digest,
        preview=preview_text(arguments),
        created_at=at,
        updated_at=at,
    )


def _published(history: Sequence[Recorded], payloads: dict[str, bytes]) -> bytes | None:
    values = {
        name: msgspec.Raw(restore_payload(payloads[body.ref], body.ref) if body.ref else bytes(body.value))
        for name, body in published_by(history).items()
    }
    return msgspec.json.encode(values) if values else None


def _refuse_differences(app: "App", row: RunRow, copied: list[Recorded], payloads: dict[str, bytes]) -> None:
    """Replay the code against what the fork begins with, if it is here. What does not agree is not begun."""
    if row.workflow not in DECLARED.names() or len(copied) == 1:
        return
    beside, workflow = _Beside(app.store, payloads), DECLARED.named(row.workflow)
    try:
        replayed = replay(beside, app.codec, row, workflow, copied, quiet=True)
    except NotDecodable as error:
        raise Misuse(f"The code cannot be given what the fork begins with: {error}") from None
    replayed.execution.evict()
    if replayed.differences:
        one = replayed.differences[0]
        raise Misuse(
            f"With this the code no longer does what was recorded up to event {len(copied)}: at event {one.seq} it was "
            f"{one.recorded}, and now it would {one.now} ({one.what}). Fork it before that, or with other code."
        )


class _Beside:
    """A store as a replay sees it, with the payloads of a fork that is not there yet."""

    def __init__(self, store: Any, payloads: dict[str, bytes]) -> None:
        self._store = store
        self._payloads = payloads

    def payload(self, run: str, digest: str) -> bytes | None:
        return self._payloads.get(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _is_same(app: "App", there: RunRow, copied: Sequence[Recorded]) -> bool:
    """Tell whether a run that is there already is the fork that is wanted: somebody asks once more."""
    wanted: ev.RunStarted = copied[0].body
    refuse_deleted(app.store, there)
    first = app.store.events(there.id, 1, only=[1])
    if len(copied) > 1:
        end = (copied[-1].kind, ev.encode_body(copied[-1].body))
        if [(event.kind, event.body) for event in app.store.events(there.id, 1, only=[len(copied)])] != [end]:
            return False  # it was given another outcome
    if not first or there.workflow != wanted.workflow or there.arguments != wanted.digest:
        return False
    origin, other = ev.decode_body("run_started", first[0].body).forked, wanted.forked
    if origin is None or other is None:
        return False
    return (origin.run, origin.generation, origin.seq, origin.head, origin.edited) == (
        other.run,
        other.generation,
        other.seq,
        other.head,
        other.edited,
    )
