"""The rows of a timeline: the parts of a run that take time, their attempts, and the crashes between them."""

from typing import Any, Literal

import msgspec

RowKind = Literal["step", "timer", "signal", "request", "approval", "child", "note"]
State = Literal["open", "completed", "failed", "cancelled", "dropped"]


class AttemptView(msgspec.Struct):
    """One attempt at a step. One that a crash cut off ends at the run's last sign of life before the next attempt."""

    number: int
    started_at: int
    because: str = ""
    ended_at: int | None = None
    outcome: Literal["open", "completed", "failed", "crashed", "cancelled"] = "open"
    due: int | None = None
    error: dict[str, Any] | None = None


class Row(msgspec.Struct, kw_only=True):
    """A part of a run that takes time."""

    kind: RowKind
    name: str
    seq: int
    started_at: int
    ended_at: int | None = None
    state: State = "open"
    effect: str = ""
    arguments: str = ""
    value: str = ""
    note: str = ""
    source: str = ""
    type: str = ""
    id: str = ""
    """Of an approval."""
    deadline: int | None = None
    attempts: list[AttemptView] = []
    error: dict[str, Any] | None = None
    awaited_key: str = ""
    """The key that the step waits for, and the run that has it."""
    awaited_run: str = ""
    undoes: str = ""
    """In a compensation: the step that it undoes."""
    undone: Literal["", "wanted", "compensated", "skipped"] = ""
    """For a step: whether it will be compensated, was, or was skipped by a person."""
    charged: str = ""
    """What its last attempt was charged."""

    @property
    def crashes(self) -> int:
        """How many attempts were cut off."""
        return sum(1 for attempt in self.attempts if attempt.outcome == "crashed")


class Crash(msgspec.Struct):
    """The process that drove the run was gone between these times."""

    last_sign_at: int
    went_on_at: int
    steps: list[str]
