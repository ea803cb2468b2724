"""Charging: code reports what it has used."""

from decimal import Decimal

from everstep.effects.surroundings import CURRENT
from everstep.errors import Misuse
from everstep.model.budgets import checked_count, nanodollars


def charge(*, usd: float | Decimal | None = None, tokens: int | None = None) -> None:
    """Count what was really used, in the body of a step (on any thread that has its context) or in workflow code.

    In a body, the sum of what it was charged takes the place of the step's estimate (`cost=`) and is durable together
    with the step's outcome. What is not charged stays as estimated; `charge(usd=0)` says that it cost nothing.
    """
    current = CURRENT.get()
    if current is None:
        raise Misuse("everstep.charge() is for code inside a run; it was called outside of one.")
    nanos = None if usd is None else nanodollars(usd)
    count = checked_count(tokens, "tokens")
    if nanos is None and count is None:
        raise Misuse("everstep.charge() needs an amount: usd=, tokens=, or both.")
    current.take_charge(nanos, count)
