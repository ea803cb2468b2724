"""Where a run can be forked, and what a fork there would do once more. Reads only.

A fork keeps the history up to an event. What the code asked for after the last news before that is left out: the code
asks for it again, by itself. So code that does one thing after the other can be forked anywhere. Where several things
are under way at once, an effect or a child run among them belongs to the other run: there it is refused.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from everstep.engine.crossing import DELETED, FORGOTTEN, Crossed, histories_of_child, is_guarded
from everstep.engine.execution import OUTCOMES
from everstep.engine.history import Recorded
from everstep.engine.recorded import asks_for_something
from everstep.engine.restoring import may_lack, newest_note
from everstep.engine.rollback import WHAT_IS_LOST
from everstep.errors import CrossesOnce, Misuse
from everstep.model.carried import carried_step
from everstep.model.contracts import KEPT
from everstep.stores.protocol import Store

NEWS: Final = frozenset({*OUTCOMES, "run_started", "run_retried"})
"""The events that a fork can begin after."""
STOPPING: Final = ("cancel_requested", "rollback_requested", "compensation_started")


class _Asked(NamedTuple):
    """Something that the code asked for. `is_others`: it is an effect or a child run, so the run's that began it."""

    seq: int
    text: str
    is_others: bool


class _UnderWay:
    """What the code waits for, event by event."""

    def __init__(self) -> None:
        self._open: dict[int, _Asked] = {}
        self._failed: dict[int, tuple[int, _Asked]] = {}

    def take(self, event: Recorded) -> None:
        """Go on by one event."""
        kind, body, call = event.kind, event.body, getattr(event.body, "call", 0)
        if kind == "child_started" and asks_for_something(event):
            self._open[call] = _Asked(event.seq, f"child run {body.run}", True)
        elif kind in ("step_started", "key_taken", "call_withheld") and asks_for_something(event):
            is_others = getattr(body, "effect", "read") != "read" or getattr(body, "instead_of", "") == "child_started"
            self._open[call] = _Asked(event.seq, f"step {event.step}", is_others)
        elif kind in ("step_completed", "step_shared", "step_failed", "child_ended"):
            asked = self._open.pop(call, None)
            if asked is not None and (kind == "step_failed" or getattr(body, "status", "") == "failed"):
                self._failed[call] = (event.seq, asked)
        elif kind == "step_cancelled":
            self._open.pop(body.step_call, None)
        elif kind == "run_retried":
            self._open = {call: one for call, one in self._open.items() if one.seq < body.voids}
            again = {call: one for call, (at, one) in self._failed.items() if one.seq < body.voids <= at}
            self._open |= again

    def of_others(self) -> list[str]:
        """Return the effects and child runs that are open."""
        return [one.text for one in self._open.values() if one.is_others]


def fork_point(run: str, history: Sequence[Recorded], at: int) -> int:
    """Return the last event that a fork at an event keeps. Raises `Misuse` if there can be none there."""
    if not 1 <= at <= len(history):
        raise Misuse(f"The run {run} has the events 1 to {len(history)}; at={at} is none of them.")
    under_way, found, before, after = _UnderWay(), 0, 0, 0
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
        under_way.take(event)
        if event.kind not in NEWS:
            continue
        others = under_way.of_others()
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
class Relied(NamedTuple):
    """What a fork would not do again because it is there: keys that it would share, and runs that it would follow."""

    keys: set[str]
    runs: set[str]


