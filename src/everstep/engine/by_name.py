"""Workflows by their names, for whoever has not got their code."""

import random
from typing import Any, Final

from everstep.codec import Signature
from everstep.engine.workflow import DECLARED, Workflow, workflow_of
from everstep.errors import UnknownWorkflow
from everstep.model.ids import checked_name


def _unknown(*args: Any) -> Any:
    """Stand for a function of which nothing is known but its name."""


ANYTHING: Final = Signature(_unknown)
"""Takes any arguments, as they are."""


class NamedWorkflow:
    """A workflow of which nothing is known here but its name. What its code declares is not known: timeout, budget."""

    def __init__(self, name: str, *, version: str = "", queue: str = "default", timeout: float | None = None) -> None:
        self.name = checked_name(name, "workflow")
        self.version = version
        self.queue = queue
        self.timeout = timeout
        self.budget = None
        self.signature = ANYTHING
        last = name.rpartition(".")[2]
        self.id_prefix = "".join(c if c.isascii() and c.isalnum() else "-" for c in last)[:60].strip("-") or "run"


def new_run_id(workflow: Workflow | NamedWorkflow, at: int, randomness: random.Random) -> str:
    """Return an id that nobody has: the time leads, so that runs of one time lie side by side in the store."""
    return f"{workflow.id_prefix}-{at // 1000:011x}{randomness.getrandbits(40):010x}"


def target_of(workflow: Any) -> Workflow | NamedWorkflow:
    """Return the workflow that a caller names: the declared one, or if only its name is known here that."""
    if isinstance(workflow, str) and workflow not in DECLARED.names():
        try:
            return workflow_of(workflow)  # raises if two files declare this name
        except UnknownWorkflow:
            return NamedWorkflow(workflow)
    return workflow_of(workflow)
