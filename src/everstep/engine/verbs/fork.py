"""`fork`: a new run that begins with another run's events up to a point, and continues from there by itself.

The events are copied under the new id, with new digests, in the transaction that creates the run: there is no half
fork. The other run is not touched. Copied effects belong to it: a fork never compensates them, and they keep their
keys. From the fork on, everything that the code asks for has keys of the fork's own.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from everstep.codec import PLAIN
from everstep.engine.code.execution import OUTCOMES
from everstep.engine.code.start import new_entropy, start_arguments
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.calls import WHAT_IS_LOST, Calls
from everstep.engine.history.effects import Crossed, Relied, effects_since
from everstep.engine.history.journal import INLINE_BYTES_MAX, restore_payload, store_payload
from everstep.engine.history.restored import life_of_copy, may_lack, newest_note, restores_in
from everstep.engine.history.streams import copied_streams
from everstep.engine.history.verify import (
    Recorded,
    load_verified,
    preview_text,
    published_by,
    read_now,
    refs_of,
    refuse_deleted,
    refuse_generation,
    verified,
    verify_payloads,
)
from everstep.engine.process.host import Host
from everstep.engine.run.resume import is_supported, replay
from everstep.engine.verbs.runs import existing_row
from everstep.errors import CrossesOnce, Damaged, IdConflict, Misuse, NotDecodable
from everstep.model import events as ev
from everstep.model.accounts import standing_at
from everstep.model.crash_points import crash_point
from everstep.model.digests import chain_next, chain_start, digest_of
from everstep.model.forked import TAG, Forked, switches
from everstep.model.ids import checked_run_id
from everstep.stores.protocol import Existing, Needs, NewRun, Refused, RunRow, StartRun, Store

NEWS: Final = frozenset({*OUTCOMES, "run_started", "run_retried"})
"""The events after which a fork can begin."""
STOPPING: Final = ("cancel_requested", "rollback_requested", "compensation_started")


def _of_others(calls: Calls) -> list[str]:
    """Return the effects and child runs that are open, and so the run's that began them."""
    open_calls = [call for call in calls.open.values() if call.child or call.effect != "read"]
    return [f"child run {call.child}" if call.child else f"step {call.step}" for call in open_calls]


def fork_point(run: str, history: Sequence[Recorded], at: int) -> int:
    """Return the last event that a fork at an event keeps. Raises `Misuse` if no fork is possible there."""
    if not 1 <= at <= len(history):
        raise Misuse(f"The run {run} has the events 1 to {len(history)}; at={at} is none of them.")
    calls, found, before, after = Calls(), 0, 0, 0
    blocked: list[str] = []
    for event in history:
        if event.kind in STOPPING:
            if event.seq <= at:
                raise Misuse(
                    f"At event {at} the run {run} was being stopped (event {event.seq}, {event.kind}). Fork it before "
                    "that."
                )
            break
        if event.seq > at and (not blocked or after):
            break
        calls.take(event)
        if event.kind not in NEWS:
            continue
        others = _of_others(calls)
        if event.seq <= at:
            found, blocked = event.seq, others
        if not others:
            before, after = (event.seq, after) if event.seq <= at else (before, event.seq)
    if blocked:
        where = f"event {before}" + (f" or event {after}" if after else "")
        raise Misuse(
            f"At event {at} of {run} there was something under way that only this run can settle: "
            f"{', '.join(blocked[:3])}. Fork it where there was nothing: at {where}."
        )
    return found


# -- what would happen once more ---------------------------------------------------------------------------------------
def _undone_before(run: str, generation: int, seq: int, histories: Sequence[Calls]) -> list[Crossed]:
    """Return the effects up to an event that the run has undone since, or is undoing: a fork would build upon them.

    histories: the calls of this generation, and those of later ones.
    """
    done = {call.number: call.step for call in histories[0].all if 0 < call.begun_at <= seq}
    done |= {number: one.title for number, one in histories[0].carried.items()}
    found = []
    for place, calls in enumerate(histories):
        for at, call in calls.compensated:
            older = calls.carried.get(call)
            own = older.own_call if older is not None and older.generation == generation else 0
            if (step := done.get(own if place else call)) is not None:
                found.append(Crossed(run, f"{step}, which was undone since", at))
    return found


