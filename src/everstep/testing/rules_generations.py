"""The rule about runs that continued with a fresh history: the generations of such a run are one chain."""

from collections.abc import Sequence

from everstep.testing.histories import Violation
from everstep.testing.rules_history import HistoryJudge


def taken_along(judge: HistoryJudge) -> list[str]:
    """Return the steps of older generations that a history can undo."""
    return [call.step for call in judge.carried.values()]


def judge_generations(judges: Sequence[HistoryJudge]) -> list[Violation]:
    """After `run_continued` comes a generation that names exactly this end, and no other generation names one."""
    found = []
    by_place = {(judge.run, judge.history.generation): judge for judge in judges}
    for (run, generation), judge in by_place.items():
        end = judge.ended_by
        if end is not None and end.kind == "run_continued":
            after = by_place.get((run, generation + 1))
            if after is None or after.carried_head != end.digest.hex():
                what = f"generation {generation} was continued, and the next one does not follow it"
                found.append(Violation("L3", run, end.seq, what))
            elif (left := judge.saga.not_undone({**judge.carried, **judge.calls})) != taken_along(after):
                what = f"generation {generation} can undo {left}, and the next one was given {taken_along(after)}"
                found.append(Violation("S3", run, end.seq, what))
        before = by_place.get((run, generation - 1))
        if judge.carried_head and (
            before is None or before.ended_by is None or before.ended_by.digest.hex() != judge.carried_head
        ):
            what = f"generation {generation} continues from an end that does not exist"
            found.append(Violation("D6", run, 1, what))
    return found
