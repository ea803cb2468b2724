"""What a run takes along into a fresh history, when its code says `continue_as`."""

import msgspec

from everstep.model.accounts import Accounts
from everstep.model.digests import compensation_entropy
from everstep.model.event_base import NO_PAYLOAD


class CarriedStep(msgspec.Struct, omit_defaults=True):
    """A step of an older generation that completed, and what is needed to undo it."""

    call: int
    """Below zero: what stands for it in this generation's `compensation_started`. The last that completed is -1."""
    step: str
    generation: int
    """The one that did it; `own_call` is its number there."""
    own_call: int
    effect: str
    compensate: str
    """The name of its compensation."""
    entropy: str
    """What the key of its compensation hangs on, in whichever generation that runs."""
    where: str
    """The module and the qualified name of its function: of several declared steps with its name this one is meant."""
    whole: msgspec.Raw = NO_PAYLOAD
    whole_ref: str = ""
    value: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    key: str = ""
    """Its own key (`key=`), if it has one."""
    secret: bool = False

    @property
    def title(self) -> str:
        """Its name, as persons are told of it."""
        return f"{self.step} of generation {self.generation}"


class Carried(msgspec.Struct, omit_defaults=True):
    """All that a new generation keeps of the one before it. It stands in the new one's `run_started`."""

    head: str
    """The digest of the `run_continued` that ended the generation before: so the two histories are one chain."""
    created_at: int
    """When the run itself was started."""
    clock_started: int
    """When its time began, for its timeout."""
    signals: list[tuple[str, int, msgspec.Raw]] = []
    """What has arrived and was not received yet: name, number, value."""
    requests: list[tuple[str, int, str, msgspec.Raw]] = []
    """Requests that have arrived and that the code has not taken: name, number, id, value."""
    facts: dict[str, msgspec.Raw] = {}
    """What the run remembers of the outside, by subject."""
    published: dict[str, msgspec.Raw] = {}
    accounts: Accounts | None = None
    """What it has used, if it has a budget."""
    caution: str = ""
    """Why steps that must not happen twice are asked about: a part of the history is lost."""
    unseen_workers: list[str] = []
    uncompensated: list[str] = []
    """Steps that must not happen twice and that nothing undoes; some of them."""
    undoable: list[CarriedStep] = []
    """Completed steps with a compensation, in the order in which they completed."""


def carried_step(carried: Carried | None, call: int) -> CarriedStep | None:
    """Return the step of an older generation that has this number in the newest one."""
    return next((one for one in carried.undoable if one.call == call), None) if carried is not None else None


def undoing_entropy(carried: Carried | None, entropy: str, call: int) -> str:
    """Return what the key of the compensation of a call hangs on; below zero it is one that was carried over."""
    one = carried_step(carried, call) if call < 0 else None
    return compensation_entropy(entropy, call) if one is None else one.entropy
