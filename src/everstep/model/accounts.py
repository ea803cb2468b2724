"""What a run has used of its budget, computed in one pass over its events and without its code. Pure.

    step_started      reserves the step's estimate and counts an attempt; one that a crash cut off stays charged, and
                      one whose outcome was kept when the run was retried is not counted again
    step_completed, step_failed, attempt_failed     replace the estimate by what the body was charged, if it said so
    attempt_charged   what a body was charged so far, where that is more than its estimate
    charged           what workflow code was charged by itself
    child_started     reserves the child's allotment; child_ended replaces it by what the child used
    budget_narrowed   opens a part: what is used in it counts there, and in all that it is a part of
    run_resolved      may grant more

A retry refunds nothing: what was used before a failure stays used, whether or not its outcome still counts.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Final, NamedTuple

import msgspec

from everstep.model.budgets import (
    MEASURES,
    MICRO,
    SHOWN_AS,
    Allotment,
    Amounts,
    Charge,
    Left,
    Limits,
    Standing,
    shown,
)
from everstep.model.contracts import KEPT, UNSEEN

ENDS: Final = ("run_completed", "run_failed", "run_cancelled")
ROOT: Final = 0
"""The number of the run's own account. A part has the number of the call that opened it."""


class Account(msgspec.Struct):
    """A budget, or a part of one: its limits, what is used and what is reserved."""

    limits: Limits
    then: str
    around: int
    """The account that contains this one. The run's own account names itself."""
    again: Limits
    """What one grant by a person adds."""
    until: int | None = None
    used: Amounts = msgspec.field(default_factory=Amounts)
    reserved: Amounts = msgspec.field(default_factory=Amounts)

    def rest(self, measure: str) -> int | None:
        """Return how much of a measure is neither used nor reserved; None if it is not limited."""
        limit = getattr(self.limits, measure)
        if limit is None:
            return None
        return int(limit - getattr(self.used, measure) - getattr(self.reserved, measure))


class Begun(msgspec.Struct):
    """A step without an outcome yet, and what is reserved for its current attempt."""

    step: str
    part: int
    cost: Amounts = msgspec.field(default_factory=Amounts)
    charged: Amounts = msgspec.field(default_factory=Amounts)
    """The charges that were recorded before its outcome."""
    is_new: bool = True
    """Whether it began after the newest event at which a part of the history was found to be lost."""
    is_idle: bool = False
    """True while its body has not begun, because a probe or a person must first say whether the step happened in the
    lost part.
    """


class ChildAccount(msgspec.Struct):
    """A child run and its allotment."""

    call: int
    part: int
    name: str
    allotted: Amounts
    used: Amounts = msgspec.field(default_factory=Amounts)
    covered: Amounts = msgspec.field(default_factory=Amounts)
    """What the child used of the amounts that a person granted it. Its parent is not charged for them."""
    is_open: bool = True

    def held_back(self) -> Amounts:
        """Return what is still reserved for the child in addition to what it has used."""
        rest = self.allotted.at_least(self.used)
        rest.add(self.used, -1)
        return rest


class Lack(NamedTuple):
    """An account without enough room, and the measure that it lacks."""

    part: int
    measure: str
    wanted: int


