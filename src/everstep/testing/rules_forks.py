"""The rule about forks: a fork begins with the events of the other run, except for what it declares as edited."""

from collections.abc import Sequence

import msgspec

from everstep.model.events import decode_body
from everstep.model.forked import Forked
from everstep.testing.histories import RunHistory, Violation


def judge_forks(histories: Sequence[RunHistory]) -> list[Violation]:
    """Compare each fork with the run that it names, if that still exists."""
    by_place = {(history.row.id, history.generation): history for history in histories}
    found: list[Violation] = []
    for history in histories:
        try:
            forked = decode_body("run_started", history.events[0].body).forked if history.events else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # other rules say so
        other = by_place.get((forked.run, forked.generation)) if forked is not None else None
        if forked is not None and other is not None and history.may_know(other, forked.at):
            found += _one_fork(history, forked, other)
    return found


def _one_fork(history: RunHistory, forked: Forked, other: RunHistory) -> list[Violation]:
    run, last = history.row.id, forked.seq
    if len(other.events) < last or other.events[last - 1].digest.hex() != forked.head:
        return [Violation("F1", run, 1, f"was forked from event {last} of {forked.run}, which is not there")]
    if len(history.events) < last:
        return [Violation("F1", run, last, f"has fewer events than it was forked with from {forked.run}")]
    return [
        Violation("F1", run, mine.seq, f"is not what {forked.run} has there")
        for mine, theirs in zip(history.events[1:last], other.events[1:last], strict=True)
        if mine[:5] != theirs[:5] and not (mine.seq == last and forked.edited == "outcome")
    ]
