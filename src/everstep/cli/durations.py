"""Durations on the command line: `2s`, `1h30m`; where seconds are usual, also `2`."""

from typing import Final

import click

from everstep.model.durations import seconds_in
from everstep.model.options import LONGEST_SECONDS


class Time(click.ParamType):  # type: ignore[type-arg]  # before click 8.4 it takes none
    """A duration such as 30d, 1h30m or 2s.

    bare: a number without a unit is seconds.
    least, most: in seconds.
    """

    name = "time"

    def __init__(self, *, bare: bool = False, least: float = 0.0, most: float = LONGEST_SECONDS) -> None:
        self.bare = bare
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        text = str(value)
        seconds = seconds_in(text)
        if seconds is None and self.bare:
            seconds = seconds_in(f"{text}s")
        if seconds is None:
            example = "2s, 1h30m or 90" if self.bare else "30d, 1h30m or 2s"
            self.fail(f"{text!r} is not a time such as {example}.", param, ctx)
        if not self.least <= seconds <= self.most:
            bounds = f"at least {self.least:g}s" if seconds < self.least else f"at most {self.most:g}s"
            self.fail(f"{text!r} is out of range: it has to be {bounds}.", param, ctx)
        return float(seconds)


AGE: Final = Time()
"""A time that needs its unit: `30` of them could be days."""
