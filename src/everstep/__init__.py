"""Everstep: Python programs of many steps that survive anything that kills them.

Two decorators make a program durable: `@step` for what touches the outside, `@workflow` for what calls the steps.
`everstep.run(workflow, …, id="…")` runs it; run the script again after a crash and it continues where it was.
"""

from typing import TYPE_CHECKING, Any

from everstep import errors
from everstep.codec import Live, register
from everstep.effects.body import heartbeat, key
from everstep.effects.step import step
from everstep.engine.code.workflow import workflow
from everstep.errors import BudgetExceeded, Error, Evicted, Fatal, NotDone
from everstep.model.retry import Retry

if TYPE_CHECKING:  # start-up: `__getattr__` loads these when they are first used
    from everstep import blocking, files, logs, witness
    from everstep.effects.answers import Done, Unknown
    from everstep.effects.charging import charge
    from everstep.effects.databases import STORE
    from everstep.effects.transaction import transaction
    from everstep.engine.app.app import App
    from everstep.engine.app.client import Client, connect
    from everstep.engine.app.handles import Run
    from everstep.engine.app.opening import open, run  # noqa: A004  # everstep.open, as users type it
    from everstep.engine.code.api import (
        checkpoint,
        current,
        expect,
        now,
        patched,
        publish,
        random,
        receive,
        release,
        requests,
        sleep,
        start,
        uuid,
    )
    from everstep.engine.code.approvals import approval
    from everstep.engine.code.budget_block import budget
    from everstep.engine.code.continue_as import continue_as
    from everstep.engine.code.streams import stream
    from everstep.engine.code.tools import tool
    from everstep.engine.process.webhooks import Webhook, verify_webhook
    from everstep.engine.verbs.schedules import Schedule
    from everstep.graph.graph import Graph
    from everstep.graph.pipeline import pipeline
    from everstep.model.budgets import Budget
    from everstep.model.retention import Retention

__version__ = "0.1.0"

__all__ = [
    "STORE",
    "App",
    "Budget",
    "BudgetExceeded",
    "Client",
    "Done",
    "Error",
    "Evicted",
    "Fatal",
    "Graph",
    "Live",
    "NotDone",
    "Retention",
    "Retry",
    "Run",
    "Schedule",
    "Unknown",
    "Webhook",
    "approval",
    "blocking",
    "budget",
    "charge",
    "checkpoint",
    "connect",
    "continue_as",
    "current",
    "errors",
    "expect",
    "files",
    "heartbeat",
    "key",
    "logs",
    "now",
    "open",
    "patched",
    "pipeline",
    "publish",
    "random",
    "receive",
    "register",
    "release",
    "requests",
    "run",
    "sleep",
    "start",
    "step",
    "stream",
    "tool",
    "transaction",
    "uuid",
    "verify_webhook",
    "witness",
    "workflow",
]

_INSIDE = (
    "checkpoint",
    "current",
    "expect",
    "release",
    "now",
    "patched",
    "publish",
    "random",
    "receive",
    "requests",
    "sleep",
    "start",
    "uuid",
)
_LATER = {
    "App": "everstep.engine.app.app",
    "Graph": "everstep.graph.graph",
    "Budget": "everstep.model.budgets",
    "Retention": "everstep.model.retention",
    "Run": "everstep.engine.app.handles",
    "STORE": "everstep.effects.databases",
    "Schedule": "everstep.engine.verbs.schedules",
    **dict.fromkeys(("Done", "Unknown"), "everstep.effects.answers"),
    **dict.fromkeys(("Client", "connect"), "everstep.engine.app.client"),
    "approval": "everstep.engine.code.approvals",
    "budget": "everstep.engine.code.budget_block",
    "charge": "everstep.effects.charging",
    "continue_as": "everstep.engine.code.continue_as",
    "open": "everstep.engine.app.opening",
    "pipeline": "everstep.graph.pipeline",
    "run": "everstep.engine.app.opening",
    "stream": "everstep.engine.code.streams",
    "tool": "everstep.engine.code.tools",
    "transaction": "everstep.effects.transaction",
    **dict.fromkeys(("Webhook", "verify_webhook"), "everstep.engine.process.webhooks"),
    **dict.fromkeys(_INSIDE, "everstep.engine.code.api"),
}


def __getattr__(name: str) -> Any:
    """Load what only some programs need when it is first used, and the engine when the first run is started."""
    from importlib import import_module

    from everstep.model.collector import paused_collector  # at the top it would be a public name

    if name in ("blocking", "files", "logs", "witness"):
        return import_module(f"everstep.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    with paused_collector():
        value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those that are not loaded yet, and no others."""
    return sorted([*__all__, "__version__"])
