"""What recorded events say about the code that led to them."""

from typing import Final

from everstep.codec import without_internals
from everstep.engine.history.verify import Recorded
from everstep.model.contracts import KEPT
from everstep.model.events import ENDS
from everstep.model.secrets import HIDDEN

COMMANDS: Final = frozenset(
    {
        "step_cancelled",
        "timer_started",
        "signal_awaited",
        "signal_rejected",
        "value_converted",
        "child_started",
        "child_cancelled",
        "value_published",
        "witness_taken",
        "witness_changed",
        "witness_released",
        "charged",
        "budget_narrowed",
        "checkpoint_taken",
        "request_awaited",
        "request_answered",
        "approval_asked",
        "approval_withdrawn",
        "stream_appended",
        "graph_started",
        "graph_moved",
    }
)
"""Events that record commands of the code, except steps and ends."""
FIRST: Final = ("", KEPT)
"""The reasons of a step's first start: the code asked for it. (Any other reason belongs to a later start.)"""


def asks_for_something(event: Recorded) -> bool:
    """Return True if an event is the first that records a command of the code."""
    kind, body = event.kind, event.body
    if kind == "step_started":
        return bool(body.attempt == 1 and body.because in FIRST)
    if kind in ("key_taken", "call_withheld"):
        return not body.again
    return kind in COMMANDS and not (kind == "child_started" and body.withheld)


def stands_for(event: Recorded, kind: str) -> bool:
    """Return True if an event replaces one of another kind: a command that was not begun."""
    if event.kind == "key_taken":
        return kind == "step_started"
    return event.kind == "call_withheld" and kind == event.body.instead_of


def recorded_text(event: Recorded) -> str:
    """Return a recorded event in words."""
    body, kind = event.body, event.kind
    if kind == "call_withheld":
        kind = body.instead_of
    if kind == "run_started":
        return f"start of {body.workflow}"
    if kind in ("step_started", "key_taken"):
        return f"step {event.step}({HIDDEN if body.secret else without_internals(body.preview)}) [{body.effect}]"
    if kind == "timer_started":
        return f"timer of {body.duration / 1e6:g} s"
    if kind == "signal_awaited":
        return f"receive {body.name!r} as {body.type}"
    if kind == "value_converted":
        return f"conversion of {body.what}"
    if kind == "request_awaited":
        return f"requests {body.name!r} as {body.type}"
    if kind == "request_answered":
        return f"{'refusal' if body.refused else 'answer'} of request {body.name!r}"
    if kind == "approval_asked":
        return f"approval of {body.what!r}"
    if kind == "stream_appended":
        return f"entry of stream {body.name!r}"
    if kind == "child_started":
        return f"child run {body.run} of {body.workflow}({without_internals(body.preview)})"
    if kind == "value_published":
        return f"publish {body.name!r}"
    if kind == "checkpoint_taken":
        return f"checkpoint {body.number}"
    if kind == "graph_started":
        return f"graph {body.graph} of {', '.join(body.nodes)}"
    if kind == "graph_moved":
        return f"move of the graph after {body.after or 'its start'} to {', '.join(body.begins) or 'nothing new'}"
    if kind == "compensation_started":
        return "raise an error, and compensate"
    if kind in ENDS:
        return {"run_completed": "return", "run_failed": "raise an error", "run_cancelled": "stop, cancelled"}[kind]
    return f"{kind} {event.step}".strip()
