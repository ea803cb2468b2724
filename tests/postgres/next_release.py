"""A worker of a release that does not exist yet: its schema has one more column, and its histories one more event.

    python next_release.py URL           migrate, and drive what is there
    python next_release.py URL breaking  the same, with a migration that older releases cannot live with

A run that is told to go on with the signal `go` gets an event `flavour_noted` before it does.
"""

import asyncio
import sys
from typing import Any

from everstep.engine.run import driver
from everstep.model import events
from everstep.model.event_base import Body
from everstep.stores.postgres import opening
from everstep.stores.sql.migrations import COMPATIBLE


class FlavourNoted(Body):
    """What this release notes and the present one does not know."""

    flavour: str = ""


def become_next_release(*, breaking: bool) -> None:
    """Change what stands in memory of the present release."""
    older = opening.migrations

    def migrations(schema: str) -> list[str]:
        words = "" if breaking else COMPATIBLE
        return [*older(schema), f'{words}\nALTER TABLE "{schema}".runs ADD COLUMN flavour text;']

    opening.migrations = migrations  # type: ignore[assignment]
    events.BODIES["flavour_noted"] = FlavourNoted
    deliver = driver.Driver.deliver

    def delivers(self: Any, kind: str, step: str, body: Any, *, expensive: bool = False) -> None:
        if kind == "signal_received" and not self.stopped:
            self.record("flavour_noted", "", FlavourNoted("sweet"))
        deliver(self, kind, step, body, expensive=expensive)

    driver.Driver.deliver = delivers  # type: ignore[method-assign]


if __name__ == "__main__":
    become_next_release(breaking="breaking" in sys.argv)
    from payments import drive

    asyncio.run(drive(sys.argv[1]))
