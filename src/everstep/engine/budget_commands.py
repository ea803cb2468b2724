"""What workflow code does to its budget, as commands: it is charged, or narrows it for a block."""

from everstep.engine.commands import Command
from everstep.model import events as ev
from everstep.model.budgets import Charge, Limits


class ChargeUsage(Command):
    """A `charge` by workflow code itself."""

    kind = "charged"
    __slots__ = ("call", "charge", "part", "source")

    def __init__(self, call: int, charge: Charge, part: int, source: str) -> None:
        self.call = call
        self.charge = charge
        self.part = part
        self.source = source

    def body(self) -> ev.Charged:
        return ev.Charged(self.call, self.charge, self.part, self.source)

    def text(self) -> str:
        return "charge"

    def compare(self, recorded: ev.Charged) -> tuple[str, bool]:
        return ("", False) if recorded.charged == self.charge else ("amount", False)


class NarrowBudget(Command):
    """A `budget` with limits of its own."""

    kind = "budget_narrowed"
    __slots__ = ("call", "limits", "part", "source", "then", "until")

    def __init__(self, call: int, limits: Limits, then: str, part: int, until: int | None, source: str) -> None:
        self.call = call
        self.limits = limits
        self.then = then
        self.part = part
        self.until = until
        self.source = source

    def body(self) -> ev.BudgetNarrowed:
        return ev.BudgetNarrowed(self.call, self.limits, self.then, self.part, self.until, self.source)

    def text(self) -> str:
        return "narrow the budget"

    def compare(self, recorded: ev.BudgetNarrowed) -> tuple[str, bool]:
        same = recorded.limits == self.limits and recorded.then == self.then
        return ("", False) if same else ("budget", False)
