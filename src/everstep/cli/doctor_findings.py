"""The findings of `everstep doctor`."""

from typing import Literal

import msgspec

from everstep.cli.workers import troubles_in
from everstep.stores.protocol import WorkerRow

Verdict = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct):
    """The result of one check."""

    name: str
    verdict: Verdict
    text: str


def about_troubles(row: WorkerRow, now: int) -> list[Finding]:
    """Report what a worker could not do in the background."""
    return [Finding("background", "warning", f"{row.id}: {line}") for line in troubles_in(row, now)]
