"""Everstep: Python programs of many steps that survive anything that kills them.

Two decorators make a program durable: `@step` for what touches the outside, `@workflow` for what calls the steps.
`everstep.run(workflow, …, id="…")` runs it; run the script again after a crash and it goes on from where it was.
"""

from everstep import blocking, errors
from everstep.codec import Live, register
from everstep.effects.body import heartbeat, key
from everstep.effects.step import step
from everstep.engine.app import App
from everstep.engine.handles import Run
from everstep.engine.inside import current, now, patched, publish, random, receive, sleep, start, uuid
from everstep.engine.opening import open, run  # noqa: A004  # everstep.open, as users type it
from everstep.engine.workflow import workflow
from everstep.errors import Error, Evicted, Fatal, NotDone
from everstep.model.retry import Retry

__version__ = "0.1.0"

__all__ = [
    "App",
    "Error",
    "Evicted",
    "Fatal",
    "Live",
    "NotDone",
    "Retry",
    "Run",
    "blocking",
    "current",
    "errors",
    "heartbeat",
    "key",
    "now",
    "open",
    "patched",
    "publish",
    "random",
    "receive",
    "register",
    "run",
    "sleep",
    "start",
    "step",
    "uuid",
    "workflow",
]