class Accounts(msgspec.Struct):
    """The accounts of one run."""

    parts: dict[int, Account]
    begun: dict[int, Begun] = {}
    children: dict[str, ChildAccount] = {}
    by_step: dict[str, Amounts] = {}
    """What each step, or each child workflow, has used."""
    granted: Amounts = msgspec.field(default_factory=Amounts)
    by: str = ""

    # -- asking ----------------------------------------------------------------------------------------------------
    def chain(self, part: int) -> Iterator[tuple[int, Account]]:
        """Give a part and every account that contains it, from the inside out."""
        while True:
            account = self.parts[part]
            yield part, account
            if account.around == part:
                return
            part = account.around

    def lacks(self, part: int, cost: Charge | None, now: int) -> list[Lack]:
        """Return the accounts that have no room for an attempt with this estimate. One that uses nothing needs no
        money.
        """
        wanted = (cost.microdollars or 0, cost.tokens or 0, 1) if cost is not None else (0, 0, 1)
        is_free = cost is not None and cost.is_nothing
        found = []
        for number, account in self.chain(part):
            if account.until is not None and now >= account.until:
                found.append(Lack(number, "seconds", 0))
            for measure, amount in zip(MEASURES, wanted, strict=True):
                rest = account.rest(measure)
                if rest is not None and amount > rest and not (is_free and measure != "steps"):
                    found.append(Lack(number, measure, amount))
        return found

    def rest(self, part: int, measure: str) -> int | None:
        """Return how much of a measure is left in a part and in all accounts that contain it."""
        rests = [rest for _, account in self.chain(part) if (rest := account.rest(measure)) is not None]
        return min(rests) if rests else None

    def time_left(self, part: int, now: int) -> int | None:
        """Return the microseconds that are left; None if time is not limited."""
        ends = [account.until for _, account in self.chain(part) if account.until is not None]
        return max(0, min(ends) - now) if ends else None

    def left(self, part: int, now: int) -> Left:
        """Return what is left, as workflow code reads it."""
        usd, tokens, steps = (self.rest(part, measure) for measure in MEASURES)
        time_left = self.time_left(part, now)
        return Left(
            None if usd is None else max(0, usd) / MICRO,
            None if tokens is None else max(0, tokens),
            None if steps is None else max(0, steps),
            None if time_left is None else time_left / MICRO,
        )

    def standing(self) -> Standing:
        """Return the state of the run's own account."""
        own = self.parts[ROOT]
        return Standing(own.used, own.reserved, own.limits, own.then, own.until, self.granted, self.by)

    def encoded(self, *, has_ended: bool) -> bytes:
        """Return the state of the account as the run's row has it. At an end the reserved amounts count as used."""
        standing = self.standing()
        if has_ended:
            standing.used, standing.reserved = self.total(), Amounts()
        return msgspec.json.encode(standing)

    def total(self) -> Amounts:
        """Return what is used when the run ends; reservations that nothing will release any more are included."""
        total = Amounts()
        total.add(self.parts[ROOT].used)
        total.add(self.parts[ROOT].reserved)
        return total

    def carried(self) -> "Accounts":
        """Return these accounts for a fresh history of the same run: what was used stays used."""
        fresh = copied(self)
        own = fresh.parts[ROOT]
        own.used, own.reserved = fresh.total(), Amounts()
        fresh.parts, fresh.begun, fresh.children = {ROOT: own}, {}, {}
        return fresh

    # -- taking events ---------------------------------------------------------------------------------------------
    def take(self, kind: str, step: str, body: Any, at: int) -> None:
        """Apply the next event."""
        taken = _TAKE.get(kind)
        if taken is not None:
            taken(self, step, body, at)

    def charge(self, part: int, step: str, charge: Charge) -> None:
        """Count an amount for which nothing was reserved."""
        self._use(part, step, Amounts(charge.microdollars or 0, charge.tokens or 0))

    def open_part(self, number: int, limits: Limits, then: str, around: int, until: int | None) -> None:
        """Open a part. It gets a copy of the limits, because a grant raises them and must not change the
        declared ones.
        """
        self.parts[number] = Account(copy(limits), then, around, limits, until)

    def _use(self, part: int, step: str, amounts: Amounts, sign: int = 1) -> None:
        for _, account in self.chain(part):
            account.used.add(amounts, sign)
        name = step.partition("#")[0]
        if name and amounts:
            self.by_step.setdefault(name, Amounts()).add(amounts, sign)

    def _reserve(self, part: int, amounts: Amounts, sign: int = 1) -> None:
        for _, account in self.chain(part):
            account.reserved.add(amounts, sign)

    def _settle(self, call: int, charge: Charge | None = None, *, happened: bool = True) -> Begun | None:
        """End the current attempt of a step, also one that was cut off."""
        begun = self.begun.get(call)
        if begun is None:
            return None
        reserved = begun.cost.at_least(begun.charged)
        self._reserve(begun.part, reserved, -1)
        if begun.is_idle and not happened:
            reserved = Amounts()
        begun.is_idle = False
        usd = reserved.microdollars if charge is None or charge.microdollars is None else charge.microdollars
        tokens = reserved.tokens if charge is None or charge.tokens is None else charge.tokens
        self._use(begun.part, begun.step, Amounts(usd, tokens))
        begun.cost, begun.charged = Amounts(), Amounts()
        return begun

    def take_back(self, call: int, cost: Charge | None) -> None:
        """Undo the start of an attempt, because another step has its key."""
        begun = self.begun[call]
        reserved = Amounts(cost.microdollars or 0, cost.tokens or 0) if cost is not None else Amounts()
        self._reserve(begun.part, reserved, -1)
        self._use(begun.part, begun.step, Amounts(steps=1), -1)
        begun.cost = Amounts()

    def _step_started(self, step: str, body: Any, at: int) -> None:
        if body.because == KEPT:  # it is not done again: what it used was counted when it happened
            self.begun[body.call] = Begun(step, body.part)
            return
        self._settle(body.call, happened=False)
        cost = Amounts(body.cost.microdollars or 0, body.cost.tokens or 0) if body.cost is not None else Amounts()
        self.begun[body.call] = Begun(step, body.part, cost)
        self._reserve(body.part, cost)
        self._use(body.part, step, Amounts(steps=1))

    def _call_withheld(self, step: str, body: Any, at: int) -> None:
        if body.instead_of == "step_started" and self._settle(body.call) is None:
            self.begun[body.call] = Begun(step, body.part)

    def _attempt_failed(self, step: str, body: Any, at: int) -> None:
        self._settle(body.call, body.charged)

    def _step_doubted(self, step: str, body: Any, at: int) -> None:
        begun = self.begun.get(body.call)
        if begun is not None and begun.is_new and body.because in UNSEEN:
            begun.is_idle = True  # nothing is used before it is known that it has not happened
        else:
            self._settle(body.call)

    def _part_lost(self, step: str, body: Any, at: int) -> None:
        """Mark what was used in a lost part of the history as unknown."""
        for begun in self.begun.values():
            begun.is_new = False

    def _step_completed(self, step: str, body: Any, at: int) -> None:
        self._settle(body.call, body.charged, happened=not body.skipped)
        self.begun.pop(body.call, None)

    def _step_failed(self, step: str, body: Any, at: int) -> None:
        self._settle(body.call, body.charged, happened=False)
        self.begun.pop(body.call, None)

    def _key_taken(self, step: str, body: Any, at: int) -> None:
        self._settle(body.call)

    def _step_shared(self, step: str, body: Any, at: int) -> None:
        """Count nothing: the step that ran was charged."""
        self._settle(body.call)
        self.begun.pop(body.call, None)

    def _step_cancelled(self, step: str, body: Any, at: int) -> None:
        self._settle(body.step_call)
        self.begun.pop(body.step_call, None)

    def _attempt_charged(self, step: str, body: Any, at: int) -> None:
        begun = self.begun.get(body.call)
        if body.beside or begun is None:
            self.charge(body.part, step, body.charged)
            return
        before = begun.cost.at_least(begun.charged)
        begun.charged.add(Amounts(body.charged.microdollars or 0, body.charged.tokens or 0))
        more = begun.cost.at_least(begun.charged)
        more.add(before, -1)
        self._reserve(begun.part, more)

    def _charged(self, step: str, body: Any, at: int) -> None:
        self.charge(body.part, "", body.charged)

    def _budget_narrowed(self, step: str, body: Any, at: int) -> None:
        self.open_part(body.call, body.limits, body.then, body.part, body.until)

    # -- children --------------------------------------------------------------------------------------------------
    def _child_started(self, step: str, body: Any, at: int) -> None:
        if body.allotted is None or body.run in self.children:
            return
        given = body.allotted
        allotted = Amounts(given.microdollars or 0, given.tokens or 0, given.steps or 0)
        self.children[body.run] = ChildAccount(body.call, body.part, body.workflow, allotted)
        self._reserve(body.part, allotted)

    def _child_ended(self, step: str, body: Any, at: int) -> None:
        child = self.children.get(body.run)
        if child is None:
            return
        if child.is_open:
            self._reserve(child.part, child.held_back(), -1)
            child.is_open = False
        used = (body.used or Amounts()).at_least(child.used)
        more = Amounts()
        more.add(used)
        more.add(child.used, -1)
        child.used = used
        self._use(child.part, child.name, more)
        if body.granted:
            self._cover(child, body.granted)

    def _cover(self, child: ChildAccount, granted: Amounts) -> None:
        """Charge here what a child used of a person's grant to it: that grant is not taken from its parent."""
        for measure in MEASURES:
            beyond = getattr(child.used, measure) - getattr(child.allotted, measure)
            covered = max(0, min(getattr(granted, measure), beyond))
            more = covered - getattr(child.covered, measure)
            if more > 0:
                setattr(child.covered, measure, covered)
                for _, account in self.chain(child.part):
                    self._raise(account.limits, measure, more)
                setattr(self.granted, measure, getattr(self.granted, measure) + more)

    # -- persons ---------------------------------------------------------------------------------------------------
    def _run_resolved(self, step: str, body: Any, at: int) -> None:
        if body.granted is None:
            return
        account = self.parts[body.part]
        for measure in MEASURES:
            more = getattr(body.granted, measure) or 0
            self._raise(account.limits, measure, more)
            if body.part == ROOT:
                setattr(self.granted, measure, getattr(self.granted, measure) + more)
        if body.granted.seconds is not None:
            account.until = max(account.until or 0, at + round(body.granted.seconds * MICRO))

    def _raise(self, limits: Limits, measure: str, more: int) -> None:
        limit = getattr(limits, measure)
        if limit is not None:
            setattr(limits, measure, limit + more)

    def _run_retried(self, step: str, body: Any, at: int) -> None:
        """Continue a child that failed with what it was given. (After a retry the same call numbers are used again.)"""
        child = next((one for one in reversed(self.children.values()) if one.call == body.call), None)
        if child is not None and not child.is_open:
            child.is_open = True
            self._reserve(child.part, child.held_back())

    def _run_ended(self, step: str, body: Any, at: int) -> None:
        for call in self.begun:
            self._settle(call)
        self.begun = {}


