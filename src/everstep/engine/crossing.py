"""What a retry would go back over: effects that must not happen twice, and did happen after the failure.

A retry goes back to what failed. What the code did after that no longer counts, and is asked for again if the code
comes there again. A `once` step among it has happened all the same. So a retry over one is refused, unless somebody
allows it; then its outcome is kept, and given to the next call of the same step with the same arguments.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from everstep.engine.history import Recorded, load_generations, read_now, refuse_deleted
from everstep.errors import CrossesOnce, Damaged, UnknownRun
from everstep.model import events as ev
from everstep.model.contracts import KEPT, may_run_again
from everstep.stores.protocol import Store

CLOCKS_APART: Final = 60_000_000
"""A child may have begun this much later than its parent says, because another machine's clock was ahead."""
DELETED: Final = "what its deleted history does not say"
DAMAGED: Final = "what its damaged history does not say"
FORGOTTEN: Final = "its key was forgotten"


class Crossed(NamedTuple):
    """An effect that a retry would go back over. `seq` is its outcome's event; 0 if nobody knows how it ended."""

    run: str
    step: str
    seq: int
    why: str = ""
    """Why it counts although it has a key of its own, which guards it as long as it is kept."""


def crossed_by(store: Store, run: str, history: Sequence[Recorded], voids: int, relied: set[str]) -> list[Crossed]:
    """Return the effects that happened, or may have, in what no longer counts from the event `voids` on.

    Not those that a compensation has undone: they may happen again. Nor those whose key is kept, which `relied` gets.
    """
    begun: dict[int, str] = {}
    keys: dict[int, str] = {}
    undoing: dict[int, int] = {}
    done: dict[int, Crossed] = {}
    children: dict[int, Recorded] = {}

    def is_kept(call: int, owner: str) -> bool:
        is_guarding = is_guarded(store, keys.get(call), owner)
        relied.update([keys[call]] if is_guarding else ())
        return is_guarding

    for event in history[voids - 1 :]:
        kind, body = event.kind, event.body
        if kind == "step_started" and body.compensates:
            undoing[body.call] = body.compensates
        elif kind == "step_started" and body.attempt == 1 and _must_be_kept(body):
            begun[body.call] = event.step
            keys |= {body.call: body.key} if body.key else {}
        elif kind == "key_taken" and not may_run_again(body.effect):
            keys[body.call] = body.key
        elif kind == "step_completed" and body.call in begun:
            step = begun.pop(body.call)
            if not (body.skipped or body.fallback or is_kept(body.call, run)):
                done[body.call] = Crossed(run, step, event.seq, FORGOTTEN if body.call in keys else "")
        elif kind == "step_shared" and body.call in keys and not is_kept(body.call, body.run):
            done[body.call] = Crossed(run, event.step, event.seq, FORGOTTEN)
        elif kind == "step_completed" and body.call in undoing and not body.skipped:
            done.pop(undoing[body.call], None)
        elif kind == "step_failed":  # it has certainly not happened, or failed for good
            begun.pop(body.call, None)
        elif kind == "child_started":
            children[body.call] = event
        elif kind == "child_ended" and body.status == "refused":  # its id belonged to another run
            children.pop(body.call, None)
    unknown = [Crossed(run, step, 0) for call, step in begun.items() if call not in keys]
    return [*done.values(), *(one for child in children.values() for one in _done_by(store, child, relied)), *unknown]


def _must_be_kept(body: ev.StepStarted) -> bool:
    """Tell whether a begun step must not happen twice."""
    return body.because != KEPT and not may_run_again(body.effect)  # type: ignore[arg-type]


def is_guarded(store: Store, key: str | None, owner: str) -> bool:
    """Tell whether a step that has happened is kept from happening again by its key: whoever asks for it shares it.

    Not if the key was forgotten. Nor if it is free, unless the run that did it then freed it: it was forgotten, and
    what another one did under it since was undone.
    """
    row = store.effect(key) if key else None
    return row is not None and (row.state != "free" or row.run == owner)


