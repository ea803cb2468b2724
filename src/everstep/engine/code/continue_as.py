"""`continue_as`: the same run continues with a fresh history, a new *generation* of it."""

import sys
from typing import Any, Final, NoReturn

from everstep.effects.surroundings import persons_line
from everstep.effects.witnesses import recipe_of
from everstep.engine.code.checkpoints import under_way
from everstep.engine.code.execution import Execution, current_execution
from everstep.engine.code.generations import Continue
from everstep.engine.code.saga import cannot_be_carried
from everstep.errors import Misuse

STOPPING = ("cancel_requested", "rollback_requested")
UNDOABLE_MAX: Final = 1000
"""The maximum number of completed steps with a compensation that are carried over: each new history begins with
them.
"""


def continue_as(*args: Any, **kwargs: Any) -> NoReturn:
    """End this history and continue the same run with a fresh one: the workflow is called again, with these arguments.

        @workflow
        async def watch(seen: int) -> None:
            for _ in range(1000):
                seen += await look()
            everstep.continue_as(seen)

    It never returns. The run keeps its id, its tags, its timeout, its budget and what it has used of it, what it
    published, the facts that it remembers (`expect`), and signals and requests that the code has not received. A
    request that was taken has to be answered first. Its streams continue. Nothing else may be in progress: a step,
    timer, `receive`, task or child that was begun and not awaited is `Misuse`. Completed steps with a compensation are
    undone as well when a later generation fails or is rolled back; so they must be declared steps, and what they are
    given must be stored: a bound method, or one with `Live` arguments, is `Misuse`.
    """
    execution = current_execution("everstep.continue_as()")
    execution.require_live()
    source = persons_line(sys._getframe(1))
    _refuse(execution, f"{source} — " if source else "")
    workflow = execution.workflow
    raise Continue(execution.codec.encode_arguments(workflow.signature, args, kwargs, workflow.name))


def _refuse(execution: "Execution", at: str) -> None:
    """Raise `Misuse` if the run has anything that a fresh history could not continue."""
    if found := under_way(execution):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise Misuse(
            f"{at}everstep.continue_as() with something else under way ({listed}): a fresh history would not know of "
            "it. Await it or cancel it before, and call continue_as from the workflow's own task."
        )
    _refuse_undoable(execution, at)
    for subject, taken in execution.witnesses.items():
        if taken.judge is not None or recipe_of(taken.witness) is None:
            raise Misuse(
                f"{at}everstep.continue_as() of a run that remembers {subject}, which could not be observed again, or "
                "not judged, without the code that expects it. `release` it before, and `expect` it again."
            )


def _refuse_undoable(execution: "Execution", at: str) -> None:
    """Raise `Misuse` if a later generation could not compensate what was done, or would have to carry too much."""
    done = execution.saga.completed
    for one in done.values():
        if why := cannot_be_carried(one):
            raise Misuse(
                f"{at}everstep.continue_as() after {one.title}, which has a compensation and {why}: only this history "
                "could undo it. Do such steps in a child run, and await it."
            )
    if len(done) > UNDOABLE_MAX:
        raise Misuse(
            f"{at}everstep.continue_as() with {len(done)} completed steps that have a compensation: each history would "
            f"begin with all of them, and {UNDOABLE_MAX} is the most. Do such steps in child runs, and await them."
        )
