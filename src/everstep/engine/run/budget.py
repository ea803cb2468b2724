"""The budget of one run in memory: what may begin, what waits for room, and what happens at the limit.

An attempt begins when all used and reserved amounts, plus its own estimate, are within every limit. Otherwise it waits
while work in progress may turn out cheaper than it was estimated. When nothing can make room any more, the budget's
`then` decides. All that is recorded, so a crash changes nothing: see `model/accounts.py`.
"""

import threading
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from everstep.engine.code.budget import Books
from everstep.engine.code.commands import ChildCall, StepCall, preview_of
from everstep.engine.code.step_state import FALLBACK, ROOM, StepState
from everstep.engine.code.stops import stop_in
from everstep.engine.run.holds import budget_report, example_of
from everstep.errors import BudgetExceeded
from everstep.model import events as ev
from everstep.model.accounts import ROOT, Account, Lack
from everstep.model.budgets import (
    MEASURES,
    MICRO,
    SHOWN_AS,
    Allotment,
    Amounts,
    Charge,
    Limits,
    estimate_from,
    limits_of,
    microdollars,
    shown,
)
from everstep.model.crash_points import crash_point
from everstep.model.untrusted import logger, raise_if_no_answer

if TYPE_CHECKING:  # a real cycle: a driver has these parts, and they write into its history
    import asyncio

    from everstep.engine.run.bodies import Attempt
    from everstep.engine.run.driver import Driver


NOTHING: Final = Charge()
_OUR_MODULES: Final = "everstep."
_MAKES_NO_ROOM: Final = frozenset(
    {"step_started", "child_started", "timer_started", "heartbeat", "attempt_charged", "charged", "value_published"}
)


