"""What recorded events say of the code that led to them."""

from collections.abc import Collection, Iterable
from typing import Final

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
"""Events that record what the code asked for, beside steps and ends."""
FIRST: Final = ("", KEPT)
"""Why a step was begun for the first time: the code asked for it. (What has another reason came later.)"""


def asks_for_something(event: Recorded) -> bool:
    """Tell whether an event is the first that records something which the code asked for."""
    kind, body = event.kind, event.body
    if kind == "step_started":
        return bool(body.attempt == 1 and body.because in FIRST)
    if kind in ("key_taken", "call_withheld"):
        return not body.again
    return kind in COMMANDS and not (kind == "child_started" and body.withheld)


def stands_for(event: Recorded, kind: str) -> bool:
    """Tell whether an event stands where one of another kind would: something that was asked for, and not begun."""
    if event.kind == "key_taken":
        return kind == "step_started"
    return event.kind == "call_withheld" and kind == event.body.instead_of


def finished_calls(history: Iterable[Recorded], void: Collection[int] = ()) -> set[int]:
    """Return the steps and children of which no attempt is made any more; `void` are events that no longer count.

    A person may accept other arguments of these, and of no others: the next attempt at an unfinished one would present
    another key than the attempts before it, which may have acted.
    """
    begun: set[int] = set()
    finished: set[int] = set()
    for seq, kind, _, _, body in history:
        if seq in void:
            continue
        if kind == "step_started":
            begun.add(body.call)
        elif kind in ("step_completed", "step_failed", "step_shared", "child_ended"):
            finished.add(body.call)
        elif kind == "step_cancelled":
            finished.add(body.step_call)
        elif kind == "compensation_started":
            finished |= begun  # the code is gone, and with it what it waited for
    return finished


def recorded_text(event: Recorded) -> str:
    """Return a recorded event as a person would say it."""
    body, kind = event.body, event.kind
    if kind == "call_withheld":
        kind = body.instead_of
    if kind == "run_started":
        return f"start of {body.workflow}"
    if kind in ("step_started", "key_taken"):
        return f"step {event.step}({HIDDEN if body.secret else body.preview}) [{body.effect}]"
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
        return f"child run {body.run} of {body.workflow}({body.preview})"
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
