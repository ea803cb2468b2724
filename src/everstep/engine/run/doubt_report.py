"""What a history knows about an attempt in doubt: who began it and when, and how that was found out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.codec import error_facts
from everstep.errors import StoreError
from everstep.model.contracts import UNSEEN
from everstep.model.events import EventRow, decode_body
from everstep.model.secrets import shown_error
from everstep.stores.brief import Busy, briefly

if TYPE_CHECKING:
    from everstep.engine.run.driver import Driver


ERROR_CHARACTERS_MAX = 300


def account_of(driver: "Driver", call: int) -> dict[str, Any]:
    """Return what is known about the last attempt at a step. Less, if the store cannot be read just now.

    With a crash: its process gave its last sign of life at `last_sign_at`, and was found to be gone at `doubted_at`.
    """
    try:
        stored = briefly(driver.app.store.events, driver.run, driver.journal.generation)
    except (Busy, StoreError):
        stored = []
    last = stored[-1].seq if stored else 0
    told = told_by([*stored, *(event for event in driver.journal.unsaved if event.seq > last)], call)
    known = driver.attempts.of(call)
    if not stored and known is not None and known.by:
        return {"worker": known.by, **process_of(known.by), **told}
    return told


def told_by(events: Iterable[EventRow], call: int) -> dict[str, Any]:
    """Return what events say about the last attempt at a step."""
    account: dict[str, Any] = {}
    last_at = started = 0
    for event in events:
        if event.kind in ("step_started", "step_doubted"):
            body = decode_body(event.kind, event.body)
            if body.call == call and event.kind == "step_started":
                account = {"worker": body.by, **process_of(body.by), "began_at": event.at}
                started = event.seq
            elif body.call == call:
                if body.because in UNSEEN and event.seq == started + 1:
                    account = {"worker": ""}  # it was asked about first, and nobody here has begun it
                account |= {"because": body.because, "doubted_at": event.at}
                if body.because == "crash":
                    account["last_sign_at"] = last_at
                elif error := _error_text(body):
                    account["error"] = error
        last_at = event.at
    return account


def process_of(worker: str) -> dict[str, Any]:
    """Return the process and the machine that a worker's id names."""
    parts = worker.rsplit("-", 3)
    return {"pid": int(parts[1]), "host": parts[0]} if len(parts) == 4 and parts[1].isdigit() else {}


def _error_text(body: Any) -> str:
    if body.ref or not bytes(body.error):
        return ""
    try:
        facts = shown_error(error_facts(bytes(body.error)), secret=body.secret)
    except msgspec.MsgspecError:
        return ""
    text = f"{facts.get('type', '')}: {facts.get('message', '')}".strip(": ")
    return text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[: ERROR_CHARACTERS_MAX - 1]}…"
