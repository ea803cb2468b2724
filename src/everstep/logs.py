"""Say in log records which run, workflow, step and attempt they come from.

import logging
from everstep import logs

handler = logging.StreamHandler()
handler.addFilter(logs.RunFields())
handler.setFormatter(logging.Formatter("%(levelname)s %(run)s %(step)s %(message)s"))
logging.basicConfig(level=logging.INFO, handlers=[handler])
"""

import logging

from everstep.effects.body import StepBody
from everstep.effects.surroundings import CURRENT
from everstep.engine.code.execution import Execution

__all__ = ["RunFields", "fields"]


def fields() -> dict[str, str | int]:
    """Return `run`, `workflow`, `step` and `attempt` of the code that calls this; nothing outside of runs.

    `step` and `attempt` are there in the body of a step only.
    """
    here = CURRENT.get()
    if isinstance(here, StepBody):
        return {"run": here.run, "workflow": here.workflow, "step": here.step, "attempt": here.attempt}
    if isinstance(here, Execution):
        return {"run": here.run, "workflow": here.workflow.name}
    return {}


class RunFields(logging.Filter):
    """A filter for a handler: it lets all records pass, and gives each `run`, `workflow`, `step` and `attempt`.

    Outside of runs, and for `step` and `attempt` outside of steps, these are an empty text and 0, so that a format may
    always name them. A field that the program itself gives with `extra=` stays as it is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields."""
        found = {"run": "", "workflow": "", "step": "", "attempt": 0, **fields()}
        for name, value in found.items():
            record.__dict__.setdefault(name, value)
        return True
