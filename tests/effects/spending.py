"""What the tests of budgets share: an account of their own, made from the raw events."""

from collections.abc import Iterable
from typing import Any

from everstep.model.events import EventRow, decode_body

MICRO = 1_000_000


def charged_in(events: Iterable[EventRow]) -> tuple[float, int, int]:
    """Return what a history says was used: dollars, tokens, attempts. Not by the engine's own accounts.

    An attempt costs what its outcome says, else its estimate, or what was noted of it if that is more. One without an
    outcome costs its estimate.
    """
    usd = tokens = attempts = 0
    open_attempts: dict[int, list[int]] = {}
    for event in events:
        body = decode_body(event.kind, event.body)
        if event.kind == "step_started":
            usd, tokens = _close(open_attempts, body.call, None, usd, tokens)
            cost = body.cost
            open_attempts[body.call] = [
                (cost.microdollars or 0) if cost else 0,
                (cost.tokens or 0) if cost else 0,
                0,
                0,
            ]
            attempts += body.because != "kept"
        elif event.kind in ("step_completed", "step_failed", "attempt_failed"):
            usd, tokens = _close(open_attempts, body.call, body.charged, usd, tokens)
            if event.kind == "attempt_failed":
                open_attempts[body.call] = [0, 0, 0, 0]  # its fallback may be charged as well
        elif event.kind == "call_withheld":
            usd, tokens = _close(open_attempts, body.call, None, usd, tokens)
            open_attempts[body.call] = [0, 0, 0, 0]
        elif event.kind == "attempt_charged" and (body.beside or body.call not in open_attempts):
            usd, tokens = usd + (body.charged.microdollars or 0), tokens + (body.charged.tokens or 0)
        elif event.kind == "attempt_charged":
            open_attempts[body.call][2] += body.charged.microdollars or 0
            open_attempts[body.call][3] += body.charged.tokens or 0
        elif event.kind == "charged":
            usd, tokens = usd + (body.charged.microdollars or 0), tokens + (body.charged.tokens or 0)
        elif event.kind == "child_ended" and body.used is not None:
            usd, tokens = usd + body.used.microdollars, tokens + body.used.tokens
            attempts += body.used.steps
    for call in list(open_attempts):
        usd, tokens = _close(open_attempts, call, None, usd, tokens)
    return usd / MICRO, tokens, attempts


def _close(attempts: dict[int, list[int]], call: int, charged: Any, usd: int, tokens: int) -> tuple[int, int]:
    if call not in attempts:
        return usd + ((charged and charged.microdollars) or 0), tokens + ((charged and charged.tokens) or 0)
    cost_usd, cost_tokens, noted_usd, noted_tokens = attempts.pop(call)
    final_usd, final_tokens = max(cost_usd, noted_usd), max(cost_tokens, noted_tokens)
    if charged is not None and charged.microdollars is not None:
        final_usd = charged.microdollars
    if charged is not None and charged.tokens is not None:
        final_tokens = charged.tokens
    return usd + final_usd, tokens + final_tokens
