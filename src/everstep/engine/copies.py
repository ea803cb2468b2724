"""How a fork is replayed: its first events are another run's, and from then on it is itself."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from everstep.engine.commands import Command, StepCall

if TYPE_CHECKING:
    from everstep.engine.execution import Execution
    from everstep.engine.history import Recorded


def begin_with_copies(
    execution: "Execution", copied: Sequence["Recorded"], forks: Mapping[int, str]
) -> dict[int, tuple[int, str]]:
    """What is copied is not this run's to undo, and its children have ids of the other's. Returns the branches."""
    execution.saga.is_copied = True
    execution.copied_children = {one.body.call: one.body.run for one in copied if one.kind == "child_started"}
    retried = [one.seq for one in copied if one.kind == "run_retried"]
    return {seq: (sum(one <= seq for one in retried), entropy) for seq, entropy in forks.items() if seq > 1}


def fork_off(execution: "Execution", queue: Iterable[Command], entropy: str) -> None:
    """From here on the run is a fork: whatever is not begun yet has keys of its own, and draws other numbers."""
    execution.forget_random()
    for command in queue:
        if isinstance(command, StepCall):
            command.entropy = entropy