def refuse_effects(
    run: str, at: int, generation: int, histories: Sequence[Sequence[Recorded]], store: Store, allowed: "Allowed"
) -> Relied:
    """Raise `CrossesOnce` with everything that a fork would repeat or build upon, unless it was allowed.

    Returns what it relies on instead of repeating it.
    """
    relied = Relied(set(), set())
    if allowed is True:
        return relied
    of_all, found = [Calls(history) for history in histories], list[Crossed]()
    for place, calls in enumerate(of_all):
        found += effects_since(store, run, calls, 1 if place else at + 1, relied, in_fork=True)
    found += _undone_before(run, generation, at, of_all)
    newest = generation + len(histories) - 1
    is_lost = any(calls.was_lost for calls in of_all)
    if is_lost or may_lack(store, store.life(), run, newest, newest_note(histories[-1])):
        found.append(Crossed(run, WHAT_IS_LOST, 0))
    names = set(allowed or ())
    found = [one for one in found if one.step not in names and one.step.partition("#")[0] not in names]
    if not found:
        return relied
    listed = ", ".join(_text(one, run) for one in found)
    raise CrossesOnce(
        f"A fork of {run} at event {at} would do effects again, with keys of its own, or build upon undone ones: "
        f"{listed}. Fork it after them; or, if that is what you want, allow it: `--allow STEP` for one, "
        "`--allow-effects` for all (allow_effects=[…], allow_effects=True).",
        found,
    )


Allowed = bool | Collection[str]


def _text(one: Crossed, run: str) -> str:
    whose = f" of {one.run}" if one.run != run else ""
    why = f", {one.why}" if one.why else ""
    return f"{one.step}{whose} (event {one.seq}{why})" if one.seq else f"{one.step}{whose}"


NOT_GIVEN: Final[Any] = ...
"""Marks an outcome that stays as it is, because None is a possible outcome."""


class Wanted(msgspec.Struct):
    """The request for a fork."""

    run: str
    at: int
    generation: int | None = None
    args: Sequence[Any] | None = None
    outcome: Any = NOT_GIVEN
    id: str | None = None
    allowed: Allowed = False
    by: str = ""
    note: str = ""


async def fork(app: Host, wanted: Wanted) -> str:
    """Create the fork, durably, and return its id."""
    row = await app.read(existing_row, app, wanted.run)
    if not is_supported(row):
        raise Misuse(f"The run {row.id} was made by a newer release, so this one cannot fork it.")
    generation = row.generation if wanted.generation is None else wanted.generation
    refuse_generation(row, generation)
    wanted_ones = range(generation, row.generation + 1)
    histories = [await app.read(_history, app, row.id, one) for one in wanted_ones]
    point = fork_point(row.id, histories[0], wanted.at)
    relied = await app.read(refuse_effects, row.id, point, generation, histories, app.store, wanted.allowed)
    new, copied = await app.read(_forked_run, app, row, generation, histories[0][:point], wanted)
    _refuse_differences(app, new.row, copied, dict(new.payloads))
    crash_point("run.fork")
    verdict = await app.committer.submit(StartRun(new, Needs([row.id, *relied.runs], [*relied.keys])))
    if isinstance(verdict, Refused):  # something was deleted since it was read
        return await fork(app, wanted)
    if isinstance(verdict, Existing) and not await app.read(_is_same, app, verdict.row, copied):
        raise IdConflict(f"The id {new.row.id} belongs to another run. Use another one.")
    crash_point("run.forked")
    return new.row.id


