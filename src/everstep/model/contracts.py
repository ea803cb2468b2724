"""Contracts: what a step promises about its effect, and so what recovery may do when its outcome is unknown."""

from typing import Final, Literal

Effect = Literal["read", "repeat", "once", "atomic"]

EFFECTS: Final[tuple[Effect, ...]] = ("read", "repeat", "once", "atomic")

EXPENSIVE_SECONDS: Final = 0.05
"""Duration of a body beyond which its outcome is durable before workflow code sees it."""


def needs_intent(effect: Effect) -> bool:
    """Return True if `step_started` must be durable before the body starts. A read changes nothing, so it
    need not be.
    """
    return effect != "read"


def may_run_again(effect: Effect) -> bool:
    """Return True if a begun step may be run again whatever happened to its last attempt.

    A `once` step is settled first by its probe or a person, and an `atomic` one by its marker.
    """
    return effect in ("read", "repeat")


KEPT: Final = "kept"
"""The reason in a `step_started` whose body does not run: the step was done before the run was retried."""
UNSEEN: Final = ("repaired", "restored")
"""The reasons why a step is in doubt although its history does not mention it: a part of the history is lost."""
