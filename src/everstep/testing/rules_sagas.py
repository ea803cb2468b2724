"""The rules about compensation: a part of judging one history."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from everstep.model.events import ENDS

if TYPE_CHECKING:  # a real cycle: the judge of a history has this judge, and hands it its calls
    from everstep.testing.rules_history import Call

Broken = Callable[[str, str], None]


class SagaJudge:
    """Follows the compensation of a run. It receives each event that may matter, with the calls so far."""

    def __init__(self, broken: Broken) -> None:
        self._broken = broken
        self._settled: set[int] = set()
        """Calls whose compensation completed, or was skipped by a person."""
        self._todo: list[int] = []
        self._is_undone = False

    def take(self, kind: str, body: Any, calls: Mapping[int, "Call"]) -> None:
        """Judge an event."""
        if kind == "step_started" and body.attempt == 1:
            self._step_started(body, calls)
        elif kind == "step_completed":
            self._step_completed(body, calls)
        elif kind == "compensation_started":
            self._compensation_started(body, calls)
        elif kind == "run_retried" and (self._is_undone or self._settled):
            self._broken("S2", "although its compensation had begun")
        elif kind in ENDS:
            self._end(kind, body, calls)

    def _compensation_started(self, body: Any, calls: Mapping[int, "Call"]) -> None:
        self._is_undone, self._todo = True, list(body.steps)
        for number in body.steps:
            if number in self._settled:
                self._broken("S1", f"is to undo call {number}, which is undone already")
            if not self._happened(calls.get(number)):
                self._broken("S1", f"is to undo call {number}, which did not complete")
        places = [calls[number].outcome_seq for number in body.steps if number in calls]
        if places != sorted(places, reverse=True):
            self._broken("S2", f"is to undo {body.steps}, which is not the reverse of the order of their completion")

    def _step_started(self, body: Any, calls: Mapping[int, "Call"]) -> None:
        if not body.compensates:
            if self._is_undone:
                self._broken("S2", "begins after compensation had")
            return
        if not self._happened(calls.get(body.compensates)):
            self._broken("S1", f"undoes call {body.compensates}, which did not complete")
        if body.compensates in self._settled:
            self._broken("S1", f"undoes call {body.compensates} once more")
        elif self._todo[:1] != [body.compensates]:
            self._broken("S2", f"undoes call {body.compensates} when it is the turn of {self._todo[:1]}")

    def _step_completed(self, body: Any, calls: Mapping[int, "Call"]) -> None:
        undone = calls[body.call].compensates if body.call in calls else 0
        if undone:
            if undone in self._settled:
                self._broken("S1", f"undoes call {undone} a second time")
            self._settled.add(undone)
            self._todo = [number for number in self._todo if number != undone]

    def _end(self, kind: str, body: Any, calls: Mapping[int, "Call"]) -> None:
        """A run that failed, or was rolled back, has left nothing out."""
        self._is_undone = False
        if kind == "run_failed" or (kind == "run_cancelled" and body.rolled_back):
            for number, call in calls.items():
                if call.compensate and self._happened(call) and number not in self._settled:
                    self._broken("S3", f"although {call.step} (call {number}) was not compensated")

    def not_undone(self, calls: Mapping[int, "Call"]) -> list[str]:
        """Return the completed steps whose compensation has not completed, the first to complete first."""
        left = [call for number, call in calls.items() if call.compensate and number not in self._settled]
        return [call.step for call in sorted(left, key=lambda call: call.outcome_seq) if self._happened(call)]

    @staticmethod
    def _happened(call: "Call | None") -> bool:
        return call is not None and call.outcome == "step_completed" and call.happened
