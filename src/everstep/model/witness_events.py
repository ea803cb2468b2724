"""The bodies of events about facts of the outside that a run remembers."""

from typing import Any

import msgspec

from everstep.model.event_base import NO_PAYLOAD, Body


class WitnessTaken(Body):
    """The run remembers a fact about the outside, and is held when it is no longer true (or as `on_drift` says).

    `on_drift` is `hold`, `fail`, `ignore`, or the name of the function that decides.
    """

    call: int
    subject: str
    on_drift: str = "hold"
    fact: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    source: str = ""
    recipe: list[Any] = []
    """How the witness was made, where its subject does not say it. A process without the run's code needs it to
    compare.
    """


class WitnessChanged(Body):
    """The run itself changed a file: folders that it remembers, and that contain the file, are updated as well.

    `digest` is that of the new content; empty if the file is gone, `folder` if a folder was made there.
    """

    call: int
    path: str
    digest: str = ""
    source: str = ""


class WitnessReleased(Body):
    """The run no longer remembers a fact."""

    call: int
    subject: str
    source: str = ""


class DriftJudged(Body):
    """A function decided what a drifted fact means (`expect(…, on_drift=function)`).

    `decision` is `accept` (`fact` is remembered from now on), `ignore` (while the fact stays so), `hold` or `fail`.
    """

    subject: str
    decision: str
    by: str = ""
    """The function's name."""
    why: str = ""
    """What went wrong, if it could not decide."""
    fact: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
