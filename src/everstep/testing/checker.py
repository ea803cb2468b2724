"""The checker: joins four accounts, none of them the engine's word, and names each rule that was broken.

    violations = check(export_histories(store), journal=…, ledger=ledger.entries(), earlier=…)

The accounts: the histories as they are in the store, the clients' journals (`everstep.testing.journals`), the ledger's
entries (`everstep.testing.ledger`), and the list of faults. `RULES` explains each rule. The time is proportional to the
size of the accounts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from everstep.model.events import decode_body
from everstep.testing.histories import RULES, RunHistory, Violation, export_histories
from everstep.testing.rules_budget import judge_budgets
from everstep.testing.rules_forks import judge_forks
from everstep.testing.rules_generations import judge_generations
from everstep.testing.rules_history import HistoryJudge
from everstep.testing.rules_keys import judge_keys
from everstep.testing.rules_outside import (
    judge_children,
    judge_clients,
    judge_effects,
    judge_epochs,
    judge_ids,
    judge_inboxes,
)

__all__ = ["RULES", "RunHistory", "Violation", "check", "export_histories"]

OVERDUE_MICROSECONDS: Final = 5_000_000
"""A timer that is this late, while a worker lives, counts as lost."""


def check(
    histories: Sequence[RunHistory],
    *,
    journal: Iterable[Mapping[str, Any]] = (),
    ledger: Iterable[Mapping[str, Any]] = (),
    earlier: Sequence[RunHistory] = (),
    faults: Sequence[str] = (),
    settled: bool = True,
    reads: Collection[str] = (),
    now: int | None = None,
) -> list[Violation]:
    """Return every broken rule, in the order of runs and events.

    journal: the lines of the clients' journals. ledger: the ledger's entries.
    earlier: the histories as they were at an earlier instant.
    faults: what was done to the system. `zombie`: a process was stopped and woken, so its bodies may ask late.
    settled: the runs have gone as far as they can. Otherwise their processes were killed a moment ago, and what was
        under way is in doubt.
    reads: the effects whose contract is `read`: requests for those may be entered that no history knows.
    now: the time of the export, by which overdue timers are found.
    """
    lines = list(journal)
    judges = [HistoryJudge(history) for history in histories]
    found = [violation for judge in judges for violation in judge.violations]
    found += judge_ids(histories)
    found += judge_prefixes(histories, earlier)
    found += judge_inboxes(judges)
    found += judge_children(judges)
    found += judge_generations(judges)
    found += judge_forks(histories)
    found += judge_keys(judges)
    found += judge_budgets(histories)
    found += judge_effects(judges, ledger, faults=faults, reads=reads)
    found += judge_clients(histories, lines, settled=settled)
    found += judge_epochs(histories, lines)
    if settled and now is not None:
        found += judge_overdue(histories, now)
    return sorted(found, key=lambda violation: (violation.run, violation.seq, violation.rule))


def judge_prefixes(histories: Sequence[RunHistory], earlier: Sequence[RunHistory]) -> list[Violation]:
    """What was in the store stays there, unchanged and in its place."""
    later = {(history.row.id, history.generation): history for history in histories}
    found = []
    for before in earlier:
        run = before.row.id
        after = later.get((run, before.generation))
        if after is None:
            found.append(Violation("L5", run, 0, "was in the store and is gone"))
            continue
        kept = kept_by_repairs(after)
        for place, event in enumerate(before.events[:kept]):
            if place >= len(after.events) or after.events[place] != event:
                found.append(Violation("L5", run, event.seq, "was recorded and is gone or has changed"))
                break
        if after.row.epoch < before.row.epoch:
            found.append(Violation("D5", run, 0, f"its epoch went from {before.row.epoch} down to {after.row.epoch}"))
    return found


def kept_by_repairs(history: RunHistory) -> int:
    """Return how many of the first events no repair has archived."""
    repairs = [decode_body(event.kind, event.body) for event in history.events if event.kind == "run_repaired"]
    return min((repair.since - 1 for repair in repairs), default=len(history.events) + 1_000_000)


def judge_overdue(histories: Sequence[RunHistory], now: int) -> list[Violation]:
    """A waiting run is woken when its time has come."""
    return [
        Violation("L4", history.row.id, 0, "waits for a timer that is long overdue")
        for history in histories
        if history.is_newest
        and history.row.status == "waiting"
        and history.row.wake_at is not None
        and history.row.wake_at + OVERDUE_MICROSECONDS < now
    ]
