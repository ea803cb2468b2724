"""What `everstep doctor` finds."""

from typing import Literal

import msgspec

from everstep.cli.workers import troubles_in
from everstep.stores.protocol import WorkerRow

Verdict = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    text: str


def about_troubles(row: WorkerRow, now: int) -> list[Finding]:
    """Say what a worker could not do in the background."""
    return [Finding("background", "warning", f"{row.id}: {line}") for line in troubles_in(row, now)]