class Budgets:
    """Decides whether work that may use something of the budget may begin."""

    def __init__(self, driver: "Driver", books: Books, attempts: dict[int, StepState]) -> None:
        self._driver = driver
        self._books = books
        asked: dict[int, StepCall | ChildCall] = {**driver.execution.steps, **driver.execution.children}
        waiting = sorted(call for call, one in attempts.items() if one.due == ROOM and call in asked)
        self.withheld = {number: asked[number] for number in waiting}
        """Calls that wait for room, in the order in which the code asked for them."""
        self._is_deciding = False
        self._is_changed = True
        self._in_vain: set[tuple[int, Charge | None]] = set()
        self._estimates: dict[int, Charge | None] = {}
        self._mistakes: dict[int, BaseException] = {}
        """Calls whose estimate could not be made."""
        self._told = b""
        self._set_deadline()

    def _set_deadline(self) -> None:
        """Set the deadline at which the run is held because its time is over, even if it only waits."""
        own = self._books.head.parts[ROOT]
        if own.until is not None and own.then == "hold":
            self._driver.deadlines.add(own.until, "budget")

    # -- the accounts ----------------------------------------------------------------------------------------------
    def record(self, seq: int, kind: str, step: str, body: Any) -> None:
        """Apply an event that was recorded just now."""
        self._books.record(seq, kind, step, body, self._driver.journal.at)
        self._is_changed = self._is_changed or kind not in _MAKES_NO_ROOM
        if kind == "step_started":
            crash_point("budget.reserved")
        elif kind == "child_started":
            crash_point("budget.allotted")

    def show(self, seq: int) -> None:
        """Advance the view of the code to an event."""
        self._books.show(seq)

    def news(self, *, ended: bool) -> bytes | None:
        """Return the new budget of the run's row, or None if it has not changed."""
        told = self._books.head.encoded(has_ended=ended)
        if told == self._told and not ended:
            return None
        self._told = told
        return told

    def forget_news(self) -> None:
        """Restore a row change that was not written."""
        self._told = b""

    def take_back(self, seq: int, begun: ev.StepStarted) -> None:
        """Undo the start of a step, because another step has its key."""
        self._books.take_back(seq, begun.call, begun.cost)
        self._is_changed = True

    def _now(self) -> int:
        return max(self._driver.app.clock.now(), self._driver.journal.at)

    # -- steps -----------------------------------------------------------------------------------------------------
    def lack(self, call: StepCall) -> Lack | None:
        """Return the first lack for another attempt at a step; None if it may begin."""
        return next(iter(self._lacks(call)), None)

    def _lacks(self, call: StepCall) -> list[Lack]:
        part = self._books.part_of(call.call)
        if call.call not in self._estimates:
            try:
                self._estimates[call.call] = self._estimate(call)
            except BaseException as error:  # noqa: BLE001  # whatever else a user's function raises is the step's failure
                if (stop := stop_in(error)) is not None:
                    raise_if_no_answer(stop)
                self._mistakes[call.call] = error
                return [Lack(part, "cost", 0)]
        return self._books.head.lacks(part, self._estimates[call.call], self._now())

    def _estimate(self, call: StepCall) -> Charge | None:
        """Return the estimate of an attempt; None without one."""
        cost = call.target.cost
        if cost is None:
            is_ours = str(getattr(call.target.function, "__module__", "")).startswith(_OUR_MODULES)
            return NOTHING if is_ours else None
        if callable(cost):
            # In a context of the application, because this may be called at the end of another step's body.
            cost = self._driver.app.context.copy().run(cost, *call.arguments.args, **call.arguments.kwargs)
        return estimate_from(cost, call.target.name)

    def reserve(self, call: StepCall, body: ev.StepStarted) -> None:
        """Add the estimate to the event that begins an attempt."""
        body.part = self._books.part_of(call.call)
        body.cost = None if call.cancelled else self._estimates.get(call.call)

    def covers(self, call: int, charge: Charge) -> bool:
        """Return True if the reservation of an attempt covers what it was charged so far."""
        begun = self._books.head.begun.get(call)
        if begun is None:
            return False
        reserved = begun.cost.at_least(begun.charged)
        return (charge.microdollars or 0) <= reserved.microdollars and (charge.tokens or 0) <= reserved.tokens

    def part_of(self, call: int) -> int:
        """Return the part that a call belongs to."""
        return self._books.part_of(call)

    def must_use_nothing(self, call: int, *, fallback: bool) -> bool:
        """Return True if a body has declared that it uses nothing, or is the fallback of a step for which there was
        no room.
        """
        estimate = self._estimates.get(call)
        if self._driver.execution.saga.begun:
            return False  # nothing may keep a compensation from being done
        if not fallback:
            return estimate is not None and estimate.is_nothing
        attempts = self._driver.attempts.of(call)
        return attempts is not None and attempts.refused

    def withhold(self, call: StepCall | ChildCall, lack: Lack, attempt: int = 0, *, again: bool = False) -> None:
        """Record that there is no room for a call, and let it wait. If waiting is useless, a fallback begins at
        once.
        """
        if isinstance(call, StepCall) and call.target.fallback is not None:
            hopeless = self._hopeless(self._lacks(call))
            if hopeless is not None and self._degrades(call, hopeless):
                self._take_fallback(call, hopeless, again=again)
                return
        body = self._withheld_body(call, lack, attempt)
        body.again = again
        self._driver.record("call_withheld", call.step, body)
        crash_point("budget.withheld")
        self.withheld[call.call] = call
        self._driver.writer.save(waited_for=False)

    def _withheld_body(self, call: StepCall | ChildCall, lack: Lack, attempt: int = 0) -> ev.CallWithheld:
        body = ev.CallWithheld(
            call.call,
            call.kind,
            SHOWN_AS.get(lack.measure, lack.measure),
            call.arguments.digest,
            source=call.source,
            attempt=attempt,
            part=self._books.part_of(call.call),
        )
        if isinstance(call, StepCall):
            body.effect, body.key, body.secret = call.target.effect, call.own_key, call.is_secret
        else:
            body.workflow, body.run = call.target.name, call.run
        if not body.secret:
            body.preview = preview_of(call.arguments)
        return body

    # -- room ------------------------------------------------------------------------------------------------------
    def look_again(self) -> bool:
        """Schedule a decision about waiting calls, if a relevant amount has changed; return True if one is due.

        Soon and not at once: the code may ask for the same again and again, and the application's loop must keep
        turning.
        """
        driver = self._driver
        if self.withheld and self._is_changed and not (self._is_deciding or driver.starts_nothing or driver.end_wanted):
            self._is_deciding = True
            driver.app.loop.call_soon(driver.call, self._decide)
        return self._is_deciding

    def _is_wanted(self, call: StepCall | ChildCall) -> bool:
        execution = self._driver.execution
        return call.call in (execution.steps if isinstance(call, StepCall) else execution.children)

    def _is_given_up(self, call: StepCall | ChildCall) -> bool:
        """Return True if the code was cancelled, or has ended, while a call waited. The call is then not begun."""
        main = self._driver.execution.main
        return call.future.is_cancel_wanted or call.future.cancelled() or (main is not None and main.done())

    def _hopeless(self, lacks: list[Lack]) -> Lack | None:
        """Return a lack that no work in progress can resolve; None if there is none."""
        return next((lack for lack in lacks if not self._may_come_free(lack)), None)

    def _may_come_free(self, lack: Lack) -> bool:
        if lack.measure not in MEASURES:
            return False
        head = self._books.head
        return any(
            getattr(amounts, lack.measure) > 0 and any(number == lack.part for number, _ in head.chain(part))
            for part, amounts in self._reserved_for_what_is_under_way()
        )

    def _reserved_for_what_is_under_way(self) -> Iterator[tuple[int, Amounts]]:
        head, attempts = self._books.head, self._driver.attempts
        for number in chain(attempts.running, attempts.starting):
            begun = head.begun.get(number)
            if begun is not None:
                yield begun.part, begun.cost.at_least(begun.charged)
        for call in self._driver.execution.children.values():
            child = head.children.get(call.run)
            if child is not None and child.is_open:
                yield child.part, child.held_back()

    # -- at the limit ----------------------------------------------------------------------------------------------
    def _decide(self) -> None:
        """Decide about each call that waits."""
        self._is_deciding = self._is_changed = False
        self._in_vain.clear()
        driver = self._driver
        for number, call in list(self.withheld.items()):
            if driver.starts_nothing or driver.end_wanted:
                return
            if not self._is_wanted(call):
                self.withheld.pop(number, None)
            elif isinstance(call, ChildCall):
                self._decide_about_child(call)
            elif number in self.withheld:
                self._decide_about(call)
        driver.come_to_rest()

    def _decide_about(self, call: StepCall) -> None:
        driver = self._driver
        attempts = driver.attempts.of(call.call)
        assert attempts is not None
        if self._is_given_up(call):
            del self.withheld[call.call]
            driver.attempts.settle_as_not_done(call)
            return
        if call.keyed is not None and driver.attempts.keys.is_anothers(call):
            del self.withheld[call.call]  # a call whose outcome another step provides needs no room
            driver.attempts.begin_again(call.call, "budget")
            return
        part, number = self._books.part_of(call.call), call.call
        if number in self._estimates and (part, self._estimates[number]) in self._in_vain:
            return
        lacks = self._lacks(call)
        lack = self._hopeless(lacks)
        if lacks and lack is None:  # no room is released meanwhile, so all similar calls keep waiting
            self._in_vain.add((part, self._estimates[number]))
        elif not lacks:
            del self.withheld[call.call]
            driver.attempts.begin_again(call.call, "budget")
        elif lack is not None and lack.measure == "cost":
            self._fail(call, self._mistakes.pop(call.call), secret=call.is_secret)
        elif lack is not None:
            account = self._books.head.parts[lack.part]
            if account.then == "fail":
                self._fail(call, exceeded(call.step, account, lack))
            elif self._degrades(call, lack):
                del self.withheld[call.call]
                self._take_fallback(call, lack, again=True)
            else:
                facts = {"call": call.call, "attempts": attempts.attempt}
                facts["example"] = example_of(call.target.signature.annotations.get("return"))
                driver.put_on_hold(self._report(lack, call.step, facts))

    def _fail(self, call: StepCall, error: BaseException, *, secret: bool = False) -> None:
        del self.withheld[call.call]
        self._driver.attempts.fail(call, error, secret=secret)

    def _degrades(self, call: StepCall, lack: Lack) -> bool:
        """Return True if a fallback replaces a step for which there is no room."""
        is_known = lack.measure != "cost"
        return is_known and self._books.head.parts[lack.part].then == "fallback" and call.target.fallback is not None

    def _take_fallback(self, call: StepCall, lack: Lack, *, again: bool) -> None:
        attempts = self._driver.attempts.of(call.call)
        assert attempts is not None
        body = self._withheld_body(call, lack, attempts.attempt)
        body.again, body.then = again, "fallback"
        attempts.due, attempts.refused = FALLBACK, True
        seq = self._driver.record("call_withheld", call.step, body)
        self._driver.attempts.start_fallback(call, seq)

    def time_is_up(self) -> None:
        """Act on the end of the run's time, whatever the run waits for; but let a run end that is about to."""
        if self._driver.end_wanted:
            return
        self._driver.put_on_hold(self._report(Lack(ROOT, "seconds", 0), "", {}))

    def _report(self, lack: Lack, step: str, facts: dict[str, Any]) -> Any:
        head = self._books.head
        account = head.parts[lack.part]
        what = _what(account, lack)
        summary = f"there is no room in its budget for {step}: {what}" if step else f"its budget is used up: {what}"
        return budget_report(summary, step, facts, lack.part, account, head.by_step)

    # -- children --------------------------------------------------------------------------------------------------
    def ask_for_child(self, call: ChildCall) -> None:
        """Begin a child with what is left, up to its own budget. If nothing is left, it may wait."""
        lack = self._nothing_left(call)
        if lack is not None and self._may_come_free(lack):
            self.withhold(call, lack)
        else:
            self._begin_child(call)

    def _nothing_left(self, call: ChildCall) -> Lack | None:
        for number, account in self._books.head.chain(self._books.part_of(call.call)):
            for measure in MEASURES:
                rest = account.rest(measure)
                if rest is not None and rest <= 0:
                    return Lack(number, measure, 1)
        return None

    def _decide_about_child(self, call: ChildCall) -> None:
        if call.is_told_to_stop or (self._is_given_up(call) and call.target.on_parent_end == "cancel"):
            del self.withheld[call.call]
            self._driver.deliver("child_ended", "", ev.ChildEnded(call.call, call.run, "cancelled", 0))
            return
        lack = self._nothing_left(call)
        if lack is None or not self._may_come_free(lack):
            del self.withheld[call.call]
            self._begin_child(call, withheld=True)

    def _begin_child(self, call: ChildCall, *, withheld: bool = False) -> None:
        driver = self._driver
        body = call.body()
        body.part, body.withheld = self._books.part_of(call.call), withheld
        body.allotted = self.allotment(call)
        driver.children.start(call, body.allotted)
        seq = driver.record(call.kind, call.step, body)
        driver.writer.when_durable(seq, lambda: driver.app.adopt(call.run))

    def allotment(self, call: ChildCall) -> Allotment:
        """Return the allotment of a child: what is left here, up to its own budget."""
        head, budget = self._books.head, call.target.budget
        part = self._books.part_of(call.call)
        around = head.parts[part]
        own = _own_limits(call)
        given = Allotment(then=budget.then if budget is not None else around.then, by=self._driver.run)
        for measure in MEASURES:
            rests = [getattr(own, measure), head.rest(part, measure)]
            setattr(given, measure, min((max(0, rest) for rest in rests if rest is not None), default=None))
        time_left = head.time_left(part, self._now())
        times = [own.seconds, None if time_left is None else time_left / MICRO]
        given.seconds = min((one for one in times if one is not None), default=None)
        given.again = own if budget is not None else around.again
        return given


