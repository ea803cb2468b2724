"""The books of one run with a budget: its accounts as the history has them, and as its code sees them.

What the code reads must be the same in every replay. Live, outcomes are recorded before the code sees them, and what
happens to other steps is recorded meanwhile; so the code's view takes each event only when the code has come to it, in
the order of the log. What the code does by itself it sees at once.
"""

from collections import deque
from collections.abc import Container
from contextvars import ContextVar
from typing import Any, Final

from everstep.engine.history import Recorded
from everstep.engine.workflow import Workflow
from everstep.errors import Misuse
from everstep.model.accounts import accounts_of
from everstep.model.budgets import MEASURES, SHOWN_AS, Charge, Left, Limits, limits_of
from everstep.model.events import ENDS

PART: ContextVar[int] = ContextVar("everstep_budget", default=0)
"""The part of the run's budget in which workflow code is: the call that opened it, or 0."""

OWN: Final = frozenset({"charged", "budget_narrowed"})
"""Events that record what the code did by itself: its view has that already."""


class Books:
    """The accounts of one run, for its driver (`head`) and for its code (`view`)."""

    def __init__(self, started: Any, at: int) -> None:
        self.head = accounts_of(started, at)
        self.view = accounts_of(started, at)
        self._parts: dict[int, int] = {}
        self._takers: dict[tuple[int, str], int] = {}
        self._unseen: deque[tuple[int, str, str, Any, int]] = deque()

    # -- events ----------------------------------------------------------------------------------------------------
    def replay(self, event: Recorded, *, is_void: bool) -> None:
        """Take an event of the history. What no longer counts for the code was used nevertheless."""
        _, kind, step, at, body = event
        self.head.take(kind, step, body, at)
        if is_void or kind not in OWN:
            self.view.take(kind, step, body, at)

    def record(self, seq: int, kind: str, step: str, body: Any, at: int) -> None:
        """Take an event that was recorded just now. The code has not come to it yet.

        An end changes no sum, and may be taken back when a cancel came first.
        """
        if kind in ENDS:
            return
        self.head.take(kind, step, body, at)
        if kind not in OWN:
            self._unseen.append((seq, kind, step, body, at))

    def show(self, seq: int) -> None:
        """The code comes to an outcome: its view takes everything up to that."""
        unseen = self._unseen
        while unseen and unseen[0][0] <= seq:
            _, kind, step, body, at = unseen.popleft()
            self.view.take(kind, step, body, at)

    # -- what the code does ----------------------------------------------------------------------------------------
    def enter(self, call: int) -> None:
        """The code asks for a step or child: it belongs to the part in which the code is."""
        part = PART.get()
        if part:
            self._parts[call] = part

    def part_of(self, call: int) -> int:
        """Return the part that a call belongs to."""
        return self._parts.get(call, 0)

    def charge(self, charge: Charge) -> int:
        """The code was charged. Returns the part that it is in."""
        self.view.charge(PART.get(), "", charge)
        return PART.get()

    def narrow(self, call: int, limits: Limits, then: str | None, until: int | None) -> tuple[int, str]:
        """The code opens a part of its budget. Returns what that is a part of, and what happens when it is used up."""
        around = PART.get()
        then = then or self.view.parts[around].then
        self.view.open_part(call, limits, then, around, until)
        return around, then

    def left(self, part: int, now: int) -> Left:
        """Return what is left for the code."""
        return self.view.left(part, now)

    def enter_child(self, call: int, child: Workflow, others: Container[int]) -> None:
        """The code asks for a child. One without a limit of its own takes what is left: two at once cannot.

        others: the children that have not ended.
        """
        taken = self._taken_whole(child)
        for account, measure in taken:
            if self._takers.get((account, measure)) in others:
                raise Misuse(
                    f"Two child runs at once would both take what is left of the {SHOWN_AS[measure]} in the budget. "
                    f"Give each its part: `with everstep.budget({SHOWN_AS[measure]}=…):` around its start, or "
                    f"`budget=` on the workflow {child.name}."
                )
        self._takers |= dict.fromkeys(taken, call)
        self.enter(call)

    def _taken_whole(self, child: Workflow) -> list[tuple[int, str]]:
        """Return the accounts from which a child takes all that is left of a measure."""
        own = limits_of(child.budget) if child.budget is not None else Limits()
        taken = []
        for measure in MEASURES:
            limited = (n for n, one in self.view.chain(PART.get()) if getattr(one.limits, measure) is not None)
            account = next(limited, None)
            if account is not None and getattr(own, measure) is None:
                taken.append((account, measure))
        return taken
