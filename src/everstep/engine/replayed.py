"""What a replay comes to: the code at its last rest, and what is known of the run by then."""

from typing import Any

import msgspec

from everstep.engine.agreement import published_before
from everstep.engine.commands import Command, Difference
from everstep.engine.due import Attempts
from everstep.engine.execution import Execution
from everstep.engine.history import Recorded
from everstep.engine.loop import SpinningWorkflow


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
    except SpinningWorkflow:
        return Replayed(execution, [], [], {}, {}, spins=True)
    return Replayed(execution, [], execution.take_commands(), {}, published_before(started))
