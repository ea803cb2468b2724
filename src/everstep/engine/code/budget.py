"""The accounts of a run with a budget: one as of the newest event, and one as of what its code has seen.

What the code reads must be the same in every replay. Live, outcomes are recorded before the code sees them, and events
of other steps are recorded meanwhile; so the code's view applies each event only when the code has reached it, in the
order of the log. What the code does by itself it sees at once.
"""

from collections import deque
from collections.abc import Callable, Container
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from everstep.engine.code.commands import Command
from everstep.engine.code.workflow import Workflow
from everstep.engine.history.verify import Recorded
from everstep.errors import Misuse
from everstep.model import events as ev
from everstep.model.accounts import ROOT, Accounts, accounts_of, copied
from everstep.model.budgets import MEASURES, SHOWN_AS, Charge, Left, Limits, limits_of, microdollars
from everstep.model.events import ENDS


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


PART: ContextVar[int] = ContextVar("everstep_budget", default=0)
"""The part of the run's budget in which workflow code is: the call that opened it, or 0."""

OWN: Final = frozenset({"charged", "budget_narrowed"})
"""Events that record what the code did by itself, which its view already includes."""


class KeptBooks(msgspec.Struct, omit_defaults=True):
    """The part of a checkpoint about the accounts."""

    view: Accounts
    """The view of the code when it asked for the checkpoint."""
    head: Accounts | None = None
    """The state of the history when it was recorded."""


class Books:
    """The accounts of one run, for its driver (`head`) and for its code (`view`)."""

    def __init__(self, started: Any, at: int) -> None:
        self.head = accounts_of(started, at)
        self.view = accounts_of(started, at)
        self._parts: dict[int, int] = {}
        self._takers: dict[tuple[int, str], int] = {}
        self._unseen: deque[tuple[int, str, str, Any, int]] = deque()
        self.is_ahead = False
        """Whether the accounts are those of a checkpoint that the replay has not reached yet."""
        self._redone: list[Callable[[Accounts], None]] = []
        """What the code did by itself after a jump, until the replay reaches the checkpoint's event."""
        self._lasting: frozenset[int] | None = None
        """The parts that were open, or had been, at the first checkpoint. The code may still know them after a jump."""
        self._place = ROOT
        """The part in which the code was at the first checkpoint."""

    # -- events ----------------------------------------------------------------------------------------------------
    def replay(self, event: Recorded, *, is_void: bool) -> None:
        """Apply an event of the history. Voided events were used nevertheless."""
        _, kind, step, at, body = event
        self.head.take(kind, step, body, at)
        if is_void or kind not in OWN:
            self.view.take(kind, step, body, at)

    def record(self, seq: int, kind: str, step: str, body: Any, at: int) -> None:
        """Apply an event that was recorded just now. The code has not reached it yet.

        An end changes no sum, and may be taken back when a cancel came first.
        """
        if kind in ENDS:
            return
        self.head.take(kind, step, body, at)
        if kind not in OWN:
            self._unseen.append((seq, kind, step, body, at))

    def show(self, seq: int) -> None:
        """Advance the view of the code to this event."""
        unseen = self._unseen
        while unseen and unseen[0][0] <= seq:
            _, kind, step, body, at = unseen.popleft()
            self.view.take(kind, step, body, at)

    # -- what the code does ----------------------------------------------------------------------------------------
    def enter(self, call: int) -> None:
        """Note the part that a requested step or child belongs to: the one in which the code is."""
        part = PART.get()
        if part:
            self._parts[call] = part

    def part_of(self, call: int) -> int:
        """Return the part that a call belongs to."""
        return self._parts.get(call, 0)

    def charge(self, charge: Charge) -> int:
        """Charge the code. Returns the part that it is in."""
        part = PART.get()
        self._do(lambda view: view.charge(part, "", charge))
        return part

    def narrow(self, call: int, limits: Limits, then: str | None, until: int | None) -> tuple[int, str]:
        """Open a part of the budget. Returns the part around it, and what happens when it is used up."""
        around = PART.get()
        then = then or self.view.parts[around].then
        self._do(lambda view: view.open_part(call, limits, then, around, until))
        return around, then

    def _do(self, action: Callable[[Accounts], None]) -> None:
        action(self.view)
        if self.is_ahead:
            self._redone.append(action)

    def left(self, part: int, now: int) -> Left:
        """Return what is left for the code."""
        return self.view.left(part, now)

    def enter_child(self, call: int, child: Workflow, others: Container[int]) -> None:
        """Check a request for a child. One without a limit takes all that is left, so two at once cannot.

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

    # -- keys of steps ---------------------------------------------------------------------------------------------
    def take_back(self, seq: int, call: int, cost: Charge | None) -> None:
        """Release the reservation of a step that did not begin, because another step has its key.

        The code has not reached that event, because no outcome is shown before it is durable.
        """
        self.head.take_back(call, cost)
        self._unseen = deque(one for one in self._unseen if one[0] != seq)

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def come_to_checkpoint(self) -> bool:
        """Note a checkpoint. Returns True if the code is in the same part of its budget as at the first one."""
        if self._lasting is None:
            self._lasting, self._place = frozenset(self.view.parts), PART.get()
        return PART.get() == self._place

    def kept(self) -> KeptBooks:
        """Return the code's view for a checkpoint. The head is added when it is recorded."""
        return KeptBooks(self._trimmed(self.view))

    def kept_head(self) -> Accounts:
        """Return the head for a checkpoint that is recorded now.

        Parts that the code opened and left since its first checkpoint are not kept, or a long loop would pile them up.
        If a body of one of them still runs, it counts for the part around it from now on.
        """
        lasting = self._lasting or frozenset({ROOT})
        for call, part in self._parts.items():
            if part in self.head.parts:  # otherwise the code has opened it since it asked for the checkpoint
                self._parts[call] = next(number for number, _ in self.head.chain(part) if number in lasting)
        return self._trimmed(self.head)

    def _trimmed(self, accounts: Accounts) -> Accounts:
        lasting = self._lasting or frozenset({ROOT})
        parts = {number: account for number, account in accounts.parts.items() if number in lasting}
        children = {run: child for run, child in accounts.children.items() if child.is_open}
        return copied(msgspec.structs.replace(accounts, parts=parts, children=children))

    def go_on_from(self, kept: KeptBooks) -> None:
        """Continue from a checkpoint; the replay reaches its event a little later."""
        self.view, self.head = kept.view, kept.head or kept.view
        self.is_ahead = True
        self._parts, self._takers = {}, {}

    def land(self) -> None:
        """Merge when the replay reaches the checkpoint: the code sees everything recorded before, and what it did
        since.
        """
        self.is_ahead = False
        self.view = copied(self.head)
        for action in self._redone:
            action(self.view)
        self._redone = []


def charge_usage(books: Books | None, call: int, nanos: int | None, tokens: int | None, source: str) -> ChargeUsage:
    """Return the command with which workflow code is charged, and apply it."""
    charge = Charge(None if nanos is None else microdollars(nanos), tokens)
    return ChargeUsage(call, charge, books.charge(charge) if books is not None else ROOT, source)
