"""The options of starting a run, for type checkers: a workflow's own arguments are all others."""

from typing import Any, TypedDict

from everstep.engine.code.workflow import OnExisting
from everstep.model.durations import Duration


class StartOptions(TypedDict, total=False):
    """The options of `App.start`, for type checkers."""

    id: str | None
    on_existing: OnExisting | None
    queue: str | None
    priority: int
    delay: Duration
    tags: dict[str, str] | None
    transaction: Any


class RunOptions(TypedDict, total=False):
    """The options of `everstep.run`, for type checkers."""

    id: str | None
    url: str | None
    on_existing: OnExisting | None
