"""The bodies of events about facts of the outside that a run remembers."""

from typing import Any

import msgspec

from everstep.model.event_base import NO_PAYLOAD, Body


class WitnessTaken(Body):
    """The run remembers a fact about the outside, and is held when it no longer holds (or as `on_drift` says).

    `on_drift` is `hold`, `fail`, `ignore`, or the name of the function that decides.
    """

    call: int
    subject: str
    on_drift: str = "hold"
    fact: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
    source: str = ""
    recipe: list[Any] = []
    """How the witness was made, where its subject does not say it: for who compares without the run's code."""


class WitnessChanged(Body):
    """The run itself changed a file: folders that it remembers, and that have it, are remembered with it.

    `digest` is that of the new content; empty if the file is gone, `folder` if a folder was made there.
    """

    call: int
    path: str
    digest: str = ""
    source: str = ""


class WitnessReleased(Body):
    """The run no longer cares about a fact."""

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
    """If it could not decide: what went wrong."""
    fact: msgspec.Raw = NO_PAYLOAD
    ref: str = ""
