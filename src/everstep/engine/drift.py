"""Before a run goes on, the outside is compared with what the run remembers of it. Nothing is changed by that.

Observations are made after the replay, which touches nothing, and before anything is settled or done: so the witnesses
are those of the code itself, with their functions. See docs/decisions/0013.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.effects.files import as_bytes
from everstep.effects.witnesses import file_fact, file_subject, read_file
from everstep.engine.holding import HoldReport

if TYPE_CHECKING:
    from everstep.effects.witnesses import Taken
    from everstep.engine.execution import Execution
    from everstep.engine.surrounding import Surrounding


class Drifted(msgspec.Struct):
    """A witness that no longer holds."""

    subject: str
    on_drift: str
    remembered: Any
    now: Any
    difference: str
    payload: bytes = b""


Intended = Callable[[Any, Any], bool]
"""Whether a fact may be another one than it was (remembered, now), because a begun step was about to change it."""


async def find_drift(app: "Surrounding", execution: "Execution", *, ignored: bool = False) -> list[Drifted]:
    """Observe every fact that the run remembers and return those that are others now; `ignored` ones if wanted."""
    intended = _intended(execution)
    drifted: list[Drifted] = []
    for subject, taken in list(execution.witnesses.items()):
        if taken.on_drift == "ignore" and not ignored:
            continue
        found = await _compare(app, execution, subject, taken, intended.get(subject, _nothing))
        if found is not None:
            drifted.append(found)
    return drifted


def _nothing(remembered: Any, now: Any) -> bool:
    return False


def _intended(execution: "Execution") -> dict[str, Intended]:
    """Return what files may look like because a begun step of this run was about to change them."""
    intended: dict[str, Intended] = {}
    for call in execution.steps.values():
        name, args = call.target.name, call.arguments.args
        if call.call not in execution.begun or not name.startswith("files."):
            continue
        subject = file_subject(args[0])
        if name == "files.write":
            intended[subject] = partial(_is_fact, file_fact(as_bytes(args[1])))
        elif name == "files.append":
            intended[subject] = partial(_is_appended, args[0], as_bytes(args[1]))
        elif name in ("files.delete", "files.move"):
            intended[subject] = partial(_is_fact, file_fact(None))
        if name == "files.move":
            intended[file_subject(args[1])] = partial(_has_digest, args[3])
    return intended


def _is_fact(fact: Any, remembered: Any, now: Any) -> bool:
    return bool(now == fact)


def _has_digest(digest: str, remembered: Any, now: Any) -> bool:
    return bool(now.get("digest") == digest)


def _is_appended(path: str, added: bytes, remembered: Any, now: Any) -> bool:
    data = read_file(path) or b""
    before = data[: len(data) - len(added)]
    was = file_fact(before) if remembered["exists"] or before else file_fact(None)
    return data.endswith(added) and was == remembered


async def _compare(
    app: "Surrounding", execution: "Execution", subject: str, taken: "Taken", intended: Intended
) -> Drifted | None:
    remembered = execution.codec.decode(taken.payload)
    try:
        payload = execution.codec.encode(await _observed(app, execution.run, taken), where=subject)
        now = execution.codec.decode(payload)
    except Exception as error:  # noqa: BLE001  # what cannot be observed cannot be relied upon
        why = f"cannot be observed: {type(error).__name__}: {error}"
        return Drifted(subject, taken.on_drift, remembered, None, why)
    if payload == taken.payload or now == remembered or intended(remembered, now):
        return None
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
    """Return a difference as a person reads it: of texts, folders and several rows a diff, else both values."""
    old, new = _text_of(before), _text_of(after)
    if _are_rows(before) and _are_rows(after) and max(len(before), len(after)) > 1:
        old, new = _lines_of(before), _lines_of(after)
    if old is not None and new is not None:
        both = old.splitlines(), new.splitlines()
        from difflib import unified_diff

        lines = unified_diff(*both, "as remembered", "as it is now", lineterm="", n=2)
        if difference := "\n".join(lines)[:20_000]:  # none if only the end of a line differs
            return difference
    return f"remembered {_short(before)}, now {_short(after)}"


def _text_of(fact: Any) -> str | None:
    if isinstance(fact, dict) and "exists" in fact:
        if isinstance(files := fact.get("files"), dict):  # of a folder: a line for each file
            return "".join(f"{name}  {str(digest)[:12]}\n" for name, digest in files.items())
        return fact.get("text") if fact["exists"] else ""
    return fact if isinstance(fact, str) and "\n" in fact else None


def _are_rows(fact: Any) -> bool:
    return isinstance(fact, list) and all(isinstance(row, list) for row in fact)


def _lines_of(rows: list[list[Any]]) -> str:
    return "".join(", ".join(map(repr, row)) + "\n" for row in rows)


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
