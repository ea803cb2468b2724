"""What a history says about compensation, without any code: what was done, could be undone, and was undone.

A rollback may be requested by a command that knows no workflow. It learns here whether that makes sense, and what would
remain.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from everstep.engine.history.calls import WHAT_IS_LOST, Calls
from everstep.engine.history.journal import Journal
from everstep.engine.history.restored import may_lack
from everstep.engine.history.verify import Recorded, load_generations, load_now, read_now, refuse_deleted
from everstep.errors import CompensationBegun, CrossesOnce, Damaged, Uncompensated, UnknownRun
from everstep.model.carried import CarriedStep
from everstep.model.events import decode_body
from everstep.stores.protocol import RunRow, Store
from everstep.stores.rows.keys import KeyUndoing


def change_key(
    journal: Journal, call: int, key: str, then: Literal["begun", "undone", "kept"], carried: CarriedStep | None
) -> None:
    """Change the key (`key=`) of a compensated step together with the next event."""
    if key:
        place = (carried.own_call, carried.generation) if carried is not None else ()
        journal.key_changes().undoing.append(KeyUndoing(key, call, then, *place))


def note_rollback(journal: Journal, calls: Calls) -> None:
    """What a run did is to be undone, as is recorded next: from there on nobody shares the outcomes of its keys."""
    for call, (key, carried) in calls.keyed.items():
        change_key(journal, call, key, "begun", carried)


def note_no_rollback(journal: Journal, calls: Calls) -> None:
    """A run ends, as is recorded next, before everything was undone: what nobody began to undo is shared again."""
    being_undone = calls.being_undone
    for call, (key, carried) in calls.keyed.items():
        if call not in being_undone:
            change_key(journal, call, key, "kept", carried)


def refuse_retry(run: str, calls: Calls) -> None:
    """Begun compensation rules out a retry: what the run would build upon is gone."""
    if calls.was_begun:
        raise CompensationBegun(
            f"The steps of the run {run} were compensated, so it cannot be retried. Start it again: under another id, "
            "or with on_existing='restart'."
        )


def refuse_rollback(store: Store, row: RunRow, calls: Calls, *, allowed: bool) -> None:
    """Raise if a rollback makes no sense, or if it would leave effects without anybody having said so."""
    if calls.is_undone:
        raise CompensationBegun(
            f"What the run {row.id} did is being undone already; `everstep show {row.id}` says how far."
        )
    if calls.was_undone:
        raise CompensationBegun(
            f"What the run {row.id} did has been undone already; there is nothing left to roll back."
        )
    refuse_what_is_left(store, row, calls, allowed=allowed)


def refuse_what_is_left(store: Store, row: RunRow, calls: Calls, *, allowed: bool) -> None:
    """Raise if a rollback would leave effects that must not happen twice, unless that is allowed."""
    left = [] if allowed else _left_by(store, row, calls) + left_by_children(store, row.id)
    if left:
        raise Uncompensated(
            f"A rollback of {row.id} would leave as they are: {', '.join(left)}. They must not happen twice, and "
            "nothing undoes them (no compensate=; child runs are rolled back by themselves). "
            f"`everstep rollback {row.id} --allow-uncompensated` (allow_uncompensated=True) undoes the rest.",
            left,
        )


def _left_by(store: Store, row: RunRow, calls: Calls) -> list[str]:
    """Return what nothing undoes of a run, also if it has not been taken up since a backup was restored."""
    if calls.lost or calls.note is None or not may_lack(store, store.life(), row.id, row.generation, calls.note):
        return calls.uncompensated
    return [*calls.uncompensated, WHAT_IS_LOST]


def left_by_children(store: Store, run: str) -> list[str]:
    """Return the effects of child runs, and of their children: they compensate themselves."""
    left: list[str] = []
    for row in store.children(run):
        try:
            calls = Calls(load_now(store, row)[1])
        except UnknownRun:  # deleted just now
            left.append(f"everything that the run {row.id} did, which was deleted")
        except Damaged:
            left.append(f"everything that the run {row.id} did, whose history is damaged")
        else:
            steps = _left_by(store, row, calls) + calls.compensable
            left += [f"{step} of the run {row.id}" for step in steps]
        left += left_by_children(store, row.id)
    return left + [f"everything that the run {child} did, which was deleted" for child in _deleted_children(store, run)]


def _deleted_children(store: Store, run: str) -> list[str]:
    """Return the children that a run has started, in any of its generations, and that do not exist any more."""
    started: dict[tuple[int, int], str] = {}
    for generation in store.generations(run):
        for event in store.events(run, generation):
            if event.kind == "child_started":
                body = decode_body(event.kind, event.body)
                started[generation, body.call] = body.run
            elif event.kind == "child_ended" and decode_body(event.kind, event.body).status == "refused":
                started.pop((generation, decode_body(event.kind, event.body).call), None)
    children = dict.fromkeys(started.values())
    return [child for child in children if store.run(child) is None or store.is_being_deleted(child)]


CLOCKS_APART: Final = 60_000_000
"""How much later than its parent says a child may have begun, because another machine's clock was ahead."""
DELETED: Final = "what its deleted history does not say"
DAMAGED: Final = "what its damaged history does not say"
FORGOTTEN: Final = "its key was forgotten"


