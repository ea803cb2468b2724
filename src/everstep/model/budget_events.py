"""The events that budgets add to a history."""

from everstep.model.budgets import Charge, Limits
from everstep.model.event_base import Body


class CallWithheld(Body):
    """The budget, or a named limit, has no room for a step or child that the code asked for: it is not begun.

    A step with `limit=` waits until there is a slot, and a `step_started` follows.

    For its budget it waits while something under way may turn out cheaper than it was estimated. When nothing can make
    room, `then` says what the budget does: `fail` or `fallback`; with `hold` a `run_held` follows.
    """

    call: int
    instead_of: str
    """The event that would stand here: `step_started` or `child_started`."""
    over: str
    """What there is not enough of: `usd`, `tokens`, `steps` or `seconds`; `cost` if its estimate could not be made; or
    `limit`."""
    arguments: str = ""
    effect: str = ""
    workflow: str = ""
    run: str = ""
    preview: str = ""
    source: str = ""
    attempt: int = 0
    """How many attempts were begun before."""
    again: bool = False
    """Whether the call is in the history already."""
    part: int = 0
    then: str = ""
    key: str = ""
    """With `key=`: the step's key, which is not its own yet."""
    secret: bool = False
    limit: str = ""
    """The named limit whose slot it waits for."""


class Charged(Body):
    """Workflow code was charged by itself."""

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
    """Whether it is added to the attempt's own charge: from a probe, or a body for which the run no longer waits."""
    part: int = 0


class BudgetNarrowed(Body):
    """Workflow code opened a part of its budget: work that begins within may use this much of it."""

    call: int
    limits: Limits
    then: str = "hold"
    part: int = 0
    """The part that this one is a part of."""
    until: int | None = None
    source: str = ""
