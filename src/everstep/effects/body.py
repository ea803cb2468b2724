"""What the body of a step may ask for: its key, its attempt, its heartbeat."""

from types import FrameType
from typing import TYPE_CHECKING, Any

from everstep.effects.surroundings import require
from everstep.errors import Misuse
from everstep.model.digests import step_key

if TYPE_CHECKING:
    from everstep.effects.step import Step


class StepBody:
    """The surroundings of a step's body: one attempt."""

    place = "step"
    __slots__ = ("arguments", "attempt", "details", "entropy", "key_used", "run", "step", "workflow")

    def __init__(
        self, run: str, workflow: str, step: str, arguments: str, entropy: str, attempt: int, details: Any
    ) -> None:
        self.run = run
        self.workflow = workflow
        self.step = step
        self.arguments = arguments
        self.entropy = entropy
        self.attempt = attempt
        self.details = details
        self.key_used = False

    def take_heartbeat(self, details: Any) -> None:
        """Note how far the body is. May be called on any thread."""
        raise AssertionError("an attempt that runs takes heartbeats")

    def take_charge(self, nanos: int | None, tokens: int | None) -> None:
        """Count what the body has used. May be called on any thread."""
        raise AssertionError("an attempt that runs takes charges")

    def call_step(self, step: "Step", args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """A step called by another step's body is the plain function: the outer step's contract covers it."""
        if step.effect in ("once", "atomic"):
            raise Misuse(
                f"{step.name} ({step.effect}) was called inside the step {self.step}: call it in the workflow."
            )
        return step.function(*args, **kwargs)

    def call_workflow(self, workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """A workflow called by a step's body is the plain function."""
        return workflow.function(*args, **kwargs)


def key() -> str:
    """Return the idempotency key of the step whose body this is: the same in every attempt, and in no other step."""
    body: StepBody = require("everstep.key()", StepBody)
    body.key_used = True
    return step_key(body.entropy, body.step, body.arguments)


def heartbeat(details: Any = None) -> None:
    """Say that this step's body is alive, and leave `details` for its next attempt (`everstep.current().details`)."""
    body: StepBody = require("everstep.heartbeat()", StepBody)
    body.take_heartbeat(details)
