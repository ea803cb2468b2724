"""`everstep.budget(…)`: a part of a run's budget, for a block of workflow code; and what is left."""

import sys
from contextvars import Token
from decimal import Decimal
from types import TracebackType
from typing import Self

from everstep.effects.surroundings import persons_line
from everstep.engine.code.budget import PART, NarrowBudget
from everstep.engine.code.execution import Execution, current_execution
from everstep.errors import Misuse
from everstep.model.budgets import MICRO, Budget, Left, Limits, Then, limits_of
from everstep.model.durations import Duration


class Part:
    """A part of a run's budget, as a block: `with everstep.budget(usd=1.0) as part:`.

    `part.left` says what is left in it: neither used nor reserved for what is under way, the same in every replay.
    """

    def __init__(self, execution: Execution, budget: Budget, then: Then | None, source: str) -> None:
        self._execution = execution
        self._limits = limits_of(budget)
        self._then = then
        self._source = source
        self._token: Token[int] | None = None
        self._number: int | None = None

    def __enter__(self) -> Self:
        if self._number is not None:
            raise Misuse("This part of the budget was opened before: call everstep.budget() again for another one.")
        if self._limits != Limits():
            self._number = _narrow(self._execution, self._limits, self._then, self._source)
            self._token = PART.set(self._number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            try:
                PART.reset(self._token)
            except ValueError:
                pass  # a generator that is closed from another context: that one is not in this part anyway

    @property
    def left(self) -> Left:
        """What is left here: neither used nor reserved for what is under way. None: there is no limit.

        It is the same in every replay: what it counts is all that had happened when the code was told the newest.
        """
        books = self._execution.books
        if books is None:
            return Left(None, None, None, None)
        return books.left(PART.get() if self._number is None else self._number, self._execution.loop.now)


def _narrow(execution: Execution, limits: Limits, then: str | None, source: str) -> int:
    """Open a part of the run's budget and return its number."""
    execution.require_live()
    if execution.books is None:
        raise Misuse("This run has no budget that could be narrowed: put `budget=everstep.Budget()` on its workflow.")
    number = execution.next_call()
    until = None if limits.seconds is None else execution.loop.now + round(limits.seconds * MICRO)
    part, then = execution.books.narrow(number, limits, then, until)
    execution.issue(NarrowBudget(number, limits, then, part, until, source))
    return number


def budget(
    *,
    usd: float | Decimal | None = None,
    tokens: int | None = None,
    steps: int | None = None,
    seconds: Duration | None = None,
    then: Then | None = None,
) -> Part:
    """Narrow the run's budget for a block: work that begins in it may use this much, and no more than the run has left.

    `with everstep.budget(usd=1.0, then="fail"):` is for the steps and children that are begun in the block, also by
    tasks that are created there. A child run takes what is left of it as its allotment. Without limits nothing is
    narrowed: `everstep.budget().left` reads what is left where the code is, as `left.usd`, `left.tokens`, `left.steps`
    and `left.seconds`.

    then: what happens when it is used up: `hold`, `fail` or `fallback` (default: as in the budget around it).
    """
    execution = current_execution("everstep.budget()")
    narrower = Budget(usd, tokens, steps, seconds, then or "hold")
    return Part(execution, narrower, then, persons_line(sys._getframe(1)))