def done_after(store: Store, run: str, history: Sequence[Recorded], seq: int, relied: Relied) -> list[Crossed]:
    """Return the effects that a run had, or may have had, after an event, and that a fork there would have again.

    A `repeat` step counts, for in another run it has another key, and is another action to its receiver. One with a
    key of its own (`key=`) does not, as long as the key is kept: a fork shares its outcome. Nor does what was undone;
    nor a child run with an id of its own that is still there: a fork would follow the same. `relied` gets both.
    """
    begun: dict[int, str] = {}
    keys: dict[int, str] = {}
    undoing: dict[int, int] = {}
    done: dict[int, Crossed] = {}
    children: dict[int, Recorded] = {}

    def is_shared(call: int, owner: str) -> bool:
        is_kept = is_guarded(store, keys.get(call), owner)
        relied.keys.update([keys[call]] if is_kept else ())
        return is_kept

    for event in history[seq:]:
        kind, body = event.kind, event.body
        if kind == "step_started" and body.compensates:
            undoing[body.call] = body.compensates
        elif kind == "step_started":  # also a later attempt: what had failed may have been retried
            if body.effect != "read" and body.because != KEPT:
                begun[body.call] = event.step
                keys |= {body.call: body.key} if body.key else {}
        elif kind == "key_taken":
            keys[body.call] = body.key
        elif kind == "step_completed" and body.call in begun:
            step = begun.pop(body.call)
            if not (body.skipped or body.fallback or is_shared(body.call, run)):
                place = len(done) + 1_000_000 if body.call in done else body.call
                done[place] = Crossed(run, step, event.seq, FORGOTTEN if body.call in keys else "")
        elif kind == "step_shared" and body.call in keys and not is_shared(body.call, body.run):
            done[body.call] = Crossed(run, event.step, event.seq, FORGOTTEN)
        elif kind == "step_completed" and body.call in undoing and not body.skipped:
            done.pop(undoing[body.call], None)
        elif kind == "step_failed":
            begun.pop(body.call, None)
        elif kind == "child_started":
            children[body.call] = event
        elif kind == "child_ended" and body.status == "refused":
            children.pop(body.call, None)
    by_children = [one for child in children.values() for one in _done_by_child(store, run, child, relied)]
    return [*done.values(), *by_children, *(Crossed(run, step, 0) for call, step in begun.items() if call not in keys)]


def _done_by_child(store: Store, run: str, started: Recorded, relied: Relied) -> list[Crossed]:
    child: str = started.body.run
    histories, lost = histories_of_child(store, started)
    is_own = child.startswith(f"{run[:170]}.")
    if lost == DELETED or (lost and is_own):
        return [Crossed(child, lost, 0)]
    if not is_own:
        relied.runs.add(child)
        return []
    return [one for history in histories for one in done_after(store, child, history, 0, relied)]


def undone_before(run: str, generation: int, seq: int, histories: Sequence[Sequence[Recorded]]) -> list[Crossed]:
    """Return the effects up to an event that the run has undone since, or is undoing: a fork would build upon them.

    histories: that of this generation, and those of later ones.
    """
    done = {
        event.body.call: event.step for event in histories[0][:seq] if event.kind == "step_started" and event.body.call
    }
    if (carried := histories[0][0].body.carried) is not None:
        done |= {one.call: one.title for one in carried.undoable}
    found = []
    for place, history in enumerate(histories):
        for event in history:
            for call in event.body.steps if event.kind == "compensation_started" else ():
                own = call
                if place and call < 0:
                    older = carried_step(history[0].body.carried, call)
                    own = older.own_call if older is not None and older.generation == generation else 0
                elif place:
                    continue
                if own in done:
                    found.append(Crossed(run, f"{done[own]}, which was undone since", event.seq))
    return found


def is_lost(histories: Sequence[Sequence[Recorded]]) -> bool:
    """Tell whether a part of a run's history is lost, so that nobody knows what it did."""
    for history in histories:
        started = history[0].body
        if started.unseen or (started.carried is not None and started.carried.caution):
            return True
        for event in history:
            if event.kind == "run_restored" or (event.kind == "run_repaired" and event.body.lost):
                return True
    return False


def refuse_effects(
    run: str, at: int, generation: int, histories: Sequence[Sequence[Recorded]], store: Store, allowed: "Allowed"
) -> Relied:
    """Raise `CrossesOnce` with all that a fork would do again or build upon, unless it was allowed.

    Returns what keeps it from doing something again.
    """
    relied = Relied(set(), set())
    if allowed is True:
        return relied
    found = done_after(store, run, histories[0], at, relied)
    for later in histories[1:]:
        found += done_after(store, run, later, 0, relied)
    found += undone_before(run, generation, at, histories)
    newest = generation + len(histories) - 1
    if is_lost(histories) or may_lack(store, store.life(), run, newest, newest_note(histories[-1])):
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
