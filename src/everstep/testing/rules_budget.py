"""The rules of budgets: nothing begins without room, and a tree of runs agrees on its amounts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.model.accounts import Accounts, accounts_of
from everstep.model.budgets import Amounts
from everstep.model.contracts import KEPT
from everstep.model.events import ENDS, EventRow, decode_body
from everstep.model.forked import copied_events
from everstep.testing.histories import RunHistory, Violation


class BudgetJudge:
    """Goes through one history and computes its sums again."""

    def __init__(self, history: RunHistory) -> None:
        self.run = history.row.id
        self.violations: list[Violation] = []
        self.started: Any = None
        self.children: list[tuple[EventRow, Any]] = []
        """The starts and ends of children."""
        self.ends: list[Amounts] = []
        """What was used at each end that the run had."""
        self._accounts: Accounts | None = None
        for event in history.events:
            try:
                body = decode_body(event.kind, event.body)
            except (msgspec.MsgspecError, KeyError):
                return  # other rules say so
            self._judge(event, body)

    def _is_exempt(self, body: Any) -> bool:
        """Return True for work that a budget never stops: compensations, and what must be repeated to settle a doubt.

        Also for what is not done again, because its outcome was kept when the run was retried.
        """
        must_be_known = body.effect == "atomic" or (body.compensate and body.effect != "once")
        return bool(body.because == KEPT or body.compensates or (must_be_known and body.attempt > 1))

    def _judge(self, event: EventRow, body: Any) -> None:
        if event.kind == "run_started":
            self.started = body
            self._accounts = accounts_of(body, event.at) if body.budget is not None else None
        if event.kind in ("child_started", "child_ended") and event.seq > copied_events(self.started):
            self.children.append((event, body))
        if self._accounts is None:
            return
        if event.kind == "step_started" and not self._is_exempt(body):
            lacks = [one for one in self._accounts.lacks(body.part, body.cost, 0) if one.measure != "seconds"]
            self.violations += [
                Violation("B1", self.run, event.seq, f"{event.step} begins, and there is no room for its {one.measure}")
                for one in lacks
            ]
        self._accounts.take(event.kind, event.step, body, event.at)
        if event.kind in ENDS:
            self.ends.append(self._accounts.total())


def judge_budgets(histories: Sequence[RunHistory]) -> list[Violation]:
    """Compare what began with the room that there was, and what parents allotted and received with what children
    had.
    """
    judges = [BudgetJudge(history) for history in histories]
    by_run: dict[str, list[BudgetJudge]] = defaultdict(list)
    for judge in judges:
        by_run[judge.run].append(judge)
    found = [violation for judge in judges for violation in judge.violations]
    for judge in judges:
        asked_for: set[str] = set()
        for event, body in judge.children:
            paid = [one for one in by_run[body.run] if _is_paid_by(one, judge.run)]
            if event.kind == "child_ended":
                found += _told(judge, event, body, paid)
            elif body.run not in asked_for:  # asked for again, it has what it got the first time
                found += _given(judge, event, body, paid)
                asked_for.add(body.run)
    return found


def _is_paid_by(child: BudgetJudge, parent: str) -> bool:
    return bool(child.started is not None and child.started.budget and child.started.budget.by == parent)


def _given(parent: BudgetJudge, event: EventRow, body: Any, child: Sequence[BudgetJudge]) -> list[Violation]:
    if not child or any(one.started.budget == body.allotted for one in child):
        return []
    return [Violation("B2", parent.run, event.seq, f"the child run {body.run} has another budget than it was allotted")]


def _told(parent: BudgetJudge, event: EventRow, body: Any, child: Sequence[BudgetJudge]) -> list[Violation]:
    if body.used is None or any(body.used == used for one in child for used in one.ends):
        return []
    return [Violation("B2", parent.run, event.seq, f"the child run {body.run} has used something else than this")]
