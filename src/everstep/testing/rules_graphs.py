"""The rules about graphs: a part of judging one history."""

from collections.abc import Callable
from typing import Any

Broken = Callable[[str, str], None]


class GraphJudge:
    """Follows the moves of a graph: each visit begins once, finishes once, and none is left behind."""

    def __init__(self, broken: Broken) -> None:
        self._broken = broken
        self._moves: list[tuple[int, Any]] = []
        self._running: set[str] = set()
        self._queued: set[str] = set()
        self._begun: set[str] = set()

    def take(self, seq: int, kind: str, body: Any) -> None:
        """Judge an event."""
        if kind == "graph_moved":
            self._move(body)
            self._moves.append((seq, body))
        elif kind == "run_retried" and self._moves:
            kept = [(at, move) for at, move in self._moves if at < body.voids]
            self._moves, self._running, self._queued, self._begun = kept, set(), set(), set()
            for _, move in kept:
                self._note(move)
        elif kind == "run_completed" and (self._running or self._queued):
            self._broken("G1", f"although {', '.join(sorted(self._running | self._queued))} had not finished")

    def _move(self, body: Any) -> None:
        if body.after and body.after not in self._running:
            self._broken("G1", f"says that {body.after} has finished, which was not under way")
        if again := self._begun.intersection(body.begins):
            self._broken("G1", f"begins {', '.join(sorted(again))} a second time")
        self._note(body)

    def _note(self, body: Any) -> None:
        self._running.discard(body.after)
        self._begun.update(body.begins)
        self._running.update(body.begins)
        self._queued.update(body.queued)
        self._queued.difference_update(body.begins)