def accounts_of(started: Any, at: int) -> Accounts:
    """Return the accounts of a run that begins: `started` is the body of its first event."""
    if started.carried is not None and started.carried.accounts is not None:
        return copied(started.carried.accounts)
    given: Allotment = started.budget or Allotment()
    limits = Limits(given.microdollars, given.tokens, given.steps, given.seconds)
    begins = at + round(started.delay * MICRO)
    until = None if given.seconds is None else begins + round(given.seconds * MICRO)
    again = given.again or Limits(given.microdollars, given.tokens, given.steps, given.seconds)
    return Accounts({ROOT: Account(limits, given.then, ROOT, again, until)}, by=given.by)


def copied(accounts: Accounts) -> Accounts:
    """Return a deep copy of the accounts."""
    copy: Accounts = msgspec.json.decode(msgspec.json.encode(accounts), type=Accounts)
    return copy


def standing_at(events: Iterable[Any]) -> bytes | None:
    """Return the state of the budget after a history's events, encoded as in the run's row; None without a budget."""
    accounts: Accounts | None = None
    kind = ""
    for _, kind, step, at, body in events:
        if accounts is None:
            if body.budget is None:
                return None
            accounts = accounts_of(body, at)
        accounts.take(kind, step, body, at)
    return None if accounts is None else accounts.encoded(has_ended=kind in ENDS)