def _own_limits(call: ChildCall) -> Limits:
    return limits_of(call.target.budget) if call.target.budget is not None else Limits()


def _what(account: Account, lack: Lack) -> str:
    """Return the lack in words."""
    if lack.measure == "seconds":
        return f"its {account.limits.seconds:g} seconds are over"
    used = getattr(account.used, lack.measure)
    reserved = getattr(account.reserved, lack.measure)
    limit, unit = getattr(account.limits, lack.measure), SHOWN_AS[lack.measure]
    text = f"{shown(lack.measure, used):g} of {shown(lack.measure, limit):g} {unit} are used"
    if reserved:
        text += f", {shown(lack.measure, reserved):g} are reserved"
    return text + (f", and it is estimated at {shown(lack.measure, lack.wanted):g}" if lack.wanted else "")


def exceeded(step: str, account: Account, lack: Lack) -> BudgetExceeded:
    """Return the error of a step that fails because there is no room."""
    message = f"There is no room in the budget for {step}: {_what(account, lack)}."
    if lack.measure in ("microdollars", "tokens"):
        message += " A step that uses nothing may declare it with cost={}, and then runs."
    limit = getattr(account.limits, lack.measure)
    return BudgetExceeded(message, SHOWN_AS[lack.measure], shown(lack.measure, limit or 0))


