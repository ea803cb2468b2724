"""What a run takes with it into a fresh history, when its code says `continue_as`."""

import msgspec

from everstep.model.accounts import Accounts
from everstep.model.digests import compensation_entropy
from everstep.model.event_base import NO_PAYLOAD


class CarriedStep(msgspec.Struct, omit_defaults=True):
    """A step of an older generation that completed, and what is needed to undo it."""

    call: int
    """Its number in this generation's `compensation_started`, below zero. The last step that completed is -1."""
    step: str
    generation: int
    """The generation that ran the step; `own_call` is the step's call there."""
    own_call: int
    effect: str
    compensate: str
    """The name of its compensation."""
    entropy: str
    """The entropy from which the key of its compensation derives, whichever generation compensates it."""
    where: str
    """The module and the qualified name of its function. They tell apart declared steps of the same name."""
    whole: msgspec.Raw = NO_PAYLOAD
    whole_ref: str = ""
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    key: str = ""
    """Its own key (`key=`), if it has one."""
    secret: bool = False

    @property
    def title(self) -> str:
        """Its name, as people see it."""
        return f"{self.step} of generation {self.generation}"


class Carried(msgspec.Struct, omit_defaults=True):
    """All that a new generation keeps of the one before it. It is part of the new `run_started`."""

    head: str
    """The digest of the `run_continued` that ended the previous generation. It links the two histories into one chain.
    """
    created_at: int
    """When the run itself was started."""
    clock_started: int
    """When the run's timeout began to count."""
    signals: list[tuple[str, int, msgspec.Raw]] = []
    """Signals that have arrived and were not received yet: name, number, value."""
    requests: list[tuple[str, int, str, msgspec.Raw]] = []
    """Requests that have arrived and that the code has not taken: name, number, id, value."""
    facts: dict[str, msgspec.Raw] = {}
    """What the run remembers of the outside, by subject."""
    published: dict[str, msgspec.Raw] = {}
    accounts: Accounts | None = None
    """What the run has used, if it has a budget."""
    caution: str = ""
    """Why steps that must not happen twice need a confirmation: a part of the history is lost."""
    unseen_workers: list[str] = []
    uncompensated: list[str] = []
    """Some of the steps that must not happen twice and have no compensation."""
    undoable: list[CarriedStep] = []
    """Completed steps with a compensation, in the order in which they completed."""


def carried_step(carried: Carried | None, call: int) -> CarriedStep | None:
    """Return the step of an older generation that has this number in the newest one."""
    return next((one for one in carried.undoable if one.call == call), None) if carried is not None else None


def undoing_entropy(carried: Carried | None, entropy: str, call: int) -> str:
    """Return the entropy for the key of a call's compensation; calls below zero are those that were carried over."""
    one = carried_step(carried, call) if call < 0 else None
    return compensation_entropy(entropy, call) if one is None else one.entropy
