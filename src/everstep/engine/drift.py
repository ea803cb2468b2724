"""Before a run goes on, the outside is compared with what the run remembers of it. Nothing is changed by that.

Observations are made after the replay, which touches nothing, and before anything is settled or done: so the witnesses
are those of the code itself, with their functions. See docs/decisions/0013.
"""

import asyncio
import difflib
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.effects.files import as_bytes
from everstep.effects.witnesses import file_fact
from everstep.engine.holding import HoldReport

if TYPE_CHECKING:
    from everstep.engine.driver import Surrounding
    from everstep.engine.execution import Execution, Taken


class Drifted(msgspec.Struct):
    """A witness that no longer holds."""

    subject: str
    on_drift: str
    remembered: Any
    now: Any
    difference: str
    payload: bytes = b""


async def find_drift(app: "Surrounding", execution: "Execution") -> list[Drifted]:
    """Observe every fact that the run remembers and return those that are others now."""
    intended = _intended_facts(execution)
    drifted: list[Drifted] = []
    for subject, taken in list(execution.witnesses.items()):
        if taken.on_drift == "ignore" or intended.get(subject) is ANYTHING:
            continue
        found = await _compare(app, execution, subject, taken, intended.get(subject))
        if found is not None:
            drifted.append(found)
    return drifted


ANYTHING = object()


def _intended_facts(execution: "Execution") -> dict[str, Any]:
    """Return what files may look like because a begun step of this run was about to change them.

    For a write that is its content. An append, a move or a deletion settles that itself when it is done again.
    """
    intended: dict[str, Any] = {}
    for call in execution.steps.values():
        args = call.arguments.args
        if call.target.name == "files.write":
            intended[f"file:{args[0]}"] = file_fact(as_bytes(args[1]))
        elif call.target.name in ("files.append", "files.delete"):
            intended[f"file:{args[0]}"] = ANYTHING
        elif call.target.name == "files.move":
            intended[f"file:{args[0]}"] = intended[f"file:{args[1]}"] = ANYTHING
    return intended


async def _compare(
    app: "Surrounding", execution: "Execution", subject: str, taken: "Taken", intended: Any
) -> Drifted | None:
    remembered = execution.codec.decode(taken.payload)
    try:
        now = execution.codec.decode(execution.codec.encode(await _observed(app, execution.run, taken), where=subject))
    except Exception as error:  # noqa: BLE001  # what cannot be observed cannot be relied upon
        why = f"cannot be observed: {type(error).__name__}: {error}"
        return Drifted(subject, taken.on_drift, remembered, None, why)
    if now == remembered or (intended is not None and now == intended):
        return None
    payload = execution.codec.encode(now, where=subject)
    return Drifted(subject, taken.on_drift, remembered, now, readable_difference(remembered, now), payload)


async def _observed(app: "Surrounding", run: str, taken: "Taken") -> Any:
    """Observe on a thread: a large file or a slow server must not stop the loop."""
    future: asyncio.Future[tuple[Any, BaseException | None]] = app.loop.create_future()

    def done(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((value, error))

    app.threads.start(run, taken.witness.observe, done)
    value, error = await future
    if error is not None:
        raise error
    return value


def readable_difference(before: Any, after: Any) -> str:
    """Return a difference as a person reads it: for texts the diff itself, else both values."""
    old, new = _text_of(before), _text_of(after)
    if old is not None and new is not None:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "as remembered", "as it is now", lineterm="", n=2)
        return "\n".join(lines)[:20_000]
    return f"remembered {_short(before)}, now {_short(after)}"


def _text_of(fact: Any) -> str | None:
    if isinstance(fact, dict) and "exists" in fact:
        return fact.get("text") if fact["exists"] else ""
    return fact if isinstance(fact, str) and "\n" in fact else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}…"


def drift_report(drifted: list[Drifted]) -> HoldReport:
    """The outside is not as the run remembers it."""
    subjects = ", ".join(one.subject for one in drifted[:3]) + (" …" if len(drifted) > 3 else "")
    facts = {
        "drift": [{"subject": one.subject, "difference": one.difference} for one in drifted],
        "facts": {one.subject: msgspec.Raw(one.payload) for one in drifted if one.payload},
    }
    without = [] if all(one.payload for one in drifted) else ["accept"]
    return HoldReport("drift", f"{subjects}: not as the run remembers", facts=facts, without=without)
