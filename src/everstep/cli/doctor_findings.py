"""The findings of `everstep doctor`."""

from typing import Literal

import msgspec

from everstep.stores.protocol import WorkerRow
from everstep.view.store import worker_view

Verdict = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct):
    """The result of one check."""

    name: str
    verdict: Verdict
    text: str


def about_troubles(row: WorkerRow, now: int) -> list[Finding]:
    """Say what a worker could not do in the background."""
    return [Finding("background", "warning", f"{row.id}: {line}") for line in worker_view(row).sentences(now)]
