"""The events that budgets add to a history."""

from everstep.model.budgets import Charge, Limits
from everstep.model.event_base import Body


class CallWithheld(Body):
    """The budget, or a named limit, has no room for a step or child that the code asked for: it is not begun.

    A step with `limit=` waits until a slot is free, and a `step_started` follows.

    For its budget it waits while work in progress may turn out cheaper than it was estimated. When nothing can make
    room, `then` says what the budget does: `fail` or `fallback`; with `hold` a `run_held` follows.
    """

    call: int
    instead_of: str
    """The event that would be here if there were room: `step_started` or `child_started`."""
    over: str
    """What is exhausted: `usd`, `tokens`, `steps` or `seconds`; `cost` if the estimate could not be made; or `limit`.
    """
    arguments: str = ""
    effect: str = ""
    workflow: str = ""
    run: str = ""
    preview: str = ""
    source: str = ""
    attempt: int = 0
    """How many attempts had begun before."""
    again: bool = False
    """Whether the call is in the history already."""
    part: int = 0
    then: str = ""
    key: str = ""
    """With `key=`: the step's key. The step does not have it yet."""
    secret: bool = False
    limit: str = ""
    """The named limit whose slot it waits for."""


class Charged(Body):
    """Workflow code called `everstep.charge` outside of a step."""

    call: int
    charged: Charge
    part: int = 0
    source: str = ""


class AttemptCharged(Body):
    """What a body was charged since it began, or since the last such event, where its outcome does not say it (yet).

    It is written when the charges are more than the step's estimate, and when a body is cut off.
    """

    call: int
    attempt: int
    charged: Charge
    beside: bool = False
    """True for charges that are added to those of the attempt: from a probe, or from a body that the run no longer
    waits for.
    """
    part: int = 0


class BudgetNarrowed(Body):
    """Workflow code opened a part of its budget: work that begins inside may use this much of it."""

    call: int
    limits: Limits
    then: str = "hold"
    part: int = 0
    """The part that this one is a part of."""
    until: int | None = None
    source: str = ""