log = logger("everstep.step")

SOON_SECONDS: Final = 0.1
"""If a body ends this soon after a charge beyond its estimate, only its outcome records the charge (seconds)."""
PAUSE_SECONDS: Final = 1.0
"""The minimum interval between recorded charges beyond a step's estimate while its body runs, in seconds."""


class Spending:
    """The charges of one attempt so far. Any thread may add to them."""

    __slots__ = ("_lock", "_nanos", "_tokens", "_written", "is_announced", "uses_nothing")

    def __init__(self, *, uses_nothing: bool = False) -> None:
        self.uses_nothing = uses_nothing
        """Whether the body has declared that it uses nothing."""
        self.is_announced = False
        """Whether the loop will look at it soon."""
        self._lock = threading.Lock()
        self._nanos: int | None = None
        self._tokens: int | None = None
        self._written = Charge()

    def add(self, nanos: int | None, tokens: int | None) -> None:
        """Add a charge. Sums are exact; only their result is rounded, up."""
        with self._lock:
            if nanos is not None:
                self._nanos = (self._nanos or 0) + nanos
            if tokens is not None:
                self._tokens = (self._tokens or 0) + tokens

    def total(self) -> Charge | None:
        """Return the total; None if the body was charged nothing at all."""
        with self._lock:
            if self._nanos is None and self._tokens is None:
                return None
            return Charge(None if self._nanos is None else microdollars(self._nanos), self._tokens)

    def take_total(self) -> Charge | None:
        """Return the total for an outcome. Later charges are counted in addition."""
        total = self.total()
        self._written = total or self._written
        return total

    def take_unwritten(self) -> Charge | None:
        """Return what is not in the history yet; None if that is nothing."""
        total = self.total() or Charge()
        usd = (total.microdollars or 0) - (self._written.microdollars or 0)
        tokens = (total.tokens or 0) - (self._written.tokens or 0)
        self._written = total
        return Charge(usd or None, tokens or None) if usd or tokens else None


