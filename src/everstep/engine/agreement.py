"""A run's row and its history tell the same story, or one of them is damaged.

The row repeats much of what the events say, so that it can be found, listed and answered from. What it repeats is
compared whenever the run is taken up, and before a result is given from it: workflow, version and semantics, parent,
arguments, the start, the status, the outcome, the end, published values, how the budget stands. The rest of a row
decides only when and by whom a run is driven (epoch, owner, wake-up time, queue, priority, deaths), or is a label
(tags, current step): no result depends on it.
"""

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.errors import Damaged
from everstep.model.digests import digest_of
from everstep.model.events import ENDS, ValuePublished
from everstep.model.status import ENDED, STATUSES
from everstep.stores.protocol import RunRow

if TYPE_CHECKING:
    from everstep.engine.history import Recorded

PREVIEW_BYTES = 160


def preview_text(payload: bytes) -> str:
    """Return the bounded text of arguments that rows and events keep."""
    return payload[:PREVIEW_BYTES].decode("utf-8", "replace")


def refuse_unreadable(row: RunRow) -> None:
    """Raise `Damaged` if a row cannot be read, or has a status that there is not."""
    if row.damage:
        raise Damaged(f"The row of run {row.id} is damaged: {row.damage}.")
    if row.status not in STATUSES:
        raise Damaged(f"The row of run {row.id} is damaged: there is no status {row.status!r}.")


def compare_ends(row: RunRow, first: "Recorded", last: "Recorded") -> None:
    """Raise `Damaged` if the row tells another story than the first and the last event: another run, another end."""
    started = first.body
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("workflow", started.workflow, row.workflow),
        ("version", started.version, row.version),
        ("semantics", started.semantics, row.semantics),
        ("parent", started.parent, row.parent or ""),
        ("arguments", started.digest, row.arguments),
        ("start", created_at(first), row.created_at),
    )
    for what, recorded, said in pairs:
        if recorded != said:
            raise Damaged(f"The row of run {row.id} has another {what} than its history.", last.seq)
    if not started.arguments_ref:
        compare_preview(row, bytes(started.arguments))
    ended = last.kind.removeprefix("run_") if last.kind in ENDS else ""
    if ended != (row.status if row.status in ENDED else "") or says_held(last) > (row.status == "held"):
        raise Damaged(f"The row of run {row.id} says {row.status}, but its history ends with {last.kind}.", last.seq)
    if row.ended_at != (last.at if ended else None):
        raise Damaged(f"The row of run {row.id} has another end than its history.", last.seq)
    if not is_outcome_of(last, row.outcome):
        raise Damaged(f"The row of run {row.id} has another outcome than its history.", last.seq)


def created_at(first: "Recorded") -> int:
    """Return when a run was started, by the first event of its newest history."""
    started = first.body
    if started.forked is not None:
        return int(started.forked.at)
    return int(started.carried.created_at if started.carried is not None else first.at)


def says_held(last: "Recorded") -> bool:
    """Tell whether a history that ends so is that of a run which waits for a person."""
    return last.kind == "run_held" or (last.kind == "run_repaired" and last.body.status == "held")


def is_outcome_of(last: "Recorded", outcome: bytes | None) -> bool:
    """Tell whether a payload is what an end says that the run returned or raised; nothing if it does neither."""
    if last.kind not in ("run_completed", "run_failed"):
        return outcome is None
    payload = bytes(last.body.value if last.kind == "run_completed" else last.body.error)
    if last.body.ref:
        return digest_of(outcome or b"").hex() == str(last.body.ref)
    return (outcome or b"") == payload


def compare_preview(row: RunRow, payload: bytes) -> None:
    """Raise `Damaged` if the row shows other arguments than the run was started with."""
    if row.preview != preview_text(payload):
        raise Damaged(f"The row of run {row.id} shows other arguments than its history.", row.head_seq)


def compare_published(row: RunRow, expected: Mapping[str, Any], last: int) -> None:
    """Raise `Damaged` if the row has other published values than the history, which ends with event `last`."""
    if row.published is None and not expected:
        return
    try:
        values = msgspec.json.decode(row.published or b"{}", type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        values = {}
    sound = values.keys() == expected.keys() and all(
        digest_of(bytes(values[name])).hex() == body.ref if body.ref else bytes(values[name]) == bytes(body.value)
        for name, body in expected.items()
    )
    if not sound:
        raise Damaged(f"The row of run {row.id} has other published values than its history.", last)


def compare_budget(row: RunRow, expected: bytes | None, last: int) -> None:
    """Raise `Damaged` if the row says that the budget stands otherwise than the history, which ends with `last`."""
    if row.budget != expected:
        raise Damaged(f"The row of run {row.id} tells of another budget than its history.", last)


def published_before(started: "Recorded") -> dict[str, msgspec.Raw]:
    """Return what the run had published before its newest history began."""
    carried = getattr(started.body, "carried", None)
    return dict(carried.published) if carried is not None else {}


_LATER_PUBLISHING = frozenset({"value_published", "run_retried"})
_PUBLISHING = _LATER_PUBLISHING | {"run_started"}


def _publishing(history: Sequence["Recorded"]) -> Sequence["Recorded"]:
    kinds: Set[str] = getattr(history, "kinds", _PUBLISHING)
    if kinds.isdisjoint(_LATER_PUBLISHING):
        return history[:1]  # the first one may bring some along
    return [event for event in history if event[1] in _PUBLISHING]


def published_by(history: Sequence["Recorded"], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the published values as the row has them: all that counted when the newest was published.

    What a retry makes void stays in the row until something is published again. `before` are those that counted before
    the events that are given.
    """
    counted: list[Recorded] = []
    earlier = before or {}
    shown: dict[str, Any] = dict(earlier)
    for event in _publishing(history):
        if event.kind == "run_started" and event.body.carried is not None:
            earlier = {name: ValuePublished(0, name, value) for name, value in published_before(event).items()}
            shown = dict(earlier)
        elif event.kind == "value_published":
            counted.append(event)
            shown = {**earlier, **{one.body.name: one.body for one in counted}}
        elif event.kind == "run_retried":
            counted = [one for one in counted if one.seq < event.body.voids]
    return shown