def histories_of_child(store: Store, started: Recorded) -> tuple[list[list[Recorded]], str]:
    """Return the histories of a child that a run has started, of all its generations; or else why they do not tell.

    A child that is not there is not one that never was. Nor is a run that has got its id since then.
    """
    row = store.run(started.body.run)
    if row is None:
        return [], DELETED
    try:
        refuse_deleted(store, row)
        histories = read_now(store, row, lambda now: load_generations(store, now))[1]
    except UnknownRun:  # also one that is being deleted
        return [], DELETED
    except Damaged:
        return [], DAMAGED
    return ([], DELETED) if histories[0][0].at > started.at + CLOCKS_APART else (histories, "")


def _done_by(store: Store, started: Recorded, relied: set[str]) -> list[Crossed]:
    """Return the effects of a child run, and of its own children."""
    child: str = started.body.run
    histories, lost = histories_of_child(store, started)
    if lost:
        return [Crossed(child, lost, 0)]
    return [one for history in histories for one in crossed_by(store, child, history, 1, relied)]


def lost_child(store: Store, history: Sequence[Recorded], child: str) -> list[Crossed]:
    """Return a child whose failure is to be retried, if it is not there any more: a retry would start it anew."""
    started = [event for event in history if event.kind == "child_started" and event.body.run == child]
    if not started or histories_of_child(store, started[-1])[1] != DELETED:
        return []
    return [Crossed(child, DELETED, 0)]


def refuse_crossing(run: str, crossed: Sequence[Crossed], *, across_once: bool) -> None:
    """Raise `CrossesOnce`, unless it was allowed and every effect has a known end."""
    unknown = [one for one in crossed if not one.seq and one.run == run]
    if not crossed or (across_once and not unknown):
        return
    listed = ", ".join(_text(one, run) for one in crossed)
    advice = "How it ended is not known, so it cannot be allowed; `everstep show` says more."
    if not unknown:
        advice = (
            "If that is right, `everstep retry --across-once` (across_once=True) goes on: outcomes of the run's own "
            "steps are kept and not done again, child runs are started anew."
        )
    what = f"A retry of {run} would go back over effects that must not happen twice"
    raise CrossesOnce(f"{what}: {listed}. {advice}", crossed)


def _text(one: Crossed, run: str) -> str:
    whose = f" of {one.run}" if one.run != run else ""
    why = f", {one.why}" if one.why else ""
    return f"{one.step}{whose} (event {one.seq or '?'}{why})"


class KeptOutcome(msgspec.Struct, omit_defaults=True):
    """The outcome of an effect that a retry went back over. `retried` is the number of that retry's event."""

    retried: int
    step: str
    arguments: str
    value: msgspec.Raw = ev.NO_PAYLOAD
    ref: str = ""


class Kept:
    """Outcomes of effects that retries went back over, until the code asks for them again."""

    def __init__(self, outcomes: Sequence[KeptOutcome] = ()) -> None:
        self.outcomes = list(outcomes)

    def add(self, outcomes: Sequence[KeptOutcome]) -> None:
        """Keep outcomes."""
        self.outcomes += outcomes

    def take(self, step: str, arguments: str) -> KeptOutcome | None:
        """Return the first outcome of the same step with the same arguments, once."""
        for outcome in self.outcomes:
            if (outcome.step, outcome.arguments) == (_name(step), arguments):
                self.outcomes.remove(outcome)
                return outcome
        return None

    def forget_since(self, voids: int) -> None:
        """A later retry goes back over an earlier one as well, and keeps all that has happened since itself."""
        self.outcomes = [outcome for outcome in self.outcomes if outcome.retried < voids]


def _name(step: str) -> str:
    """Return a step's name without the number of its visit, which may be another one now."""
    return step.partition("#")[0]


def kept_by(events: Sequence[Recorded], retried: Recorded) -> list[KeptOutcome]:
    """Return the outcomes of the effects that a retry was allowed to go back over, from the events that it voids."""
    wanted = set(retried.body.crossed)
    started: dict[int, Recorded] = {}
    found = []
    for event in events:
        if event.kind == "key_taken" or (event.kind == "step_started" and event.body.attempt == 1):
            started[event.body.call] = event
        elif event.seq in wanted:
            begun, body = started[event.body.call], event.body
            found.append(KeptOutcome(retried.seq, _name(begun.step), begun.body.arguments, body.value, body.ref))
    return found