class Charging:
    """Records the charges of one run's bodies."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._due: dict[int, Attempt] = {}
        self._pause: asyncio.TimerHandle | None = None

    def hear(self, attempt: "Attempt", spending: Spending) -> None:
        """Note a charge of an attempt. May be called on any thread."""
        app = self._driver.app
        if threading.get_ident() == app.thread:
            self._look_at(attempt, spending)
        elif not spending.is_announced:
            spending.is_announced = True
            try:
                app.loop.call_soon_threadsafe(self._driver.call, self._look_at, attempt, spending)
            except RuntimeError:
                self._warn(attempt)  # the loop is closed, so the charge cannot be recorded

    def _look_at(self, attempt: "Attempt", spending: Spending) -> None:
        spending.is_announced = False
        driver = self._driver
        if driver.is_over:
            self._warn(attempt)
        elif driver.attempts.running.get(attempt.call.call) is not attempt:
            self._write(attempt, spending, beside=True)  # a probe, or a body for which nobody waits any more
        elif driver.budgets is not None and not self._is_covered(attempt, spending):
            self._due[attempt.call.call] = attempt
            if self._pause is None:
                self._pause = driver.app.loop.call_later(SOON_SECONDS, driver.call, self._write_due)

    def _warn(self, attempt: "Attempt") -> None:
        log.warning(
            "%s of run %s was charged when the run had ended or left this process; that is not counted.",
            attempt.step,
            attempt.run,
        )

    def _is_covered(self, attempt: "Attempt", spending: Spending) -> bool:
        """Return True if the charges so far are within what the history has for this attempt anyway."""
        total, budgets = spending.total(), self._driver.budgets
        return total is None or (budgets is not None and budgets.covers(attempt.call.call, total))

    def _write_due(self) -> None:
        self._pause = None
        due, self._due = self._due, {}
        for call, attempt in due.items():
            if self._driver.attempts.running.get(call) is attempt:
                self.write(attempt)
        if due:
            self._pause = self._driver.app.loop.call_later(PAUSE_SECONDS, self._driver.call, self._write_due)

    def write(self, attempt: "Attempt") -> None:
        """Record the charges of an attempt, if they exceed what the history has for it, because it may be cut off."""
        spending = attempt.spending
        if spending is not None and not self._driver.is_over and not self._is_covered(attempt, spending):
            self._write(attempt, spending)

    def _write(self, attempt: "Attempt", spending: Spending, *, beside: bool = False) -> None:
        charge, driver, call = spending.take_unwritten(), self._driver, attempt.call.call
        if charge is not None:
            part = driver.budgets.part_of(call) if driver.budgets is not None else 0
            body = ev.AttemptCharged(call, attempt.attempt, charge, beside, part)
            driver.record("attempt_charged", attempt.step, body)
            crash_point("budget.charged")
            driver.writer.save(waited_for=False)

    def stop(self) -> None:
        """Stop, because the run leaves this process, or its bodies were stopped."""
        if self._pause is not None:
            self._pause.cancel()
