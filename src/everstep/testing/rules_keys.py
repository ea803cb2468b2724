"""The rules about keys of effects: what histories say about one key in all runs, compared with the table `effects`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from everstep.testing.histories import Violation
from everstep.testing.rules_history import Call, HistoryJudge, Shared

Owner = tuple[HistoryJudge, Call]
Outcomes = dict[tuple[str, int, str], list[tuple[bytes, str]]]
"""What was done under each run, generation and key."""


def judge_keys(judges: Sequence[HistoryJudge]) -> list[Violation]:
    """A key has one owner at a time and one outcome. Steps that shared it got the same outcome."""
    owners: dict[str, list[Owner]] = defaultdict(list)
    outcomes: Outcomes = {}
    histories = {(judge.run, judge.history.generation): judge.history for judge in judges}
    for judge in judges:
        for call in judge.every_call:
            if call.own_key and call.attempt:
                owners[call.own_key].append((judge, call))
            if call.own_key and call.was_done:
                place = (judge.run, judge.history.generation, call.own_key)
                outcomes.setdefault(place, []).append(call.value)
    found = [violation for key, some in owners.items() for violation in _one_key(key, some)]
    for judge in judges:
        found += _own_rows(judge)
        for shared in judge.shared:
            owner = histories.get((shared.run, shared.generation))
            if not shared.by and owner is not None and judge.history.may_know(owner, shared.at):
                found += _one_share(judge, shared, outcomes)
    return found


def has_key(judge: HistoryJudge, call: Call) -> bool:
    """Return True if a step was begun under its key and is not settled, so that the key belongs to it.

    When its run has ended, a person may have freed the key meanwhile; then the table no longer says so.
    """
    if not call.own_key or not call.attempt or call.outcome or call.waits or call.is_void or call.cancelled:
        return False
    if judge.ended_by is None and judge.history.is_newest:
        return True
    mine = [row for row in judge.history.keys if (row.call, row.key) == (call.number, call.own_key)]
    return call.effect != "repeat" and any(row.state == "under-way" for row in mine)


def _one_key(key: str, owners: Sequence[Owner]) -> Iterator[Violation]:
    done: dict[int, str] = {}
    for judge, call in owners:
        if call.was_done:
            if call.round in done:
                what = f"{call.step} was done under {key!r}, and in run {done[call.round]} as well"
                yield Violation("D8", judge.run, call.outcome_seq, what)
            done[call.round] = judge.run
    held = [(judge, call) for judge, call in owners if has_key(judge, call)]
    for judge, call in held:
        if call is not held[0][1]:
            yield Violation("D8", judge.run, call.seq, f"{call.step} has {key!r}, and so has run {held[0][0].run}")
        if call.round <= max(done, default=-1):
            yield Violation("D8", judge.run, call.seq, f"{call.step} was begun under {key!r}, which was done before")


def _own_rows(judge: HistoryJudge) -> Iterator[Violation]:
    """Compare the table with the history: its rows for this run's steps, and missing rows."""
    calls: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in judge.every_call:
        calls[call.number, call.own_key].append(call)
    under_way = set()
    for row in judge.history.keys:
        mine = calls.get((row.call, row.key), [])
        wrong = ""
        if row.state == "undoing":
            if row.call > 0 and not any(call.was_done for call in mine):  # otherwise an older generation has done it
                wrong = f"the key {row.key!r} is being undone in the table, and was not done in the history"
        elif not mine:
            wrong = f"the table says that call {row.call} had the key {row.key!r}"
        elif row.state == "under-way":
            under_way.add((row.call, row.key))
            if not any(has_key(judge, call) for call in mine):
                wrong = f"the key {row.key!r} is under way in the table, and not in the history"
        elif row.state == "done" and not row.by and not any(call.was_done for call in mine):
            wrong = f"the key {row.key!r} is done in the table, and not in the history"
        if wrong:
            yield Violation("D8", judge.run, mine[-1].seq if mine else 0, wrong)
    if judge.ended_by is None and judge.history.is_newest:
        for call in judge.calls.values():
            if has_key(judge, call) and (call.number, call.own_key) not in under_way:
                what = f"{call.step} was begun, and another step may have its key {call.own_key!r}"
                yield Violation("D8", judge.run, call.seq, what)


def _one_share(judge: HistoryJudge, shared: Shared, outcomes: Outcomes) -> Iterator[Violation]:
    """Compare a shared outcome with its owner's history."""
    values = outcomes.get((shared.run, shared.generation, shared.key))
    if values is None:
        what = f"shares what run {shared.run} did under {shared.key!r}, which did nothing"
        yield Violation("D8", judge.run, shared.seq, what)
    elif shared.value not in values:
        yield Violation("D8", judge.run, shared.seq, f"was given another outcome under {shared.key!r} than its owner")
