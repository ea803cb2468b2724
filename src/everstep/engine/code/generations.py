"""Generations of a run: how its code ends one and begins the next. See `continue_as.py`."""

from typing import TYPE_CHECKING

import msgspec

from everstep.codec import Arguments
from everstep.engine.code.checkpoints import KeptFact
from everstep.engine.code.commands import EndRun
from everstep.model import events as ev
from everstep.model.carried import Carried
from everstep.model.untrusted import members_of

if TYPE_CHECKING:  # a real cycle: an execution has this, and hands itself to it with each call
    from everstep.engine.code.execution import Execution


class Continue(BaseException):
    """Unwinds the code that said `continue_as`. Not an `Exception`, so that `except Exception` lets it pass."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__("the run continues with a fresh history")
        self.arguments = arguments


class ContinueRun(EndRun):
    """The code is done, and its run continues with other arguments and a fresh history."""

    __slots__ = ("arguments",)

    def __init__(self, arguments: Arguments) -> None:
        super().__init__("run_continued")
        self.arguments = arguments

    def body(self) -> ev.RunContinued:
        return ev.RunContinued(self.arguments.digest)

    def compare(self, recorded: ev.RunContinued) -> tuple[str, bool]:
        return ("", False) if recorded.arguments == self.arguments.digest else ("arguments", False)

    def text(self) -> str:
        return "continue with a fresh history"


def continued_by(error: BaseException | None) -> Continue | None:
    """Return the `continue_as` that ended the code, if one did; also from inside an `asyncio.TaskGroup`."""
    while error is not None and len(members := members_of(error)) == 1:
        error = members[0]
    return error if type(error) is Continue else None


def take_along(execution: "Execution", carried: Carried) -> None:
    """Give a new generation what the previous one had."""
    execution.note_lost(carried.caution, set(carried.unseen_workers))
    execution.saga.uncompensated = list(carried.uncompensated)
    execution.saga.take_along(carried.undoable)
    execution.receiving.restore(carried.signals)
    if carried.requests:
        execution.receiving.requests_of_run().restore(carried.requests)
    for subject, fact in carried.facts.items():
        execution.remember(subject, msgspec.json.decode(bytes(fact), type=KeptFact).taken(None))
