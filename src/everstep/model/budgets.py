"""Budgets: how much a run, and the tree of runs below it, may use. Amounts are whole numbers: their sums are exact."""

import operator
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple

import msgspec

from everstep.errors import Misuse
from everstep.model.durations import Duration, seconds_in
from everstep.model.options import checked_choice, refused
from everstep.model.untrusted import attempted, is_a

Then = Literal["hold", "fail", "fallback"]
"""What happens to a step for which there is no room."""
THENS: Final = ("hold", "fail", "fallback")

NANO: Final = 1_000_000_000
NANOS_IN_A_MICRO: Final = 1000
MICRO: Final = 1_000_000

MEASURES: Final = ("microdollars", "tokens", "steps")
"""What is counted, as the fields of `Amounts` and `Limits`. Time is not counted: it passes."""
SHOWN_AS: Final = {"microdollars": "usd", "tokens": "tokens", "steps": "steps", "seconds": "seconds"}
"""A measure as users name it."""


class Charge(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """What a step is estimated to use, or was charged. None means that no figure was given, so an estimate stays."""

    microdollars: int | None = None
    """Millionths of a US dollar."""
    tokens: int | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether all its amounts are zero."""
        return not (self.microdollars or self.tokens)


class Amounts(msgspec.Struct, omit_defaults=True, gc=False):
    """What was used, or is reserved."""

    microdollars: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, other: "Amounts", sign: int = 1) -> None:
        """Add other amounts to these, or with the sign -1 take them away."""
        self.microdollars += sign * other.microdollars
        self.tokens += sign * other.tokens
        self.steps += sign * other.steps

    def at_least(self, other: "Amounts") -> "Amounts":
        """Return the larger one, measure by measure."""
        return Amounts(
            max(self.microdollars, other.microdollars), max(self.tokens, other.tokens), max(self.steps, other.steps)
        )

    def __bool__(self) -> bool:
        return bool(self.microdollars or self.tokens or self.steps)


class Limits(msgspec.Struct, omit_defaults=True, gc=False):
    """The maximum amounts that may be used. None: no limit. `seconds` is time since the run's start."""

    microdollars: int | None = None
    tokens: int | None = None
    steps: int | None = None
    seconds: float | None = None


class Allotment(Limits):
    """The budget that a run was given at its start."""

    then: str = "hold"
    again: Limits | None = None
    """What one grant by a person adds; None adds the same amounts again."""
    by: str = ""
    """The parent that allotted it from its own budget and receives what was used."""


class Standing(msgspec.Struct, gc=False):
    """The state of a budget: what the run's row says about it, and what a parent receives at the end.

    All fields are always written, so that equal states have equal bytes: a row is compared with its history that way.
    """

    used: Amounts
    reserved: Amounts
    """Reserved for steps in progress and for children that have not ended."""
    limits: Limits
    then: str = "hold"
    until: int | None = None
    """When its time is over, in microseconds since 1970."""
    granted: Amounts = msgspec.field(default_factory=Amounts)
    """What people have granted beyond what the run had at its start."""
    by: str = ""


class Left(NamedTuple):
    """Amounts as workflow code reads them. None: there is no limit."""

    usd: float | None
    tokens: int | None
    steps: int | None
    seconds: float | None


class Budget(msgspec.Struct, frozen=True):
    """How much a run may use, together with the tree of child runs below it. What is left out has no limit.

    usd: US dollars.
    tokens: tokens of language models, or whatever else you count.
    steps: attempts at steps; another attempt counts again.
    seconds: time since the run's start, waiting included: `3600`, `"1h"` or a `timedelta`.
    then: what happens to a step for which there is no room: `"hold"` the run for a person (default), `"fail"` it with
        `BudgetExceeded`, or take its `"fallback"`; a step without one holds the run.
    """

    usd: float | Decimal | None = None
    tokens: int | None = None
    steps: int | None = None
    seconds: Duration | None = None
    then: Then = "hold"

    def __post_init__(self) -> None:
        limits_of(self)
        checked_choice("then", self.then, THENS)


def limits_of(budget: Budget) -> Limits:
    """Return a budget's limits in whole numbers."""
    usd = None if budget.usd is None else nanodollars(budget.usd) // NANOS_IN_A_MICRO
    seconds = None if budget.seconds is None else _checked_seconds(budget.seconds)
    return Limits(usd, checked_count(budget.tokens, "tokens"), checked_count(budget.steps, "steps"), seconds)


def allotment_of(budget: Budget | None) -> Allotment | None:
    """Return what a run of a workflow with this budget is given at its start."""
    if budget is None:
        return None
    limits = limits_of(budget)
    return Allotment(limits.microdollars, limits.tokens, limits.steps, limits.seconds, budget.then)


def nanodollars(usd: Any) -> int:
    """Return billionths of a dollar. A fraction of one is noise of floating point, and is rounded away."""
    if is_a(usd, bool) or not is_a(usd, int, float, Decimal):
        raise refused("usd", usd, "it is a number of US dollars, such as usd=1.5")
    value = usd if is_a(usd, Decimal) else attempted(lambda: Decimal(str(usd)), default=Decimal("NaN"))
    if not value.is_finite() or value < 0 or value > 10**12:
        raise refused("usd", usd, "it is a number of US dollars, not below 0, such as usd=1.5")
    return int((value * NANO).to_integral_value())


def microdollars(nanos: int) -> int:
    """Return millionths of a dollar, rounded up: what is used is never counted as less."""
    return -(-nanos // NANOS_IN_A_MICRO)


def checked_count(value: Any, what: str) -> int | None:
    """Return a whole number that is not below zero, or None."""
    if value is None:
        return None
    count: int = attempted(operator.index, value, default=-1)
    if is_a(value, bool) or not 0 <= count < 1 << 62:
        raise refused(what, value, "it is a whole number, not below 0")
    return count


def _checked_seconds(seconds: Any) -> float:
    number = seconds_in(seconds)
    if number is None or not 0 < number < 1e12:
        raise refused("seconds", seconds, 'it is a number of seconds above 0, a text such as "1h" or a timedelta')
    return float(number)


def estimate_from(cost: Any, step: str) -> Charge:
    """Return what a step's `cost=`, or the function given there, says."""
    if attempted(lambda: isinstance(cost, Mapping) and set(cost) <= {"usd", "tokens"}) is not True:
        raise Misuse(
            f"cost= of {step}: it is like {{'usd': 0.02, 'tokens': 900}}, or a function of the step's arguments that "
            "returns that; {} says that the step uses nothing."
        )
    usd = None if cost.get("usd") is None else microdollars(nanodollars(cost["usd"]))
    return Charge(usd, checked_count(cost.get("tokens"), "tokens"))


def shown(measure: str, amount: float) -> float:
    """Return an amount of a measure as users see it."""
    return amount / MICRO if measure == "microdollars" else amount
