"""What the tests of once steps share: a payment."""

from typing import Any

import everstep
from everstep import Fatal, NotDone, step, workflow
from everstep.errors import StepTimedOut
from tests.worlds.ledger import NOTES


class Refused(Exception):
    """The receiver said no before it did anything."""


def failing(*errors: BaseException | None, **options: Any) -> Any:
    """Return a workflow with one `once` step that raises these, one after the other; None is a success."""
    left = list(errors)

    @step(effect="once", **options)
    async def pay(amount: int) -> str:
        NOTES.append(f"{everstep.current().attempt} {everstep.key()}")
        error = left.pop(0)
        if error is not None:
            raise error
        return f"paid {amount}"

    @workflow
    async def flow() -> str:
        try:
            return await pay(3)
        except (Fatal, NotDone, Refused, StepTimedOut) as error:
            return f"caught {type(error).__name__}"

    return flow