def as_facts(amounts: Amounts | Limits) -> dict[str, float]:
    """Return amounts for a report, in the units of users; a measure without a limit, or without use, is left out."""
    found = {measure: getattr(amounts, measure, None) for measure in SHOWN_AS}
    is_said = [one for one, amount in found.items() if amount or (amount == 0 and isinstance(amounts, Limits))]
    return {SHOWN_AS[one]: shown(one, found[one] or 0) for one in is_said}


_TAKE: Final[dict[str, Callable[[Accounts, str, Any, int], None]]] = {
    "step_started": Accounts._step_started,
    "step_completed": Accounts._step_completed,
    "step_failed": Accounts._step_failed,
    "step_shared": Accounts._step_shared,
    "key_taken": Accounts._key_taken,
    "step_cancelled": Accounts._step_cancelled,
    "step_doubted": Accounts._step_doubted,
    "attempt_failed": Accounts._attempt_failed,
    "attempt_charged": Accounts._attempt_charged,
    "call_withheld": Accounts._call_withheld,
    "charged": Accounts._charged,
    "budget_narrowed": Accounts._budget_narrowed,
    "child_started": Accounts._child_started,
    "child_ended": Accounts._child_ended,
    "run_resolved": Accounts._run_resolved,
    "run_retried": Accounts._run_retried,
    "run_repaired": Accounts._part_lost,
    "run_restored": Accounts._part_lost,
    "run_completed": Accounts._run_ended,
    "run_failed": Accounts._run_ended,
    "run_cancelled": Accounts._run_ended,
}
