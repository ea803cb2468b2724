"""Comparing runs with the code as it is now, before it is deployed. Writes nothing."""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.codec import Codec
from everstep.engine.code import asyncio_parts
from everstep.engine.code.recovery_point import load_past
from everstep.engine.code.workflow import DECLARED
from everstep.engine.history.verify import read_now
from everstep.engine.run.resume import is_supported, replay
from everstep.errors import Damaged, NotDecodable, NotReadable
from everstep.model.status import ENDED
from everstep.stores.protocol import RunRow, Store


class Comparison(msgspec.Struct):
    """Whether a run would go on with the code that is declared here."""

    run: str
    workflow: str
    status: str
    verdict: str = "goes on"
    differences: list[dict[str, Any]] = []
    patches: dict[str, bool] = {}
    """Patches that it has met, and whether it went the new way."""
    problem: str = ""


class PatchUse(msgspec.Struct):
    """Whether the old way of a patch is still needed."""

    name: str
    can_go: bool
    old_way: list[str]
    """Unfinished runs that went the old way. One that has not come to the patch yet will go the new way."""
    new_way: int


async def compare_runs(store: Store, rows: Sequence[RunRow]) -> list[Comparison]:
    """Replay runs against the code that is declared here."""
    asyncio_parts.install()
    return [_compared(store, row) for row in rows]


def _compared(store: Store, row: RunRow) -> Comparison:
    found = Comparison(row.id, row.workflow, row.status)
    if row.workflow not in DECLARED.names():
        found.verdict = "not declared here"
        return found
    if not is_supported(row):
        found.verdict = "made by a newer release"
        return found
    try:
        row, past = read_now(store, row, lambda now: load_past(store, now))
        workflow = DECLARED.named(row.workflow)
        replayed = replay(store, Codec(), row, workflow, past.events, past.checkpoint, quiet=True)
    except Damaged as damage:
        found.verdict, found.problem = "damaged", str(damage)
    except NotReadable as missing:
        found.verdict, found.problem = "not verified", str(missing)
    except NotDecodable as error:
        found.verdict, found.problem = "diverged", f"the arguments do not fit the code: {error}"
    else:
        found.patches = dict(replayed.execution.patches)
        replayed.execution.evict()
        found.differences = [one._asdict() for one in replayed.differences]
        found.verdict = "diverged" if found.differences else "matches" if row.status in ENDED else "goes on"
    return found


def patches_in(found: Sequence[Comparison]) -> list[PatchUse]:
    """Return each patch that any of the runs has met."""
    uses = []
    for name in sorted({name for one in found for name in one.patches}):
        old = [one.run for one in found if one.patches.get(name) is False and one.status not in ENDED]
        uses.append(PatchUse(name, not old, old, sum(1 for one in found if one.patches.get(name))))
    return uses
