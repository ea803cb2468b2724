"""What a replay is told ahead of a graph; and what it comes to: the code at its last rest, what is known by then."""

from collections.abc import Sequence, Set
from typing import Any, Final

import msgspec

from everstep.engine.agreement import published_before
from everstep.engine.commands import Command, Difference
from everstep.engine.due import Attempts
from everstep.engine.execution import Execution
from everstep.engine.history import Recorded
from everstep.engine.loop import SpinningWorkflow
from everstep.model import events as ev
from everstep.model.exchange_events import APPROVAL

LOOKED_FOR: Final = frozenset({"patched", "run_resolved", "run_retried", "checkpoint_taken", "graph_started"})
"""Events that say something about earlier ones, or that the code is told before it comes there."""

COMPARED: Final = frozenset({"approval_asked", "request_answered", "run_completed"})
"""Events whose value is compared with what the code says now, also if it is large and stands beside its event."""


class Replayed(msgspec.Struct):
    """The result of a replay."""

    execution: Any
    differences: list[Difference]
    fresh: list[Command]
    """What the code asks for beyond the end of the history."""
    attempts: dict[int, Attempts]
    published: dict[str, msgspec.Raw]
    cancel_at: int = 0
    """When the cancel was requested, if it was."""
    retried: bool = False
    """Whether the run was ever retried."""
    spins: bool = False
    """Whether the code did not come to rest."""
    accepted: dict[int, str] = {}
    """The differences that a person has accepted."""
    first_checkpoint: int = 0
    """The number of the first checkpoint's event, if there is one."""


def first_run(execution: Execution, started: Recorded) -> Replayed:
    """Run the code of a new run to its first rest: there is nothing to compare it with yet."""
    try:
        execution.begin(started.body, started.at)
        return Replayed(execution, [], execution.take_commands(), {}, published_before(started))
    except SpinningWorkflow:
        return Replayed(execution, [], [], {}, {}, spins=True)
    except BaseException:  # it was stopped: the code must not come to life again when it is dropped
        execution.evict()
        raise


class Followed:
    """The recorded definition of a run's graph, and its recorded moves by the visits that they came after."""

    def __init__(self, started: ev.GraphStarted) -> None:
        self.started = started
        self.moves: dict[str, ev.GraphMoved] = {}


def followed_by(history: Sequence[Recorded], void: Set[int]) -> Followed | None:
    """Return what a history says of its graph, without what no longer counts; None if it has none."""
    found: Followed | None = None
    for seq, kind, _, _, body in history:
        if kind == "graph_started":
            found = Followed(body)
        elif kind == "graph_moved" and found is not None and seq not in void:
            found.moves[body.after] = body
    return found


def follow_id(execution: Execution, asked: Any, id: str) -> None:
    """Let an approval have its recorded id: an older release made another one of equal arguments."""
    asked.id = id
    execution.receiving.follow(asked, APPROVAL + id)
