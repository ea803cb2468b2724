"""Contracts: what a step promises about its effect, and so what recovery may do when its outcome is unknown."""

from typing import Final, Literal

Effect = Literal["read", "repeat", "once", "atomic"]

EFFECTS: Final[tuple[Effect, ...]] = ("read", "repeat", "once", "atomic")

EXPENSIVE_SECONDS: Final = 0.05
"""Duration of a body beyond which its outcome is durable before workflow code sees it."""


def needs_intent(effect: Effect) -> bool:
    """Tell whether `step_started` must be durable before the body starts. Reads change nothing, so they need not."""
    return effect != "read"


def may_run_again(effect: Effect) -> bool:
    """Tell whether a begun step may just be run again, whatever became of the attempt before.

    A `once` step is settled first, by its probe or a person, and an `atomic` one by its marker.
    """
    return effect in ("read", "repeat")


KEPT: Final = "kept"
"""Why a step was begun that is not done: an earlier branch of its run has done it."""
UNSEEN: Final = ("repaired", "restored")
"""Why a step is in doubt of which the history knows nothing: a part of the history is lost."""