def _history(app: Host, run: str, generation: int) -> list[Recorded]:
    """Return a history, verified with its payloads."""

    def verified_now(row: RunRow) -> list[Recorded]:
        if generation == row.generation:
            history = load_verified(app.store, row)
        else:  # the row knows only the newest head; an older history vouches for itself by its chain
            events = app.store.events(run, generation)
            if not events:
                raise Damaged(f"Generation {generation} of run {run} is not there.")
            head = {"head_seq": events[-1].seq, "head_digest": events[-1].digest, "generation": generation}
            history = verified(events, msgspec.structs.replace(row, **head), app.store.chain)
        verify_payloads(app.store, row, history, is_newest=generation == row.generation)
        return history

    return read_now(app.store, existing_row(app, run), verified_now)[1]


def _forked_run(
    app: Host, row: RunRow, generation: int, history: Sequence[Recorded], wanted: Wanted
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


def _new_id(app: Host, run: str, at: int) -> str:
    """Return an unused id that begins like the id of the forked run."""
    return f"{run[:150]}-fork-{at // 1000:011x}{app.randomness.getrandbits(24):06x}"


def _started(
    app: Host,
    row: RunRow,
    generation: int,
    history: Sequence[Recorded],
    head: bytes,
    at: int,
    wanted: Wanted,
    payloads: dict[str, bytes],
) -> ev.RunStarted:
    """Return the fork's first event: that of the other run, with the origin of the fork."""
    source: ev.RunStarted = history[0].body
    forked = Forked(row.id, generation, len(history), head.hex(), at, new_entropy(app.randomness))
    forked.earlier = [one for one in switches(source) if one[0] < len(history)]
    forked.by, forked.note = wanted.by, wanted.note
    changes: dict[str, Any] = {"forked": forked, "parent": "", "delay": 0.0}
    changes |= {"chain": app.store.chain.writing.id, "life": life_of_copy(app.store, row.id, generation, history)}
    changes["restored"] = restores_in(changes["life"])
    if len(history) == 1:
        changes["entropy"] = forked.entropy
    if source.carried is not None:  # that run must undo what older generations did
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
    """Return a copied event's body. Records of restored backups become what the copy knows of them."""
    body: ev.Body = event.body
    if isinstance(body, ev.RunRestored):
        return ev.RunRestored(started.restored, started.life)
    return body


def _arguments(app: Host, workflow: str, args: Sequence[Any], payloads: dict[str, bytes]) -> dict[str, Any]:
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise Misuse("args= is the list of all arguments of the workflow.")
    target = DECLARED.named(workflow)
    try:
        target.signature.normalise(tuple(args), {})
    except TypeError as error:
        raise Misuse(f"args= is the list of all arguments of the workflow: {error}.") from None
    encoded = start_arguments(app.codec, target, args)
    raw, ref = _packed(encoded.payload, payloads)
    return {"arguments": raw, "arguments_ref": ref, "digest": encoded.digest}


def _edited(app: Host, run: str, event: Recorded, value: Any, payloads: dict[str, bytes]) -> tuple[str, ev.Body]:
    """Return the outcome that replaces a recorded one."""
    body = event.body
    raw, ref = _packed(app.codec.encode(value, PLAIN, "the outcome"), payloads)
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


def _payload_of(app: Host, run: str, value: msgspec.Raw, ref: str) -> bytes:
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


def _refuse_differences(app: Host, row: RunRow, copied: list[Recorded], payloads: dict[str, bytes]) -> None:
    """Replay the code against the fork's beginning, if the code is here. A fork that does not match is not created."""
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
    """A store for a replay, with the payloads of a fork that does not exist yet."""

    def __init__(self, store: Any, payloads: dict[str, bytes]) -> None:
        self._store = store
        self._payloads = payloads

    def payload(self, run: str, digest: str) -> bytes | None:
        return self._payloads.get(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _is_same(app: Host, there: RunRow, copied: Sequence[Recorded]) -> bool:
    """Return True if an existing run is the requested fork: the request was repeated."""
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
