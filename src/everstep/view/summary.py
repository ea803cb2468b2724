"""A run in a list: what its row says."""

from typing import Any

import msgspec

from everstep.codec.preview import without_internals
from everstep.stores.protocol import RunRow
from everstep.view.fields import made_of
from everstep.view.money import budget_facts
from everstep.view.plain import payload_json


class RunSummary(msgspec.Struct, kw_only=True):
    """A run, as `everstep ls --json` says it. Times are microseconds since 1970."""

    id: str
    workflow: str
    version: str
    status: str
    generation: int
    current_step: str
    parent: str | None
    tags: dict[str, str]
    queue: str
    priority: int
    arguments: str
    """A preview of them."""
    events: int
    created_at: int
    updated_at: int
    ended_at: int | None
    wake_at: int | None
    published: dict[str, Any]
    budget: dict[str, Any] | None
    """What was used, of how much; None if it has no budget."""


def summary_of(row: RunRow) -> RunSummary:
    """Return what a run's row says."""
    return made_of(RunSummary, row, **facts_of(row))


def facts_of(row: RunRow) -> dict[str, Any]:
    """Return what a summary has under other names than the row, or in another form."""
    facts: dict[str, Any] = {"arguments": without_internals(row.preview), "events": row.head_seq}
    return facts | {"published": published_of(row), "budget": budget_facts(row)}


def published_of(row: RunRow) -> dict[str, Any]:
    """Return the values that a run has published, as plain data."""
    try:
        values = msgspec.json.decode(row.published or b"{}", type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {name: payload_json(bytes(payload)) for name, payload in values.items()}
