"""What a retry would go back over: effects that must not happen twice, and did happen after the failure.

A retry goes back to what failed. What the code did after that no longer counts, and is asked for again if the code
comes there again. A `once` step among it has happened all the same. So a retry over one is refused, unless somebody
allows it; then its outcome is kept, and given to the next call of the same step with the same arguments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from everstep.engine.history import Recorded, load_verified
from everstep.errors import CrossesOnce, Damaged
from everstep.model import events as ev
from everstep.model.contracts import KEPT, may_run_again
from everstep.stores.protocol import Store


class Crossed(NamedTuple):
    """An effect that a retry would go back over. `seq` is its outcome's event; 0 if nobody knows how it ended."""

    run: str
    step: str
    seq: int


def crossed_by(store: Store, run: str, history: Sequence[Recorded], voids: int) -> list[Crossed]:
    """Return the effects that happened, or may have, in what no longer counts from the event `voids` on.

    Not those that a compensation has undone: they may happen again.
    """
    begun: dict[int, str] = {}
    undoing: dict[int, int] = {}
    done: dict[int, Crossed] = {}
    children: list[Crossed] = []
    for event in history[voids - 1 :]:
        kind, body = event.kind, event.body
        if kind == "step_started" and body.compensates:
            undoing[body.call] = body.compensates
        elif kind == "step_started" and body.attempt == 1 and _must_be_kept(body):
            begun[body.call] = event.step
        elif kind == "step_completed" and body.call in begun:
            step = begun.pop(body.call)
            if not (body.skipped or body.fallback):  # else it has not happened
                done[body.call] = Crossed(run, step, event.seq)
        elif kind == "step_completed" and body.call in undoing and not body.skipped:
            done.pop(undoing[body.call], None)
        elif kind == "step_failed":  # it has certainly not happened, or failed for good
            begun.pop(body.call, None)
        elif kind == "child_started":
            children += _done_by(store, body.run)
    return [*done.values(), *children, *(Crossed(run, step, 0) for step in begun.values())]


def _must_be_kept(body: ev.StepStarted) -> bool:
    """Tell whether a begun step must not happen twice. One with a key of its own is guarded by that."""
    return body.because != KEPT and not body.key and not may_run_again(body.effect)  # type: ignore[arg-type]


def _done_by(store: Store, child: str) -> list[Crossed]:
    """Return the effects of a child run, and of its own children."""
    row = store.run(child)
    if row is None:
        return []
    try:
        return crossed_by(store, child, load_verified(store, row), 1)
    except Damaged:
        return [Crossed(child, "what its damaged history does not say", 0)]


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
    return f"{one.step}{whose} (event {one.seq or '?'})"


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
        if event.kind == "step_started" and event.body.attempt == 1:
            started[event.body.call] = event
        elif event.seq in wanted:
            begun, body = started[event.body.call], event.body
            found.append(KeptOutcome(retried.seq, _name(begun.step), begun.body.arguments, body.value, body.ref))
    return found