class Crossed(NamedTuple):
    """An effect that a retry would go back over. `seq` is its outcome's event; 0 if its end is unknown."""

    run: str
    step: str
    seq: int
    why: str = ""
    """Why it counts although it has a key of its own, which guards it as long as it is kept."""


class Relied(NamedTuple):
    """What keeps an effect from happening again: keys whose outcomes are shared, and runs that a fork would follow."""

    keys: set[str]
    runs: set[str]


def effects_since(
    store: Store, run: str, calls: Calls, since: int, relied: Relied, *, in_fork: bool = False
) -> list[Crossed]:
    """Return the effects that a run has had, or may have had, from an event on, and would have again from there.

    In a retry those are the steps that must not happen twice. In a fork a `repeat` step counts as well: another run has
    another key for it, so its receiver takes it for another action. Not those that a compensation has undone; nor those
    whose key is kept, which `relied` gets, as it gets a fork's children with ids of their own that are still there.
    """
    done: list[Crossed] = []
    unknown: list[Crossed] = []
    for call in calls.all:
        end, started = call.outcome, call.started
        counts = call.effect not in ("", "read") if in_fork else call.must_be_kept
        if not counts or call.compensates or call.is_kept:
            continue
        is_shared = end is not None and end.kind == "step_shared" and call.asked.seq >= since
        if not is_shared and (started is None or (started.seq if in_fork else call.begun_at) < since):
            continue
        if end is None:
            unknown += [] if call.key else [Crossed(run, call.step, 0)]
        elif is_shared or call.is_done:
            if is_guarded(store, call.key, end.body.run if is_shared else run):
                relied.keys.add(call.key)
            elif call.undone is None or call.undone.body.skipped:
                done.append(Crossed(run, call.step, end.seq, FORGOTTEN if call.key else ""))
    done.sort(key=lambda one: one.seq)
    for call in calls.children():
        if call.started is not None and call.started.seq >= since:
            done += _effects_of_child(store, run, call.started, relied, in_fork=in_fork)
    return done + unknown


def _effects_of_child(store: Store, run: str, started: Recorded, relied: Relied, *, in_fork: bool) -> list[Crossed]:
    """Return the effects of a child run, and of its own children. A fork would follow a child with an id of its own."""
    child: str = started.body.run
    histories, lost = histories_of_child(store, started)
    is_own = child.startswith(f"{run[:170]}.")
    if lost == DELETED or (lost and (is_own or not in_fork)):
        return [Crossed(child, lost, 0)]
    if in_fork and not is_own:
        relied.runs.add(child)
        return []
    return [
        one for history in histories for one in effects_since(store, child, Calls(history), 1, relied, in_fork=in_fork)
    ]


def is_guarded(store: Store, key: str | None, owner: str) -> bool:
    """Return True if a step's key keeps it from happening again: other steps with the key share its outcome.

    Not if the key was forgotten. Nor if it is free, unless the run that did it then freed it: it was forgotten, and
    what another one did under it since was undone.
    """
    row = store.effect(key) if key else None
    return row is not None and (row.state != "free" or row.run == owner)


def histories_of_child(store: Store, started: Recorded) -> tuple[list[list[Recorded]], str]:
    """Return the histories of a child that a run has started, of all its generations; or the reason why they are
    unknown.

    A missing child did exist once. A run that has got its id since then is not the child.
    """
    row = store.run(started.body.run)
    if row is None:
        return [], DELETED
    try:
        refuse_deleted(store, row)
        histories = read_now(store, row, lambda now: load_generations(store, now))[1]
    except UnknownRun:  # including one that is being deleted
        return [], DELETED
    except Damaged:
        return [], DAMAGED
    return ([], DELETED) if histories[0][0].at > started.at + CLOCKS_APART else (histories, "")


def lost_child(store: Store, started: Recorded) -> list[Crossed]:
    """Return a child whose failure is to be retried, if it is not there any more: a retry would start it anew."""
    is_lost = histories_of_child(store, started)[1] == DELETED
    return [Crossed(started.body.run, DELETED, 0)] if is_lost else []


def refuse_crossing(run: str, crossed: Sequence[Crossed], *, across_once: bool) -> None:
    """Raise `CrossesOnce`, unless it was allowed and every effect has a known end."""
    unknown = [one for one in crossed if not one.seq and one.run == run]
    if not crossed or (across_once and not unknown):
        return
    listed = ", ".join(_text(one, run) for one in crossed)
    advice = "How it ended is not known, so it cannot be allowed; `everstep show` says more."
    if not unknown:
        advice = (
            "If that is right, `everstep retry --across-once` (across_once=True) continues: outcomes of the run's own "
            "steps are kept and not done again, child runs are started anew."
        )
    what = f"A retry of {run} would go back over effects that must not happen twice"
    raise CrossesOnce(f"{what}: {listed}. {advice}", crossed)


def _text(one: Crossed, run: str) -> str:
    whose = f" of {one.run}" if one.run != run else ""
    why = f", {one.why}" if one.why else ""
    return f"{one.step}{whose} (event {one.seq or '?'}{why})"
