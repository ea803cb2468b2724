"""What graphs of tests charge: a step that must not happen twice, and an account of it in memory."""

import operator
from typing import Annotated, Any, TypedDict

import everstep
from tests.worlds.ledger import DONE

THREAD: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    log: Annotated[list[Any], operator.add]
    amount: int


@everstep.step(effect="once")
def charge(amount: int) -> str:
    DONE.append(amount)
    return f"charged {amount}"
