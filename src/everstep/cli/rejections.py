"""Whether a run rejected what was sent to it, as far as that is known within a moment."""

import asyncio
import time
from typing import Final

from everstep.cli.resolving import is_served_here
from everstep.cli.terminal import clean, console, styled
from everstep.engine.app.app import App
from everstep.view.run import why_rejected

WAIT_SECONDS: Final = 2.0
"""How long a command waits for a run to take what it sent, in seconds."""
POLL_SECONDS: Final = 0.03


async def rejection_of(app: App, run: str, name: str) -> str:
    """Return why a run has rejected the newest signal of a name; nothing if it did not, or has not taken it yet."""
    row = app.store.run(run)
    if row is None or row.status not in ("running", "waiting", "queued") or not is_served_here(app):
        return ""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        sent = [one for one in app.store.signals(run) if one.name == name and one.kind == "signal"]
        if not sent:
            return ""
        if sent[-1].state != "pending":
            return why_rejected(app.store, run, sent[-1].number)
        await asyncio.sleep(POLL_SECONDS)
    return ""


def say_rejected(run: str, what: str, why: str) -> None:
    """Print that a run has rejected something, and what that means."""
    console().print(styled("✗ ", "red").append(f"{clean(run)} rejected {clean(what)}: {clean(why)}"))
    console().print(styled("  The run keeps waiting. Send another value.", "dim"))
