"""How a fork is replayed: its first events are another run's, and from then on it is itself."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from everstep.engine.commands import Command, StepCall
from everstep.errors import Misuse
from everstep.model.forked import copied_events

if TYPE_CHECKING:
    from everstep.engine.execution import Execution
    from everstep.engine.history import Recorded


def branches_of(copied: Sequence["Recorded"], forks: Mapping[int, str]) -> dict[int, tuple[int, str]]:
    """Return from which events on the keys are others because the run is a fork: number of the branch and entropy."""
    retried = [one.seq for one in copied if one.kind == "run_retried"]
    return {seq: (sum(one <= seq for one in retried), entropy) for seq, entropy in forks.items() if seq > 1}


def begin_with_copies(execution: "Execution", copied: Iterable["Recorded"]) -> None:
    """What is copied is not this run's to undo, and its children have ids that the other run gave them."""
    execution.saga.is_copied = True
    execution.copied_children = {one.body.call: one.body.run for one in copied if one.kind == "child_started"}


def refuse_copied(run: str, started: Any, voids: int) -> None:
    """Raise `Misuse` if what a retry would do again is another run's: it has that run's keys."""
    if voids <= copied_events(started) and voids > 1:
        raise Misuse(
            f"What failed in {run} was copied from {started.forked.run} (event {voids}), and is that run's to retry. "
            f"Fork {started.forked.run} at an event before it: then the step is done by the fork."
        )


def end_of_copies(execution: "Execution") -> None:
    """What comes from here on is this run's own."""
    execution.saga.is_copied = False
    execution.copied_children = {}


def fork_off(execution: "Execution", queue: Iterable[Command], entropy: str) -> None:
    """From here on the run is a fork: whatever is not begun yet has keys of its own, and draws other numbers."""
    execution.forget_random()
    for command in queue:
        if isinstance(command, StepCall):
            command.entropy = entropy
