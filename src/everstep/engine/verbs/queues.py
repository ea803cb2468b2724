"""Changing the settings of a queue or a limit."""

from collections.abc import Sequence
from typing import Any, Final

from everstep.engine.process.host import Host
from everstep.errors import Misuse, UnknownQueue
from everstep.model.ids import checked_name
from everstep.model.options import checked_flag, checked_seconds, checked_whole, refused
from everstep.stores.rows.queues import DEFAULT_QUEUE, ChangeQueue, QueueCount, QueueKind, QueueRow

UNSAID: Final = ...
"""An option that was not given: the setting stays."""


def _checked_count(option: str, value: Any, least: int = 1) -> int | None:
    return None if value is None else checked_whole(option, value, least=least, most=2**31)


def _rate_changes(rate: Any) -> dict[str, Any]:
    if rate is None:
        return {"rate": None}
    if not (isinstance(rate, tuple | list) and len(rate) == 2):
        raise refused("rate", rate, "it is (how many, in how many seconds), such as (10, 60), or None for no limit")
    count, seconds = rate
    checked_whole("rate", count, least=1, most=2**31)
    return {"rate": count, "seconds": float(checked_seconds("rate", seconds, above=True, example=60))}


def changes_of(**options: Any) -> dict[str, Any]:
    """Return the changes of a queue or limit from given options. Raises `Misuse` for an invalid one."""
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if value is UNSAID:
            continue
        if name == "rate":
            changes |= _rate_changes(value)
        elif name == "paused":
            changes[name] = checked_flag("paused", value)
        else:
            changes[name] = _checked_count(name, value, 0 if name == "concurrency" else 1)
    return changes


async def change(app: Host, kind: QueueKind, name: str, changes: dict[str, Any]) -> QueueRow:
    """Change the settings of a queue or limit, durably, and return all of them."""
    checked_name(name, kind)
    if kind == "queue" and name == DEFAULT_QUEUE:
        raise Misuse(
            f"Runs of the queue {DEFAULT_QUEUE!r} do not wait. Give their workflow or `start` another `queue=`."
        )
    known = await app.read(row_of, app, kind, name)
    if changes or known is None:
        await app.committer.submit(ChangeQueue(kind, name, changes, app.clock.now()))
        app.pump.nudge()
    row = await app.read(row_of, app, kind, name)
    assert row is not None
    return row


def row_of(app: Host, kind: QueueKind, name: str) -> QueueRow | None:
    """Return the settings of a queue or limit, or None."""
    return next((row for row in app.store.queues() if (row.kind, row.name) == (kind, name)), None)


def existing(rows: Sequence[QueueRow], counts: Sequence[QueueCount], name: str) -> None:
    """Raise `UnknownQueue` if a queue or limit has no settings and no runs."""
    names = sorted({row.name for row in rows} | {count.name for count in counts})
    if name not in names:
        raise UnknownQueue(f"There is no queue or limit {name!r}. There are: {', '.join(names) or 'none'}.")
