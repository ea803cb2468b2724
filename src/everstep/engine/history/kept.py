"""Outcomes of effects that a retry went back over: identical calls get them when the code asks again."""

from collections.abc import Sequence

import msgspec

from everstep.engine.history.calls import Calls
from everstep.engine.history.verify import Recorded
from everstep.model import events as ev


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
        """Drop outcomes that a later retry goes back over as well: it keeps everything that has happened since
        itself.
        """
        self.outcomes = [outcome for outcome in self.outcomes if outcome.retried < voids]


def _name(step: str) -> str:
    """Return a step's name without the number of its visit, which may differ now."""
    return step.partition("#")[0]


def kept_by(events: Sequence[Recorded], retried: Recorded) -> list[KeptOutcome]:
    """Return the outcomes of the effects that a retry was allowed to go back over, from the events that it voids."""
    wanted = set(retried.body.crossed)
    crossed = [(call.outcome, call) for call in Calls(events).all if call.outcome and call.outcome.seq in wanted]
    return [
        KeptOutcome(retried.seq, _name(call.step), call.asked.body.arguments, end.body.value, end.body.ref)
        for end, call in sorted(crossed, key=lambda one: one[0].seq)
    ]
